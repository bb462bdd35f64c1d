"""Ollama's API on top of llama-server's, for editors and programs that support no other API.

Requests are translated to OpenAI's API, answers to lines of JSON. Each part of a request is obeyed or refused with a
message. Only options for the placement of a model are ignored, because `pyorch serve` decides about that.
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

VERSION = "0.14.0"  # programs ask for it; requests of this version of Ollama are supported

_EMBEDS = ("/api/embed", "/api/embeddings")
PATHS = ("/api/chat", "/api/generate", "/api/show", *_EMBEDS)

Json = dict[str, Any]

# Sampling parameters by their names in Ollama's "options".
_OPTIONS = {"num_predict": "max_tokens", "num_keep": "n_keep"} | {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "presence_penalty",
                            "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "repeat_penalty",
                            "repeat_last_n")}
# The server fixes these when it loads a model, and they do not change answers.
_OF_PLACEMENT = ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap",
                 "use_mlock", "draft_num_predict")
_NOT_SERVED = {
    "images": "the models read text only", "template": "the template of the model's file counts",
    "context": 'send "messages" to /api/chat, which has the conversation', "width": "no model makes pictures",
    "height": "no model makes pictures", "steps": "no model makes pictures",
}
_LEVELS = ("low", "medium", "high")  # values of "think"
_MAX_TOP = 20  # log-probabilities for a token

_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNIT = "|".join(_UNITS)
_FAR = 100 * 365 * 86400  # seconds until a model expires that is never unloaded


def tags(models: Iterable[Model]) -> Json:
    """Returns the answer to GET /api/tags."""
    return {"models": [_entry(model) for model in models if model.path.exists()]}


def running(models: Iterable[Model], key: str) -> Json:
    """Returns the answer to GET /api/ps: the loaded models."""
    return {"models": [
        _entry(model) | {"expires_at": _iso(min(model.idle_at, time.time() + _FAR)), "size_vram": 0,
                         "context_length": _served_ctx(model.port, key) or 0}
        for model in models if model.path.exists()]}


def _served_ctx(port: int, key: str) -> int | None:
    """Returns the tokens of context for a request, None if the model's server does not answer."""
    properties = Address("127.0.0.1", port, "").get("/props", key)
    return None if properties is None else json.loads(properties)["default_generation_settings"]["n_ctx"]


def show(path: Path) -> Json:
    """Returns the answer to POST /api/show.

    Raises:
        PyorchError: The file is no model.
    """
    with ModelMap(path):
        about = _About.read(path)
    return {"details": about.details(), "capabilities": about.capabilities(), "modelfile": f"FROM {path.name}",
            "template": about.template, "parameters": "", "license": "", "system": "",
            "modified_at": _iso(path.stat().st_mtime), "model_info": about.metadata}


@dataclass(frozen=True)
class _About:
    """The facts about a model in its file."""

    arch: str
    n_params: int
    type: str
    n_bytes: int
    template: str
    metadata: Json

    @classmethod
    def read(cls, path: Path) -> _About:
        """Reads a file. The result is cached until the file changes: programs ask for all models again and again."""
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
    except FormatError:  # list the model all the same; a request for it then reports the error
        return replace(_UNKNOWN, n_bytes=n_bytes)


def _type_name(number: object) -> str:
    import gguf  # takes 100 ms

    try:
        return re.sub("^(MOSTLY|ALL)_", "", gguf.LlamaFileType(number).name)
    except ValueError:
        return "unknown"


