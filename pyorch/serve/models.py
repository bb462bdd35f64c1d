"""Several models behind one address: each is served by a `pyorch serve` of its own, which runs while it is needed.

llama-server's router is not used: it runs llama-server for each model, and counts models in place of memory.

    unloaded --a request names it--> loading --> loaded --idle for keep-alive, or in the way of another--> unloaded
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pyorch.errors import PyorchError
from pyorch.llama import logs, memory
from pyorch.runtime.model_map import ModelMap
from pyorch.serve import llama_server, ollama, pages
from pyorch.serve.address import Address, free_address
from pyorch.serve.llama_server import Flags, Root
from pyorch.settings.budget import Budget
from pyorch.sizes import counted, format_bytes

_READY = re.compile(r"pyorch: serving .* at http://[^/\s]*:(\d+)")
_ERROR = re.compile(r"pyorch: error: (.*)")
_LOOPBACK = ("127.", "::1", "::ffff:127.")
_MAX_BODY_BYTES = 256 << 20


@dataclass
class _Model:
    """process: None while it is not loaded. busy: requests that wait for it or are answered. said: why it ended."""

    name: str
    path: Path
    process: subprocess.Popen | None = None
    port: int = 0
    busy: int = 0
    used: float = field(default_factory=time.monotonic)
    said: str = ""

    def is_loaded(self) -> bool:
        return self.process is not None and self.process.poll() is None and self.port > 0


class Models:
    """Those that are served, by name. command: what serves one at any port, and says so on standard error; key: that
    it asks for, "" for none.

    A model is loaded where it fits into what is free beside the others; else idle ones go first, the least recently
    used before others, and it waits for those that answer. Alone, a model is loaded whatever it needs.
    """

    def __init__(
        self, paths: dict[str, Path], budget: Budget, keep_alive: float, key: str,
        command: Callable[[str, Path], list[str]],
    ) -> None:
        self.models = {name: _Model(name, path) for name, path in paths.items()}
        self._budget = budget
        self._keep_alive = keep_alive
        self._key = key
        self._command = command
        self._changed = threading.Condition()
        self._loading = threading.Lock()  # one after the other: each takes what the one before left
        self.ending = threading.Event()
        threading.Thread(target=self._unload_idle, daemon=True).start()

    @contextlib.contextmanager
    def held(self, name: str, is_use: bool) -> Iterator[int]:
        """The port of a model that is loaded, and stays so inside. PyorchError where it cannot be.

        is_use: afterwards it is not idle for as long as before.
        """
        model = self.models[name]
        with self._changed:
            model.busy += 1
        try:
            if not model.is_loaded():
                with self._loading:
                    if not model.is_loaded():
                        self._load(model)
            yield model.port
        finally:
            with self._changed:
                model.busy -= 1
                model.used = time.monotonic() if is_use else model.used
                self._changed.notify_all()

    def find(self, asked: str | None) -> str | None:
        """The name of a model by what a request calls it; Ollama's programs add a tag."""
        names = (asked, f"hf:{asked}", (asked or "").removesuffix(":latest"))
        return next((name for name in names if name in self.models), None)

    def last_used(self) -> str | None:
        """Of those that are loaded."""
        loaded = [model for model in self.models.values() if model.is_loaded()]
        return max(loaded, key=lambda model: (model.busy > 0, model.used)).name if loaded else None

    def state(self, name: str) -> str:
        """As llama-server's router calls it."""
        model = self.models[name]
        return "loaded" if model.is_loaded() else "loading" if model.busy else "unloaded"

    def tell_to_end(self) -> list[subprocess.Popen]:
        """Each ends as `pyorch serve` does when it is told, told again at once."""
        self.ending.set()
        with self._changed:
            running = [model.process for model in self.models.values() if model.process is not None]
        for process in running:
            process.terminate()
        return running

    def _load(self, model: _Model) -> None:
        self._make_room(model)
        # In a group of its own: Ctrl-C in a terminal is for this process, which ends the others.
        with self._changed:
            if self.ending.is_set():
                raise PyorchError("the server ends")
            model.port, model.said = 0, "it ended without a word"
            model.process = subprocess.Popen(self._command(model.name, model.path), stdin=subprocess.PIPE,
                                             stderr=subprocess.PIPE, text=True, errors="replace",
                                             start_new_session=True)
        began = time.monotonic()
        if not self._hear(model, model.process):
            model.process.wait()
            raise PyorchError(f"{model.name} could not be loaded: {model.said}")
        say(f"loaded {model.name} in {time.monotonic() - began:.1f} s")

    def _hear(self, model: _Model, process: subprocess.Popen) -> bool:
        """Whether the process says that it serves. What it says after that goes where ours does."""
        for line in process.stderr:
            error, ready = _ERROR.match(line), _READY.match(line)
            model.said = error[1] if error else model.said
            if ready:
                model.port = int(ready[1])
                threading.Thread(target=_pass_on, args=(model.name, process.stderr), daemon=True).start()
                return True
        return False

    def _make_room(self, model: _Model) -> None:
        needed = self._needed_bytes(model.path)
        while True:
            with self._changed:
                others = sorted((other for other in self.models.values() if other.is_loaded()), key=lambda m: m.used)
                if not others or self.ending.is_set() or needed <= self._free_bytes(others):
                    return
                idle = next((other for other in others if not other.busy), None)
                if idle is None:
                    self._changed.wait(1.0)
                    continue
                process, idle.process = idle.process, None
            _end(idle.name, process, f"to make room for {model.name}")

    def _needed_bytes(self, path: Path) -> int:
        """PyorchError for what is no model, or one for which the budget is too small."""
        with ModelMap(path) as model_map:
            info = model_map.info
            experts = info.slots_bytes if self._budget.amount is None else self._budget.resolve(info)
            return info.dense_bytes + experts + memory.margin_bytes(memory.memory_limit())

    def _unload_idle(self) -> None:
        while not self.ending.wait(0.5):
            with self._loading:
                now = time.monotonic()
                with self._changed:
                    idle = [(model, model.process) for model in self.models.values()
                            if model.is_loaded() and not model.busy and now - model.used >= self._keep_alive]
                    for model, _ in idle:
                        model.process = None
                for model, process in idle:
                    _end(model.name, process, f"idle for {self._keep_alive:g} s")

    def _free_bytes(self, loaded: Sequence[_Model]) -> int:
        """What may be allocated under the memory limit, less what experts were promised and have not taken yet."""
        promised = 0
        for model in loaded:
            state = Address("127.0.0.1", model.port, "").get("/residency", self._key)
            if state is not None:  # of a dense model
                totals = json.loads(state)["totals"]
                promised += totals["budget_bytes"] - totals["used_bytes"]
        return memory.memory_limit().free_bytes - promised


