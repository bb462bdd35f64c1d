"""Ollama's API over llama-server's, for editors and programs that speak no other.

Requests are translated into OpenAI's, answers into lines of JSON. A request is honoured or refused in a sentence. Only
options that say how Ollama would place a model are passed over: `pyorch serve` decides that.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import itertools
import json
import math
import re
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.address import Address
from pyorch.serve.routes import read_json

if TYPE_CHECKING:
    from pyorch.serve.model_process import Model

VERSION = "0.14.0"  # of Ollama, whose requests are understood: programs ask for it

_EMBEDS = ("/api/embed", "/api/embeddings")
PATHS = ("/api/chat", "/api/generate", "/api/show", *_EMBEDS)

Json = dict[str, Any]

# By what Ollama calls them in "options".
_OPTIONS = {"num_predict": "max_tokens", "num_keep": "n_keep"} | {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "presence_penalty",
                            "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "repeat_penalty",
                            "repeat_last_n")}
# Of these the server decides when it loads a model, and no answer depends on them.
_OF_PLACEMENT = ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap",
                 "use_mlock", "draft_num_predict")
_NOT_SERVED = {
    "images": "the models read text only", "template": "the template of the model's file counts",
    "context": 'send "messages" to /api/chat, which has the conversation', "width": "no model makes pictures",
    "height": "no model makes pictures", "steps": "no model makes pictures",
}
_LEVELS = ("low", "medium", "high")  # of "think"
_MAX_TOP = 20  # logprobs

_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNIT = "|".join(_UNITS)
_FAR = 100 * 365 * 86400  # seconds: of a model that is never unloaded


def tags(models: Iterable[Model]) -> Json:
    """The answer to GET /api/tags."""
    return {"models": [_entry(model) for model in models if model.path.exists()]}


def running(models: Iterable[Model], key: str) -> Json:
    """The answer to GET /api/ps, of models that are loaded."""
    return {"models": [
        _entry(model) | {"expires_at": _iso(min(model.idle_at, time.time() + _FAR)), "size_vram": 0,
                         "context_length": _served_ctx(model.port, key) or 0}
        for model in models if model.path.exists()]}


def _served_ctx(port: int, key: str) -> int | None:
    """Tokens of context that a request may have, None where the server of the model does not answer."""
    properties = Address("127.0.0.1", port, "").get("/props", key)
    return None if properties is None else json.loads(properties)["default_generation_settings"]["n_ctx"]


def show(path: Path) -> Json:
    """The answer to POST /api/show. PyorchError for a file that is no model."""
    with ModelMap(path):
        about = _About.read(path)
    return {"details": about.details(), "capabilities": about.capabilities(), "modelfile": f"FROM {path.name}",
            "template": about.template, "parameters": "", "license": "", "system": "",
            "modified_at": _iso(path.stat().st_mtime), "model_info": about.metadata}


@dataclass(frozen=True)
class _About:
    """What a file says about its model."""

    arch: str
    n_params: int
    type: str
    n_bytes: int
    template: str
    metadata: Json

    @classmethod
    def read(cls, path: Path) -> _About:
        """Kept until the file changes: programs ask for all models again and again."""
        try:
            stat = path.stat()
        except OSError:
            return _UNKNOWN
        return _read(path, stat.st_mtime_ns, stat.st_size)

    def details(self) -> Json:
        return {"format": "gguf", "family": self.arch, "families": [self.arch], "parent_model": "",
                "parameter_size": _count(self.n_params), "quantization_level": self.type}

    def capabilities(self) -> list[str]:
        found = {"tools": "tools" in self.template, "thinking": self.thinks,
                 "insert": any("fim_pre" in key or "prefix_token" in key for key in self.metadata)}
        if self.metadata.get(f"{self.arch}.attention.causal") == 0:
            return ["embedding"]
        return ["completion", *(name for name, is_there in found.items() if is_there)]

    @property
    def thinks(self) -> bool:
        return any(word in self.template for word in ("enable_thinking", "reasoning_effort", "<think>"))


_UNKNOWN = _About("unknown", 0, "unknown", 0, "", {})
_KEYS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count",
         "expert_used_count", "attention.causal", "attention.head_count", "attention.head_count_kv", "rope.freq_base",
         "vocab_size")
_GENERAL_KEYS = ("general.name", "general.size_label", "general.file_type", "tokenizer.ggml.model",
                 "tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id", "tokenizer.ggml.bos_token_id",
                 "tokenizer.ggml.eos_token_id")


@functools.lru_cache(maxsize=256)
def _read(path: Path, _time: int, n_bytes: int) -> _About:
    try:
        with ModelMap(path) as model_map:
            info, arch = model_map.info, model_map.info.arch
            values = {key: next((value for kind in (int, float, str) if (
                value := model_map.metadata(key, kind)) is not None), None)
                for key in (*_GENERAL_KEYS, *(f"{arch}.{key}" for key in _KEYS))}
            values |= {"general.architecture": arch, "general.parameter_count": info.n_params,
                       f"{arch}.context_length": model_map.trained_ctx}
            return _About(arch, info.n_params, _type_name(values["general.file_type"]), info.file_bytes,
                          model_map.metadata("tokenizer.chat_template", str, ""),
                          {key: value for key, value in values.items() if value is not None})
    except FormatError:  # it is listed, and a request for it says why it cannot be loaded
        return replace(_UNKNOWN, n_bytes=n_bytes)


def _type_name(number: object) -> str:
    import gguf  # takes a tenth of a second

    try:
        return re.sub("^(MOSTLY|ALL)_", "", gguf.LlamaFileType(number).name)
    except ValueError:
        return "unknown"


def _count(n: int) -> str:
    """7.5M, as Ollama writes numbers of parameters."""
    unit, name = next(((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")) if n >= unit),
                      (1, ""))
    return f"{n / unit:.1f}{name}" if n else "unknown"


def _entry(model: Model) -> Json:
    about, time_ = _About.read(model.path), model.path.stat().st_mtime
    # Programs tell models apart by it, and show its beginning. To read all of a file takes minutes.
    digest = hashlib.sha256(f"{model.name}\0{about.n_bytes}\0{time_}".encode(errors="surrogateescape")).hexdigest()
    return {"name": model.name, "model": model.name, "size": about.n_bytes, "digest": digest,
            "details": about.details(), "modified_at": _iso(time_)}


class Refused(PyorchError):
    """By the server of the model, with a status."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def read(body: bytes) -> Json:
    """What a request asks, with the name of its model as "model". PyorchError where it names none, or is no JSON."""
    asked = read_json(body)
    try:
        asked["model"] = str(asked.get("model") or asked["name"])
    except (TypeError, AttributeError, KeyError):
        raise PyorchError('a request is an object of JSON with the name of a "model"') from None
    for key, kind in (("messages", list), ("options", dict), ("prompt", str), ("suffix", str), ("tools", list)):
        if not isinstance(asked.get(key) or kind(), kind):
            raise PyorchError(f'"{key}" is {json.dumps(asked[key])}, and has another kind')
    if not all(isinstance(message, dict) for message in asked.get("messages") or ()):
        raise PyorchError('each of "messages" is an object')
    return asked


