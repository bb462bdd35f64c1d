"""Ollama's API over llama-server's, for editors that speak no other: /api/tags, /api/show, /api/chat, /api/generate.

Requests are translated into OpenAI's, answers into lines of JSON. What has no meaning here is passed over: keep_alive
(the server has its own), and a model's own parameters and template (those of the GGUF count).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap

VERSION = "0.6.4"  # of Ollama, whose requests are understood: programs ask for it

PATHS = ("/api/chat", "/api/generate", "/api/show")

Json = dict[str, Any]

# By what Ollama calls them in "options".
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repeat_penalty", "repeat_last_n": "repeat_last_n"} | {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "presence_penalty",
                            "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")}


def tags(paths: dict[str, Path]) -> Json:
    """The answer to GET /api/tags."""
    return {"models": [
        {"name": name, "model": name, "size": path.stat().st_size, "digest": "", "details": _details(""),
         "modified_at": _iso(path.stat().st_mtime)} for name, path in paths.items() if path.exists()]}


def show(path: Path) -> Json:
    """The answer to POST /api/show. PyorchError for a file that is no model."""
    with ModelMap(path) as model_map:
        arch, template = model_map.info.arch, model_map.metadata("tokenizer.chat_template", str, "")
        tools = ["tools"] if "tools" in template else []
        return {"details": _details(arch), "capabilities": ["completion", *tools], "modelfile": "", "template": "",
                "model_info": {"general.architecture": arch, f"{arch}.context_length": model_map.trained_ctx}}


class Refused(PyorchError):
    """By the server of the model, with a status."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def read(body: bytes) -> Json:
    """What a request asks, with the name of its model as "model". PyorchError where it names none."""
    try:
        asked = json.loads(body)
        asked["model"] = str(asked.get("model") or asked["name"])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise PyorchError('a request is an object of JSON with the name of a "model"') from None
    for key, kind in (("messages", list), ("options", dict), ("prompt", str), ("tools", list)):
        if not isinstance(asked.get(key) or kind(), kind):
            raise PyorchError(f'"{key}" is {json.dumps(asked[key])}, and has another kind')
    if not all(isinstance(message, dict) for message in asked.get("messages") or ()):
        raise PyorchError('each of "messages" is an object')
    return asked


def to_openai(path: str, asked: Json, name: str) -> tuple[str, Json]:
    """The path and the body that ask llama-server for the same as /api/chat or /api/generate; one without messages
    or prompt is for ask(), which has nothing to ask then. PyorchError for what it cannot be asked."""
    options = asked.get("options") or {}
    body: Json = {"model": name, "stream": bool(asked.get("stream", True)), "stream_options": {"include_usage": True}}
    body |= {_OPTIONS[key]: value for key, value in options.items() if key in _OPTIONS and value is not None}
    if body.get("max_tokens", 0) < 0:  # until the text ends
        del body["max_tokens"]
    form = asked.get("format")
    if form:
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        body["response_format"] = {"type": "json_object"} if form == "json" else schema
    if path == "/api/generate":
        if asked.get("images") or asked.get("suffix"):
            raise PyorchError('"images" and "suffix" are not served here')
        if asked.get("raw"):
            return "/v1/completions", body | {"prompt": asked.get("prompt", "")}
        said = [("system", asked.get("system")), ("user", asked.get("prompt"))]
        return "/v1/chat/completions", body | {
            "messages": [{"role": role, "content": text} for role, text in said if text]}
    if asked.get("tools"):
        body["tools"] = asked["tools"]
    made, answered = itertools.count(), itertools.count()  # calls of tools have no names: they are answered in order
    return "/v1/chat/completions", body | {
        "messages": [_message(one, made, answered) for one in asked.get("messages") or []]}


