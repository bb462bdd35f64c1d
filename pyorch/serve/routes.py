"""Routes that pyorch adds to llama-server: requests, answers and the table of handlers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyorch.errors import PyorchError, without_folders
from pyorch.serve import origins
from pyorch.serve.library import chat_page, ffi, lib

JSON = "application/json; charset=utf-8"
HTML = "text/html; charset=utf-8"
SCRIPT = "text/javascript; charset=utf-8"
STYLE = "text/css; charset=utf-8"
TEXT = "text/plain; charset=utf-8"

# Why requests of others cannot change settings.
FROM_HERE = ("settings are changed from the machine that serves, at its loopback address, or from anywhere with an API "
             "key (start the server with -- --api-key KEY)")


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for a route.

    Attributes:
        headers: The headers, by name in lower case.
        body: The bytes of the body.
        own: llama-server's own answer, "" if it lacks the route.
        own_status: The status of that answer.
        local: Whether it came over the loopback interface or a Unix socket.
        has_left: Returns whether the client has disconnected. Call it on the handler's thread.
    """

    headers: dict[str, str]
    body: bytes
    own: str
    own_status: int
    local: bool
    has_left: Callable[[], bool]

    def json(self) -> Any:
        """Returns the value of the body; None if it is no JSON, which llama-server reports itself."""
        try:
            return read_json(self.body)
        except PyorchError:
            return None

    def is_from_here(self) -> bool:
        """Returns whether a program on this machine sent the request, or a page of this server in a browser here."""
        return origins.is_from_here(self.headers, self.local)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Attributes:
        body: The text.
        type: The content type.
        status: The HTTP status.
        location: The target of a redirection.
    """

    body: str
    type: str = JSON
    status: int = 200
    location: str = ""


def read_json(body: bytes) -> Any:
    """Returns the value of a body.

    Raises:
        PyorchError: llama-server would not accept the body as JSON. Python alone accepts more.
    """
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
        if "\\ud" in text or "\\uD" in text:  # halves of surrogate pairs
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise PyorchError("the body nests brackets too deep: "
                          f"{sys.getrecursionlimit()} in each other are too many") from None
    except UnicodeDecodeError as error:
        raise PyorchError(f"the body is no JSON: its byte {error.start} is not of UTF-8 text") from None
    except UnicodeEncodeError:
        raise PyorchError("the body is no JSON: half of a surrogate pair, \\ud800 to \\udfff, is no text") from None
    except ValueError as error:
        raise PyorchError(f"the body is no JSON: {error}") from None
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        shown = digits if len(digits) < 30 else f"{digits[:20]}..."
        raise ValueError(f"the number {shown} is too large")
    return value


def _whole(digits: str) -> int:
    """Reads a whole number. Python refuses one with too many digits, so _finite() checks it first."""
    _finite(digits)
    return int(digits)


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value, separators=(",", ":"), allow_nan=False), status=status)


def instead(body: Any) -> Answer:
    """Replaces the body of a request for llama-server. For handlers that run before llama-server's."""
    return as_json(body, lib.PYORCH_SERVER_CONTINUE)


def refusal(status: int, sentence: str) -> Answer:
    """Returns an error in llama-server's form."""
    kind = {403: "permission_error", 500: "server_error", 503: "unavailable_error"}.get(status, "invalid_request_error")
    return as_json({"error": {"code": status, "message": sentence, "type": kind}}, status)


def own(path: str, parameters: str = "", body: str = "", seconds: float = 60.0) -> str:
    """Returns the running server's own answer to a request without a key.

    Args:
        path: The path as it was registered.
        parameters: "name=value&..." for path and query.
        body: The body, "" for none.
        seconds: The time to wait.

    Returns:
        The answer; "" if the server lacks the path, refuses, or does not answer in time.
    """
    bodies = [""]

    def take(_: Any, exchange: Any) -> None:
        answer = _read(exchange)
        bodies.append(answer.own if answer.own_status == 200 else "")

    callback = ffi.callback("pyorch_answer_fn", take)
    lib.pyorch_server_ask(path.encode(), parameters.encode(), body.encode(), seconds, callback, ffi.NULL)
    return bodies[-1]