def keep_alive(asked: Json) -> float | None:
    """Seconds for which the model is to stay loaded without a request; None: the request does not say."""
    value = asked.get("keep_alive")
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        with contextlib.suppress(ValueError):
            if re.fullmatch(rf"-?([0-9.]+({_UNIT}))+", value):
                parts = re.findall(rf"([0-9.]+)({_UNIT})", value)
                seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
                seconds = -seconds if value.startswith("-") else seconds
            else:
                seconds = float(value)
    if math.isnan(seconds):
        raise PyorchError(f'"keep_alive" is {json.dumps(value)}: give seconds, or text such as "5m"; -1 is for ever')
    return seconds if seconds >= 0 else math.inf


def to_openai(path: str, asked: Json, model: Model) -> tuple[str, Json]:
    """The path and the body that ask llama-server for the same; the body is empty where nothing is asked but to load
    the model. PyorchError for what llama-server cannot be asked."""
    for name, why in _NOT_SERVED.items():
        if asked.get(name):
            raise PyorchError(f'"{name}" is not served here: {why}')
    body: Json = {"model": model.name} | _sampling(asked.get("options") or {})
    if path in _EMBEDS:
        given = asked.get("prompt" if path == "/api/embeddings" else "input") or []
        return "/v1/embeddings", {"model": model.name, "input": given} if given else {}
    body |= {"stream": bool(asked.get("stream", True)), "stream_options": {"include_usage": True}}
    form = asked.get("format")
    if form:
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        body["response_format"] = {"type": "json_object"} if form == "json" else schema
    n_top = _n_top(asked)
    if path == "/api/generate":
        prompt, suffix = asked.get("prompt") or "", asked.get("suffix")
        if suffix:
            if form:
                raise PyorchError('"format" and "suffix" do not go together')
            return "/infill", body | {"input_prefix": prompt, "input_suffix": suffix} | (
                {"n_probs": n_top} if n_top else {})
        if asked.get("raw"):
            if form:  # of a chat, which a raw prompt is not
                body["json_schema"] = {} if form == "json" else form
                del body["response_format"]
            body |= {"prompt": prompt} | ({"logprobs": n_top} if n_top else {})
            return "/v1/completions", body if prompt else {}
        said = [("system", asked.get("system")), ("user", prompt)]
        messages = [{"role": role, "content": text} for role, text in said if text] if prompt else []
    else:
        if asked.get("tools"):
            body["tools"] = asked["tools"]
        made, answered = itertools.count(), itertools.count()  # calls have no names: they are answered in order
        messages = [_message(one, made, answered) for one in asked.get("messages") or []]
    if not messages:
        return "", {}
    body |= _thinking(asked, model) | ({"logprobs": True, "top_logprobs": n_top} if n_top else {})
    return "/v1/chat/completions", body | {"messages": messages}