def _count(n: int) -> str:
    """Formats a number of parameters as Ollama does: 7.5M."""
    unit, name = next(((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")) if n >= unit),
                      (1, ""))
    return f"{n / unit:.1f}{name}" if n else "unknown"


def _entry(model: Model) -> Json:
    about, time_ = _About.read(model.path), model.path.stat().st_mtime
    # Programs identify a model by the digest and show its beginning. Hashing the whole file would take minutes.
    digest = hashlib.sha256(f"{model.name}\0{about.n_bytes}\0{time_}".encode(errors="surrogateescape")).hexdigest()
    return {"name": model.name, "model": model.name, "size": about.n_bytes, "digest": digest,
            "details": about.details(), "modified_at": _iso(time_)}


class Refused(PyorchError):
    """The model's server refused the request."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def read(body: bytes) -> Json:
    """Reads a request, which names its model as "model".

    Raises:
        PyorchError: The body is no JSON, or names no model.
    """
    asked = read_json(body)
    try:
        asked["model"] = str(asked.get("model") or asked["name"])
    except (TypeError, AttributeError, KeyError):
        raise PyorchError('a request is an object of JSON with the name of a "model"') from None
    for key, kind in (("messages", list), ("options", dict), ("prompt", str), ("suffix", str), ("tools", list)):
        if not isinstance(asked.get(key) or kind(), kind):
            raise PyorchError(f'"{key}" is {json.dumps(asked[key])}, which has the wrong type')
    if not all(isinstance(message, dict) for message in asked.get("messages") or ()):
        raise PyorchError('each of "messages" is an object')
    return asked


def keep_alive(asked: Json) -> float | None:
    """Returns the seconds without a request after which the model is unloaded, None if the request gives no time."""
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
    """Translates a request for llama-server.

    Returns:
        The path and the body. The body is empty if the request only loads the model.

    Raises:
        PyorchError: llama-server cannot do part of the request.
    """
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
                raise PyorchError('"format" cannot be combined with "suffix"')
            return "/infill", body | {"input_prefix": prompt, "input_suffix": suffix} | (
                {"n_probs": n_top} if n_top else {})
        if asked.get("raw"):
            if form:  # needs a chat, which a raw prompt is not
                body["json_schema"] = {} if form == "json" else form
                del body["response_format"]
            body |= {"prompt": prompt} | ({"logprobs": n_top} if n_top else {})
            return "/v1/completions", body if prompt else {}
        said = [("system", asked.get("system")), ("user", prompt)]
        messages = [{"role": role, "content": text} for role, text in said if text] if prompt else []
    else:
        if asked.get("tools"):
            body["tools"] = asked["tools"]
        made, answered = itertools.count(), itertools.count()  # Ollama's calls have no ids: answers come in order
        messages = [_message(one, made, answered) for one in asked.get("messages") or []]
    if not messages:
        return "", {}
    body |= _thinking(asked, model) | ({"logprobs": True, "top_logprobs": n_top} if n_top else {})
    return "/v1/chat/completions", body | {"messages": messages}


def _sampling(options: Json) -> Json:
    body: Json = {}
    for name, value in options.items():
        if value is None or name in _OF_PLACEMENT or name == "num_ctx":  # check_context() checks num_ctx
            continue
        if name in _OPTIONS:
            body[_OPTIONS[name]] = value
        elif value is not False:
            raise PyorchError(f'the option "{name}" is not served here')
    if body.get("max_tokens", 0) < 0:  # unlimited
        del body["max_tokens"]
    return body


def _n_top(asked: Json) -> int:
    """Returns the number of alternatives for each token, 0 without log-probabilities."""
    n_top = asked.get("top_logprobs") or 0
    if isinstance(n_top, bool) or not isinstance(n_top, int) or not 0 <= n_top <= _MAX_TOP:
        raise PyorchError(f'"top_logprobs" is {json.dumps(n_top)}, and must be a whole number from 0 to {_MAX_TOP}')
    if n_top and not asked.get("logprobs"):
        raise PyorchError('"top_logprobs" needs "logprobs": true')
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
            raise PyorchError(f'"think" is "{think}", and the template of "{model.name}" supports only true and false')
        return {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": think}
    if not think and "enable_thinking" not in about.template:
        raise PyorchError(f'"think" is false, and the template of "{model.name}" cannot turn thinking off')
    return {"chat_template_kwargs": {"enable_thinking": think}}


def check_context(port: int, asked: Json, key: str) -> None:
    """Refuses a request for a longer context than the server's.

    Raises:
        Refused: `num_ctx` is larger.
    """
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
    """Translates llama-server's answer to one request into Ollama's.

    Attributes:
        load_seconds: The time until the model was loaded.
    """

    def __init__(self, path: str, asked: Json) -> None:
        self._path, self._asked, self._began = path, asked, time.monotonic()
        self._calls: dict[int, Json] = {}  # tool calls, which arrive in pieces
        self._reason = ""
        self._last: Json = {}
        self._values: list[Json] = []  # log-probabilities that no line has sent yet
        self.load_seconds = 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def part(self, chunk: Json) -> Json | None:
        """Returns the next line for a chunk of a stream, None if the chunk has no text."""
        choice = next(iter(chunk.get("choices") or ()), chunk)
        reason = choice.get("finish_reason") or ("length" if choice.get("stop_type") == "limit" else "")
        self._reason = reason or self._reason
        if choice.get("stop") is True:  # the last chunk of /infill
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
        """Returns the last line of a stream. reason: the reason of an answer without text."""
        if self._path in _EMBEDS:  # the request only loaded or unloaded the model
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
        """Translates an answer that is not streamed."""
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
        """Translates the log-probability of a token and of the requested alternatives."""
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
    """Returns the first dimensions of an embedding, scaled to length 1."""
    if not dimensions or dimensions >= len(vector):
        return vector
    length = math.sqrt(sum(value * value for value in vector[:dimensions])) or 1.0
    return [value / length for value in vector[:dimensions]]


def ask(port: int, path: str, body: Json, key: str, client: socket.socket) -> Iterator[Json]:
    """Sends a request to a model's server. Yields the answer or its chunks; stops if the client disconnects.

    Raises:
        Refused: The server refused the request, or it ended before it answered.
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
                is_whole = is_whole or part.get("stop") is True  # the form of /infill
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
    """Closes the connection to the server when the client disconnects, so that the server stops computing."""
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