def _end(name: str, process: subprocess.Popen, why: str) -> None:
    process.terminate()
    process.wait()
    say(f"unloaded {name}, {why}")


def _pass_on(name: str, lines: Iterator[str]) -> None:
    for line in lines:
        if "API for programs at" not in line:  # ours is another one
            say(f"{name}: {line.rstrip().removeprefix('pyorch: ')}")


def say(sentence: str) -> None:
    print(f"pyorch: {sentence}", file=sys.stderr, flush=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers what concerns all models, and passes the rest on to the server of the model that a request names."""

    protocol_version = "HTTP/1.1"
    timeout = llama_server.SILENT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(urlsplit(self.path).path)
        if page is not None:
            self._answer(200, page.body, page.type)
        else:
            self._serve()

    def do_OPTIONS(self) -> None:
        """Before a page of another origin asks: what llama-server answers."""
        self._answer(200, "", headers=(
            ("Access-Control-Allow-Methods", "GET, POST"), ("Access-Control-Allow-Headers", "*")))

    def _serve(self) -> None:
        models, url = self.server.models, urlsplit(self.path)
        is_open = url.path in ("/health", "/v1/health")
        if not is_open and not self._has_key():  # before memory is taken for what strangers send
            self.close_connection = True
            return self._refuse(401, "Invalid API Key")
        length = self.headers.get("Content-Length") or "0"
        if "Transfer-Encoding" in self.headers or not length.isdigit():
            self.close_connection = True
            return self._refuse(411, "a request needs the length of its body")
        if len(length) > 12 or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            return self._refuse(413, f"a request has at most {_MAX_BODY_BYTES} bytes")
        body = self.rfile.read(int(length))
        if is_open:
            return self._answer(200, '{"status":"ok"}')
        if self.command == "GET" and url.path in ("/models", "/v1/models"):
            return self._answer(200, json.dumps({"object": "list", "data": [
                {"id": name, "object": "model", "created": int(time.time()), "owned_by": "pyorch",
                 "status": {"value": models.state(name)}} for name in models.models]}))
        if url.path.startswith("/api/"):
            return self._serve_ollama(url.path, body)
        asked = self._asked(url.query, body)
        name = models.find(asked)
        if not asked and self._looks():
            return self._refuse(503, "no model is loaded: a request that names one loads it")
        if not asked:
            return self._refuse(400, f'the request names no model: "model" is one of {", ".join(models.models)}')
        if name is None:
            return self._refuse(404, f'model "{asked}" is not served here; these are: {", ".join(models.models)}')
        with self.server.answering():
            try:
                with models.held(name, is_use=not self._looks()) as port:
                    self._pass_on(port, body)
            except PyorchError as error:
                self._refuse(503, str(error))

    do_POST = do_DELETE = _serve

    def _serve_ollama(self, path: str, body: bytes) -> None:
        models = self.server.models
        try:
            if (self.command, path) == ("GET", "/api/version"):
                return self._answer(200, json.dumps({"version": ollama.VERSION}))
            if (self.command, path) == ("GET", "/api/tags"):
                return self._answer(200, json.dumps(ollama.tags({m.name: m.path for m in models.models.values()})))
            if self.command != "POST" or path not in ollama.PATHS:
                return self._answer(404, json.dumps({"error": f"{path} is not served here"}))
            asked = ollama.read(body)
            name = models.find(asked["model"])
            if name is None:
                return self._answer(404, json.dumps({"error": f"model '{asked['model']}' not found"}))
            if path == "/api/show":
                return self._answer(200, json.dumps(ollama.show(models.models[name].path)))
            url, request = ollama.to_openai(path, asked, name)
        except PyorchError as error:
            return self._answer(400, json.dumps({"error": str(error)}))
        except (AttributeError, TypeError, ValueError):
            return self._answer(400, json.dumps({"error": "a part of the request is of another kind than it must be"}))
        self.close_connection = True
        reply, begun = ollama.Reply(path, asked["model"]), False
        with self.server.answering(), contextlib.suppress(OSError):
            try:
                with models.held(name, is_use=True) as port:
                    for part in ollama.ask(port, url, request, next(iter(self.server.keys), ""), self.connection):
                        if not request["stream"]:
                            return self._answer(200, json.dumps(reply.whole(part)))
                        begun = begun or self._begin_lines()
                        self._send_line(reply.part(part))
            except PyorchError as error:
                failure = {"error": str(error)}
                status = error.status if isinstance(error, ollama.Refused) else 503
                return self._send_line(failure) if begun else self._answer(status, json.dumps(failure))
            if begun:
                self._send_line(reply.end())
            else:  # nothing was asked of the model but to be loaded
                self._answer(200, json.dumps(reply.end()))

    def _begin_lines(self) -> bool:
        self.send_response(200)
        for name, value in (("Content-Type", "application/x-ndjson"), ("Connection", "close"),
                            ("Access-Control-Allow-Origin", self.headers.get("Origin", "*"))):
            self.send_header(name, value)
        self.end_headers()
        return True

    def _send_line(self, line: dict | None) -> None:
        if line is not None:
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def _asked(self, query: str, body: bytes) -> str | None:
        """The name of the model that is asked; the only one, and for a look the one that was used last, need none."""
        models = self.server.models
        try:
            asked = json.loads(body).get("model")
        except (ValueError, AttributeError, RecursionError):
            asked = None
        asked = asked or next(iter(parse_qs(query).get("model", ())), None)
        asked = asked or (models.last_used() if self._looks() else None)
        return str(asked) if asked else next(iter(models.models)) if len(models.models) == 1 else None

    def _looks(self) -> bool:
        """As the live view does, which is no use of a model."""
        return self.command == "GET" or urlsplit(self.path).path == "/residency"

    def _has_key(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or self.headers.get("X-Api-Key", "")
        keys = self.server.keys
        return not keys or any(hmac.compare_digest(given.encode(), key.encode()) for key in keys)

    def _pass_on(self, port: int, body: bytes) -> None:
        """Byte by byte, as they come; an end on either side ends the other."""
        headers = {name: value for name, value in self.headers.items()
                   if name.lower() not in ("connection", "content-length", "host")}
        local = self.client_address[0].startswith(_LOOPBACK)
        headers["Host"] = self.headers.get("Host", "") if local else "elsewhere"  # see Request.is_from_here()
        headers |= {"Connection": "close", "Content-Length": str(len(body))}
        head = f"{self.requestline}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        self.close_connection = True
        client, answered = self.connection, False
        try:
            with socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(head.encode("latin-1") + body)
                while True:
                    readable = select.select([server, client], [], [])[0]
                    if server in readable:
                        part = server.recv(1 << 16)
                        if not part:
                            break
                        answered = True
                        client.sendall(part)
                    elif not client.recv(1 << 16):  # the client has gone
                        return
        except OSError:
            pass
        if not answered:
            with contextlib.suppress(OSError):
                self._refuse(502, "the server of the model ended before it answered")

    def _refuse(self, status: int, sentence: str) -> None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self._answer(status, json.dumps({"error": {"code": status, "message": sentence, "type": kind}}))

    def _answer(
        self, status: int, text: str, kind: str = "application/json; charset=utf-8",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                            ("Access-Control-Allow-Origin", self.headers.get("Origin", "*")), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: Address, models: Models, keys: Sequence[str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.models, self.keys = models, keys
        self.pages = pages.contents(bool(keys), Root.SMALL_CHAT)
        self._n_answering = 0
        self._changed = threading.Condition()
        super().__init__((address.host, address.port), _Handler)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        with self._changed:
            self._n_answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_answering -= 1
                self._changed.notify_all()

    def wait_for_answers(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._n_answering, seconds)

    def handle_error(self, *_: object) -> None:
        """Clients that go away are no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*_)