def _sampling(options: Json) -> Json:
    body: Json = {}
    for name, value in options.items():
        if value is None or name in _OF_PLACEMENT or name == "num_ctx":  # which check_context() looks at
            continue
        if name in _OPTIONS:
            body[_OPTIONS[name]] = value
        elif value is not False:
            raise PyorchError(f'the option "{name}" is not served here')
    if body.get("max_tokens", 0) < 0:  # until the text ends
        del body["max_tokens"]
    return body


def _n_top(asked: Json) -> int:
    """Alternatives of each token that llama-server is asked for, 0 where nobody wants probabilities."""
    n_top = asked.get("top_logprobs") or 0
    if isinstance(n_top, bool) or not isinstance(n_top, int) or not 0 <= n_top <= _MAX_TOP:
        raise PyorchError(f'"top_logprobs" is {json.dumps(n_top)}, and must be a whole number from 0 to {_MAX_TOP}')
    if n_top and not asked.get("logprobs"):
        raise PyorchError('"top_logprobs" goes with "logprobs": true')
    return max(1, n_top) if asked.get("logprobs") else 0


def _thinking(asked: Json, model: Model) -> Json:
    think = asked.get("think")
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in _LEVELS:
        raise PyorchError(f'"think" is {json.dumps(think)}: give true, false, or one of {", ".join(_LEVELS)}')
    about = _About.read(model.path)
    if not about.thinks:
        if think:
            raise PyorchError(f'"{model.name}" does not support thinking')
        return {}
    if isinstance(think, str):
        if "reasoning_effort" not in about.template:
            raise PyorchError(f'"think" is "{think}", and the template of "{model.name}" knows true and false only')
        return {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": think}
    if not think and "enable_thinking" not in about.template:
        raise PyorchError(f'"think" is false, and the template of "{model.name}" cannot leave thinking out')
    return {"chat_template_kwargs": {"enable_thinking": think}}


def check_context(port: int, asked: Json, key: str) -> None:
    """Refused where a request wants a longer context than the model is served with."""
    wanted = (asked.get("options") or {}).get("num_ctx")
    n_ctx = _served_ctx(port, key) if wanted else None
    if n_ctx is not None and (not isinstance(wanted, int) or wanted > n_ctx):
        raise Refused(f'"num_ctx" is {json.dumps(wanted)}, and the model is served with {n_ctx} tokens of context: '
                      "start the server with a larger --ctx", 400)


def _message(said: Json, made: Iterator[int], answered: Iterator[int]) -> Json:
    if said.get("images"):
        raise PyorchError(f'"images" are not served here: {_NOT_SERVED["images"]}')
    message: Json = {"role": said.get("role", "user"), "content": said.get("content") or ""}
    if said.get("thinking"):
        message["reasoning_content"] = said["thinking"]
    calls = [call.get("function") or {} for call in said.get("tool_calls") or []]
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{next(made)}", "type": "function",
             "function": {"name": call.get("name"), "arguments": json.dumps(call.get("arguments", {}))}}
            for call in calls]
    if message["role"] == "tool":
        message["tool_call_id"] = f"call_{next(answered)}"
    return message