Handler = Callable[[Request], "Answer | None"]


def first_answer(*handlers: Handler) -> Handler:
    """Returns a handler that calls others in order, until one answers."""
    return lambda request: next(filter(None, (handler(request) for handler in handlers)), None)


class Routes:
    """Added routes for the next server. Must outlive it.

    A handler runs on a thread of the server. If it returns no answer, llama-server's own is sent. A PyorchError is
    answered with status 400 and its message.
    """

    def __init__(self, prefix: str = "", files: Sequence[str] = ()) -> None:
        self._prefix = prefix
        self._files = files
        # llama-server leaves these open only without a prefix.
        for path in ("/health", "/v1/health", "/", *(f"/{file.path}" for file in chat_page())):
            lib.pyorch_server_make_public(f"{prefix}{path}".encode())
        self._handlers: list[Handler] = []
        self._callback = ffi.callback("pyorch_answer_fn", self._answer)

    def check_schemas(self, check: Callable[[bytes], None]) -> None:
        """From now on refuses requests with a JSON schema for which `check` raises PyorchError."""
        def refuse(request: Request) -> Answer | None:
            try:
                check(request.body)
            except PyorchError as error:
                return Answer(str(error), TEXT, 400)
            return None

        self._handlers.append(refuse)
        lib.pyorch_server_check_schemas(self._callback, ffi.cast("void *", len(self._handlers) - 1))

    def check_heads(self, reason: Callable[[Mapping[str, str]], str]) -> None:
        """Refuses each request for which `reason` returns a sentence, with status 403, before its body is read.

        reason: Gets the headers, by name in lower case.
        """
        def check(request: Request) -> Answer | None:
            sentence = reason(request.headers)
            return refusal(403, sentence) if sentence else None

        self._handlers.append(check)
        lib.pyorch_server_check_heads(self._callback, ffi.cast("void *", len(self._handlers) - 1))

    def add(
        self, method: str, path: str, handler: Handler, public: bool = False, when: int = lib.PYORCH_SERVER_BEHIND
    ) -> None:
        """Adds a route.

        Args:
            method: GET or POST.
            path: The path, in the patterns of cpp-httplib.
            handler: Answers requests.
            public: Whether requests need no API key.
            when: The order of handler and llama-server, see pyorch_server_when.
        """
        number = ffi.cast("void *", len(self._handlers))
        self._handlers.append(handler)
        lib.pyorch_server_add_route(method.encode(), os.fsencode(path), when, self._callback, number)
        if public:
            lib.pyorch_server_make_public(f"{self._prefix}{path}".encode())

    def _answer(self, number: Any, exchange: Any) -> None:
        answer = self._answer_of(self._handlers[int(ffi.cast("uintptr_t", number))], exchange)
        if answer is None:
            return
        body = answer.body.encode()
        lib.pyorch_server_answer(exchange, answer.status, answer.type.encode(),
                                 answer.location.encode() if answer.location else ffi.NULL, body, len(body))

    def _answer_of(self, handler: Handler, exchange: Any) -> Answer | None:
        try:
            return handler(_read(exchange))
        except PyorchError as error:
            return refusal(400, without_folders(str(error), self._files))
        except Exception as error:  # the server goes on
            traceback.print_exc(file=sys.stderr)
            return refusal(500, f"{type(error).__name__}: {without_folders(str(error), self._files)}")


def _read(exchange: Any) -> Request:
    def data(pointer: Any, size: int) -> bytes:
        return bytes(ffi.buffer(pointer, size)) if size else b""

    lines = ffi.string(exchange.headers).decode("utf-8", "replace").splitlines()
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    return Request(
        {name.lower(): value for name, value in headers.items()}, data(exchange.body, exchange.body_size),
        data(exchange.data, exchange.data_size).decode("utf-8", "replace"), exchange.status, bool(exchange.local),
        lambda: bool(lib.pyorch_server_has_left(exchange)),
    )