def serve_models(
    paths: dict[str, Path], options: Sequence[str], flags: Sequence[str], budget: Budget, keep_alive: float
) -> int:
    """Serves models by their names until SIGINT or SIGTERM. To be called on the main thread.

    Args:
        paths: by name. options: of `pyorch serve`, for each. flags: of llama-server, for each.
        keep_alive: seconds after which an idle model is unloaded.

    Raises:
        PyorchError: the address cannot be used.
    """
    given = Flags(flags)
    address = free_address(given)
    if not address.port or address.prefix:
        raise PyorchError("several models are served at a host and a port, without --api-prefix")

    def command(name: str, path: Path) -> list[str]:
        child = Flags(given.arguments)
        child.replace(llama_server.HOST, "127.0.0.1")
        child.replace(llama_server.PORT, 0)
        return [sys.executable, "-m", "pyorch", "serve", str(path), *options, "--while-stdin", "--", *child.arguments,
                "--alias", name]

    logs.install()
    logs.set_quiet(True)
    models = Models(paths, budget, keep_alive, next(iter(given.api_keys), ""), command)
    ended = threading.Event()

    def end(*_: object) -> None:
        if ended.is_set():
            models.tell_to_end()
        ended.set()

    with _Server(address, models, given.api_keys) as server:
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        serving = threading.Thread(target=server.serve_forever, name="models")
        serving.start()
        try:
            limit = format_bytes(memory.memory_limit().free_bytes)
            say(f"serving {counted(len(paths), 'model')} at {address.url} ({limit} of memory free): {', '.join(paths)}")
            say(f"chat at {address.url}/, live view at {address.url}/pyorch, API for programs at {address.url}/v1")
            ended.wait()
        finally:
            server.shutdown()
            for process in models.tell_to_end():
                process.wait()
            server.wait_for_answers(3.0)
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0