class Reply:
    """Makes what Ollama would answer to one request of what llama-server answers.

    load_seconds: what it took until the model was loaded.
    """

    def __init__(self, path: str, asked: Json) -> None:
        self._path, self._asked, self._began = path, asked, time.monotonic()
        self._calls: dict[int, Json] = {}  # of tools: they come in pieces
        self._reason = ""
        self._last: Json = {}
        self._values: list[Json] = []  # of tokens that no line has named yet
        self.load_seconds = 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def part(self, chunk: Json) -> Json | None:
        """Of an answer that comes in parts, the next line; None where nothing was said."""
        choice = next(iter(chunk.get("choices") or ()), chunk)
        reason = choice.get("finish_reason") or ("length" if choice.get("stop_type") == "limit" else "")
        self._reason = reason or self._reason
        if choice.get("stop") is True:  # the last one of /infill
            self._last["usage"] = {"prompt_tokens": choice.get("tokens_evaluated", 0),
                                   "completion_tokens": choice.get("tokens_predicted", 0)}
        self._last |= {key: chunk[key] for key in ("usage", "timings") if chunk.get(key)}
        said = choice.get("delta") or choice.get("message") or choice
        for call in said.get("tool_calls") or ():
            known = self._calls.setdefault(call.get("index", len(self._calls)), {"name": "", "arguments": ""})
            for key in known:
                known[key] += call.get("function", {}).get(key) or ""
        if self._asked.get("logprobs"):
            values = (choice.get("logprobs") or {}).get("content") or choice.get("completion_probabilities") or ()
            self._values += map(self._value, values)
        text, thinking = said.get("content") or choice.get("text") or "", said.get("reasoning_content") or ""
        return self._line(text, thinking) if text or thinking else None

    def end(self, reason: str = "") -> Json:
        """The last line. reason: of an answer without text."""
        if self._path in _EMBEDS:  # nothing was asked but to load or to unload the model
            return self._embeddings({})
        usage, timings = self._last.get("usage", {}), self._last.get("timings", {})
        line = self._line("", "") | {
            "done": True, "done_reason": reason or {"length": "length"}.get(self._reason, "stop"),
            "total_duration": int(1e9 * self.seconds()), "load_duration": int(1e9 * self.load_seconds),
            "prompt_eval_count": usage.get("prompt_tokens", 0), "eval_count": usage.get("completion_tokens", 0),
            "prompt_eval_duration": int(1e6 * timings.get("prompt_ms", 0)),
            "eval_duration": int(1e6 * timings.get("predicted_ms", 0)),
        }
        if self._calls and "message" in line:
            line["message"]["tool_calls"] = [
                {"function": {"name": call["name"], "arguments": _arguments(call["arguments"])}}
                for _, call in sorted(self._calls.items())]
        return line

    def whole(self, answer: Json) -> Json:
        """Of an answer that comes at once."""
        if self._path in _EMBEDS:
            return self._embeddings(answer)
        said = self.part(answer) or {}
        line = self.end()
        if "message" in said:
            said["message"] = line["message"] | said["message"]
        return line | said | {"done": True}

    def _embeddings(self, answer: Json) -> Json:
        vectors = [_cut(one["embedding"], self._asked.get("dimensions")) for one in answer.get("data", ())]
        if self._path == "/api/embeddings":
            return {"embedding": vectors[0] if vectors else []}
        return {"model": self._asked["model"], "embeddings": vectors, "total_duration": int(1e9 * self.seconds()),
                "load_duration": int(1e9 * self.load_seconds),
                "prompt_eval_count": (answer.get("usage") or {}).get("prompt_tokens", 0)}

    def _value(self, value: Json) -> Json:
        """Of a token, what its probability was, and of as many alternatives as were asked for."""
        n_top = self._asked.get("top_logprobs") or 0
        named = {key: value[key] for key in ("token", "logprob", "bytes") if key in value}
        alternatives = [{key: other[key] for key in ("token", "logprob", "bytes") if key in other}
                        for other in (value.get("top_logprobs") or ())[:n_top]]
        return named | ({"top_logprobs": alternatives} if n_top else {})

    def _line(self, text: str, thinking: str) -> Json:
        said: Json = {"thinking": thinking} if thinking else {}
        if self._path == "/api/chat":
            said = {"message": {"role": "assistant", "content": text} | said}
        else:
            said = {"response": text} | said
        if self._values:
            said["logprobs"], self._values = self._values, []
        return {"model": self._asked["model"], "created_at": _iso(time.time()), "done": False} | said