def _message(said: Json, made: Iterator[int], answered: Iterator[int]) -> Json:
    if said.get("images"):
        raise PyorchError('"images" are not served here')
    message: Json = {"role": said.get("role", "user"), "content": said.get("content", "")}
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
    """Makes what Ollama would answer to one request of what llama-server answers."""

    def __init__(self, path: str, name: str) -> None:
        self._chats, self._name, self._began = path == "/api/chat", name, time.monotonic()
        self._calls: dict[int, Json] = {}  # of tools: they come in pieces
        self._reason = ""
        self._last: Json = {}

    def part(self, chunk: Json) -> Json | None:
        """Of an answer that comes in parts, the next line; None where nothing was said."""
        choice = next(iter(chunk.get("choices") or ()), {})
        self._reason = choice.get("finish_reason") or self._reason
        self._last |= {key: chunk[key] for key in ("usage", "timings") if chunk.get(key)}
        said = choice.get("delta") or choice.get("message") or {}
        for call in said.get("tool_calls") or ():
            known = self._calls.setdefault(call.get("index", len(self._calls)), {"name": "", "arguments": ""})
            for key in known:
                known[key] += call.get("function", {}).get(key) or ""
        text, thinking = said.get("content") or choice.get("text") or "", said.get("reasoning_content") or ""
        return self._line(text, thinking) if text or thinking else None

    def end(self) -> Json:
        """The last line."""
        usage, timings = self._last.get("usage", {}), self._last.get("timings", {})
        total = time.monotonic() - self._began
        line = self._line("", "") | {
            "done": True, "done_reason": {"": "load", "length": "length"}.get(self._reason, "stop"),
            "total_duration": int(1e9 * total), "load_duration": 0,
            "prompt_eval_count": usage.get("prompt_tokens", 0), "eval_count": usage.get("completion_tokens", 0),
            "prompt_eval_duration": int(1e6 * timings.get("prompt_ms", 0)),
            "eval_duration": int(1e6 * timings.get("predicted_ms", 0)),
        }
        if self._calls and self._chats:
            line["message"]["tool_calls"] = [
                {"function": {"name": call["name"], "arguments": _arguments(call["arguments"])}}
                for _, call in sorted(self._calls.items())]
        return line

    def whole(self, answer: Json) -> Json:
        """Of an answer that comes at once."""
        said = self.part(answer) or {}
        line = self.end()
        if "message" in said:
            said["message"] = line["message"] | said["message"]
        return line | said | {"done": True}

    def _line(self, text: str, thinking: str) -> Json:
        said: Json = {"thinking": thinking} if thinking else {}
        said = {"message": {"role": "assistant", "content": text} | said} if self._chats else {"response": text} | said
        return {"model": self._name, "created_at": _iso(time.time()), "done": False} | said


def ask(port: int, path: str, body: Json, key: str, client: socket.socket) -> Iterator[Json]:
    """Asks the server of a model: its answer, or the parts of it. Ends when the client goes.

    Raises Refused as the server refuses, OSError where it ends.
    """
    if not body.get("messages", body.get("prompt")):
        return
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.connect()
        server = connection.sock
        threading.Thread(target=_end_with, args=(client, server), daemon=True).start()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if not body["stream"] or answer.status != 200:
            yield _checked(json.loads(answer.read()))
            return
        for line in answer:
            if line.startswith(b"data: {"):
                yield _checked(json.loads(line.removeprefix(b"data: ")))
    except (http.client.HTTPException, ValueError) as error:
        raise OSError("the server of the model ended before it answered") from error
    finally:
        connection.close()


def _checked(part: Json) -> Json:
    if "error" in part:
        raise Refused(part["error"].get("message", ""), part["error"].get("code", 500))
    return part


def _end_with(client: socket.socket, server: socket.socket) -> None:
    """Who no longer waits for an answer has nothing more computed."""
    with contextlib.suppress(OSError):
        if not client.recv(1, socket.MSG_PEEK):
            server.shutdown(socket.SHUT_RDWR)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _details(arch: str) -> Json:
    return {"format": "gguf", "family": arch, "families": [arch] if arch else [], "parent_model": "",
            "parameter_size": "", "quantization_level": ""}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