def _cut(vector: list[float], dimensions: int | None) -> list[float]:
    """The first dimensions of an embedding, of length 1 again."""
    if not dimensions or dimensions >= len(vector):
        return vector
    length = math.sqrt(sum(value * value for value in vector[:dimensions])) or 1.0
    return [value / length for value in vector[:dimensions]]


def ask(port: int, path: str, body: Json, key: str, client: socket.socket) -> Iterator[Json]:
    """Asks the server of a model: its answer, or the parts of it. Ends when the client goes.

    Raises:
        Refused: The server refuses, or it ends before it has answered.
    """
    if not body:
        return
    connection, ended = http.client.HTTPConnection("127.0.0.1", port), threading.Event()
    try:
        connection.connect()
        threading.Thread(target=_end_with, args=(client, connection.sock, ended), daemon=True).start()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if not body.get("stream") or answer.status != 200:
            yield _checked(json.loads(answer.read()))
            return
        is_whole = False
        for line in answer:
            is_whole = is_whole or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                part = _checked(json.loads(line.removeprefix(b"data: ")))
                is_whole = is_whole or part.get("stop") is True  # of /infill
                yield part
        if not is_whole:
            raise http.client.IncompleteRead(b"")
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise Refused("the server of the model ended before it had answered", 502) from error
    finally:
        ended.set()
        connection.close()


def _checked(part: Json) -> Json:
    error = part.get("error")
    if error:
        raise Refused(error.get("message", ""), error.get("code", 500))
    return part


def _end_with(client: socket.socket, server: socket.socket, ended: threading.Event) -> None:
    """Who no longer waits for an answer has nothing more computed."""
    readable = select.poll()
    readable.register(client, select.POLLIN)
    with contextlib.suppress(OSError):
        while not ended.is_set():
            if readable.poll(500):
                if not client.recv(1, socket.MSG_PEEK):
                    server.shutdown(socket.SHUT_RDWR)
                return


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
