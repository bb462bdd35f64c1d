"""The HTTP server in front of several models: answers requests about all, and forwards others to one model's server."""

from __future__ import annotations

import contextlib
import gzip
import hmac
import json
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from pyorch.errors import PyorchError, without_folders
from pyorch.llama import logs, memory
from pyorch.serve import llama_server, ollama, pages, router
from pyorch.serve.address import Address, free_address
from pyorch.serve.library import PageFile, chat_page
from pyorch.serve.llama_server import BODY_SECONDS, HEAD_SECONDS, Flags, Root
from pyorch.serve.metrics import TYPE, of_models, queue_text
from pyorch.serve.model_process import Model, say
from pyorch.serve.models import Models, NotLoaded
from pyorch.serve.origins import Origins, is_from_here
from pyorch.serve.routes import FROM_HERE, read_json
from pyorch.settings.budget import Budget
from pyorch.sizes import MiB, counted, format_bytes

_LOOPBACK = ("127.", "::1", "::ffff:127.")
_MAX_BODY_BYTES = 100 * MiB  # as llama-server
_MAX_LINE_BYTES = 1 << 16  # of the head of a chunk
_LINGER_SECONDS = 5.0
_N_DESCRIPTORS = 8192  # each connection has two

# The endpoints of one model's server, by method. Requests for other paths are refused before a model is searched.
ENDPOINTS = {
    "GET": ("/metrics", "/props", "/residency", "/slots", "/lora-adapters", "/tokenizer_info", "/tools", "/cors-proxy",
            "/v1/stream"),
    "POST": ("/residency", "/props", "/slots/*", "/lora-adapters", "/tokenize", "/detokenize", "/apply-template",
             "/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions",
             "/v1/chat/completions/control", "/responses", "/v1/responses", "/v1/messages", "/infill", "/embedding",
             "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking",
             "/audio/transcriptions", "/v1/audio/transcriptions", "/chat/completions/input_tokens",
             "/v1/chat/completions/input_tokens", "/responses/input_tokens", "/v1/responses/input_tokens",
             "/v1/messages/count_tokens", "/v1/streams/lookup", "/tools", "/cors-proxy", "/models/load",
             "/models/unload"),
    "DELETE": ("/v1/stream",),
}

# Harnesses request these before they name a model.
_OF_ANY_MODEL = ("/tokenizer_info", "/tokenize", "/detokenize")


class _Refused(Exception):
    """A refused request, with status and message. ends: close the connection, because the request is not fully read."""

    def __init__(self, status: int, sentence: str, ends: bool = False) -> None:
        super().__init__(sentence)
        self.status, self.ends = status, ends


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    may_be_read = False  # by the page that sent the request

    def setup(self) -> None:
        self.timeout = self.server.silent_seconds
        self.server.deadlines.begin(self.request, HEAD_SECONDS)
        super().setup()

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.server.deadlines.end(self.request)

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.deadlines.begin(self.request, HEAD_SECONDS)

    def parse_request(self) -> bool:
        self.may_be_read = False
        return super().parse_request()

    def do_OPTIONS(self) -> None:
        """Answers the preflight request of a page from another origin as llama-server does."""
        try:
            self._check_origin()
        except _Refused as refusal:
            return self._end(refusal, "")
        self.close_connection |= self._announces_body()  # which is not read, and is no next request
        self._answer(200, "", headers=(
            ("Access-Control-Allow-Methods", "GET, POST"), ("Access-Control-Allow-Headers", "*")))

    def _serve(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            return self.send_error(400, f"the address of the request is none: {error}")
        try:
            self._check_origin()
            is_open = self._method == "GET" and (url.path in ("/health", "/v1/health") or (
                url.path in self.server.pages or url.path in self.server.files))
            if not is_open and not self._has_key():  # before strangers' data takes memory
                raise _Refused(401, "Invalid API Key", ends=True)
            if is_open:  # does not read a body of strangers
                self.close_connection |= self._announces_body()
                body = b""
            else:
                body = self._read_body()
            self.server.deadlines.end(self.request)
            self._answer_to(url.path, url.query, body)
        except _Refused as refusal:
            self._end(refusal, url.path)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _check_origin(self) -> None:
        refusal = self.server.origins.refusal(self._headers)
        if refusal:
            raise _Refused(403, refusal, ends=True)
        self.may_be_read = True

    @property
    def _headers(self) -> dict[str, str]:
        """The headers by name in lower case. Several of one name are joined: no list is an allowed origin."""
        return {name.lower(): ", ".join(self.headers.get_all(name, ())) for name in self.headers}

    def _announces_body(self) -> bool:
        return "Content-Length" in self.headers or "Transfer-Encoding" in self.headers

    def _end(self, refusal: _Refused, path: str) -> None:
        self.close_connection = self.close_connection or refusal.ends
        self._refuse(refusal.status, str(refusal), path)
        if refusal.ends:
            self._linger()

    @property
    def _method(self) -> str:
        """The method to look up: HEAD is answered as GET, without a body."""
        return "GET" if self.command == "HEAD" else self.command

    def _answer_to(self, path: str, query: str, body: bytes) -> None:
        models = self.server.models
        if self._method == "GET":
            page = self.server.pages.get(path)
            if page is not None:
                location = (("Location", page.location),) if page.location else ()
                return self._answer(page.status, page.body, page.type, location)
            if path in self.server.files:
                return self._send_file(self.server.files[path])
            if path in ("/health", "/v1/health"):
                return self._answer(200, '{"status":"ok"}')
            if path in ("/models", "/v1/models"):
                return self._answer(200, json.dumps({"object": "list", "data": [
                    _listed(model) for model in models.refresh().values()]}))
            if path.startswith("/v1/models/"):
                return self._answer(200, json.dumps(_listed(self._found(unquote(path.removeprefix("/v1/models/"))))))
            if path == "/models/sse":
                return self._send_states()
        if path.startswith("/api/"):
            return self._serve_ollama(path, body)
        pattern = re.sub(r"^/slots/.*", "/slots/*", path)
        if pattern not in ENDPOINTS.get(self._method, ()):
            raise _Refused(404, f"{self.command} {path} is not served here")
        is_local = self.client_address[0].startswith(_LOOPBACK)
        if (self._method, path) == ("POST", "/residency") and not (
                self.server.keys or is_from_here(self._headers, is_local)):
            raise _Refused(403, FROM_HERE)
        if path in ("/v1/stream", "/v1/streams/lookup"):
            return self._serve_conversation(path, next(iter(parse_qs(query).get("conv_id", ())), ""), body)
        asked = next(iter(parse_qs(query).get("model", ())), None) or self._named_in(body)
        model = self._found(asked) if asked else None
        if path in ("/models/load", "/models/unload"):
            return self._answer(200, json.dumps({"success": self._change(path, model)}))
        if (self._method, path) == ("GET", "/props") and model is None:
            return self._answer(200, json.dumps(router.properties(models)))
        if (self._method, path) == ("GET", "/metrics"):
            return self._answer(200, of_models(self._metrics(model)), TYPE)
        looks = path not in _OF_ANY_MODEL and (self._method == "GET" or path in ("/residency", "/tools"))
        if model is None:
            loaded = models.loaded()
            if loaded and (looks or path in _OF_ANY_MODEL):
                model = loaded[0]
            elif looks:
                # 403 tells the chat page that there are no tools.
                raise _Refused(403 if path == "/tools" else 503,
                               "no model is loaded: a request for an answer that names one loads it")
            elif len(models.by_name) == 1 or path in _OF_ANY_MODEL:
                model = next(iter(models.by_name.values()))
            else:
                raise _Refused(400, f'the request names no model: "model" is one of {", ".join(models.by_name)}')
        conversation, ticket = self.headers.get(router.ID, ""), None
        if len(conversation) > router.MOST_ID:  # ids are stored
            raise _Refused(400, f"{router.ID} is longer than {router.MOST_ID} characters")
        if conversation and self._method == "POST":
            ticket = self.server.conversations.begin(conversation, model)
        with self.server.answering():
            try:
                with models.looked_at(model) if looks else models.held(model) as port:
                    if ticket is not None and not self.server.conversations.is_wanted(conversation, ticket):
                        raise _Refused(400, "the answer was stopped while the model was loaded")
                    self._pass_on(port, body)
            except PyorchError as error:
                raise _Refused(503, str(error)) from None

    def _change(self, path: str, model: Model | None) -> bool:
        """Begins to load or unload a model, as its menu in the chat page says. Returns True."""
        if model is None:
            raise _Refused(400, 'the request names no model: "model" is one of '
                                f'{", ".join(self.server.models.by_name)}')
        if model.is_loaded() == (path == "/models/load"):
            raise _Refused(400, f"{model.name} is {'loaded already' if model.is_loaded() else 'not loaded'}")
        if path == "/models/load":
            router.load(self.server.models, model)
        else:
            self.server.models.unload(model)
        return True

    def _serve_conversation(self, path: str, conversation: str, body: bytes) -> None:
        """Continues, stops or looks up answers that outlived their connections."""
        conversations, models = self.server.conversations, self.server.models
        if path == "/v1/streams/lookup":
            try:
                asked = [one for one in read_json(body)["conversation_ids"] if isinstance(one, str)]
            except (PyorchError, KeyError, TypeError):
                raise _Refused(400, 'the body is no JSON object with a list "conversation_ids"') from None
            return self._answer(200, json.dumps(conversations.running(models, asked)))
        deletes = self._method == "DELETE"
        model = conversations.end(conversation) if deletes else conversations.model(conversation)
        try:
            if model is None:
                raise NotLoaded("this conversation has no answer here")
            with self.server.answering(), models.looked_at(model) as port:
                self._pass_on(port, body)
        except NotLoaded as error:
            if deletes:  # the request that waits for the model sees it
                return self._answer(204, "")
            waits = model is not None and model.loading  # 503: the page asks again
            raise _Refused(503 if waits else 404, str(error)) from None

    def _send_states(self) -> None:
        """Streams the states of the models until the client disconnects."""
        self.close_connection = True
        self._begin("text/event-stream")
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            for event in router.states(self.server.models):
                self.wfile.write(event.encode())

    def _metrics(self, model: Model | None) -> Iterator[tuple[str, str, bool]]:
        """Yields names and metrics of one model or all, and whether each is loaded."""
        models = self.server.models
        for each in models.by_name.values() if model is None else (model,):
            text = None
            waiting = each.waiting()  # before this look counts
            with contextlib.suppress(NotLoaded), models.looked_at(each) as port:
                text = Address("127.0.0.1", port, "").get("/metrics", models.key)
            yield each.name, text or queue_text(*waiting), text is not None

    def _found(self, asked: str) -> Model:
        model = self.server.models.find(asked)
        if model is None:
            raise _Refused(404, f'model "{asked}" is not served here; these are: '
                                f'{", ".join(self.server.models.by_name)}')
        return model

    def _named_in(self, body: bytes) -> str | None:
        """Returns the model that a body names, None if it names none."""
        if not body:
            return None
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/"):
            parts = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode("latin-1") + body)
            named = [part.get_payload(decode=True) or b"" for part in parts.walk()
                     if part.get_param("name", header="content-disposition") == "model"]
            return named[0].decode(errors="replace").strip() if named else None
        try:
            asked = read_json(body)
        except PyorchError as error:
            raise _Refused(400, str(error)) from None
        if not isinstance(asked, dict):
            raise _Refused(400, "the body is JSON, but no object")
        name = asked.get("model")
        return None if name in (None, "") else str(name)

    def _read_body(self) -> bytes:
        self.server.deadlines.begin(self.request, BODY_SECONDS)
        lengths, coding = self.headers.get_all("Content-Length", ()), self.headers.get("Transfer-Encoding")
        if len(lengths) + ("Transfer-Encoding" in self.headers) > 1:  # a proxy may have read another one
            raise _Refused(400, "the request says more than once where its body ends", ends=True)
        if coding is not None:
            if coding.strip().lower() != "chunked":
                raise _Refused(501, f'the transfer coding "{coding}" is not served here: "chunked" is', ends=True)
            return b"".join(self._chunks())
        length = next(iter(lengths), "0").strip()
        if not re.fullmatch("[0-9]+", length):
            raise _Refused(400, f'the length of the body, "{length}", is no number', ends=True)
        self._check_size(int(length[:20]))
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError
        return body

    def _chunks(self) -> Iterator[bytes]:
        n_bytes = 0
        while True:
            line = self.rfile.readline(_MAX_LINE_BYTES)
            size = re.fullmatch(rb"([0-9A-Fa-f]{1,16})[ \t]*(;.*)?\r?\n", line)
            if size is None:
                raise _Refused(400, "a chunk of the body does not begin with its size", ends=True)
            n_bytes += int(size[1], 16)
            self._check_size(n_bytes)
            chunk = self.rfile.read(int(size[1], 16))
            if not chunk:  # the last one; trailer lines may follow
                while self.rfile.readline(_MAX_LINE_BYTES).strip():
                    pass
                return
            if self.rfile.readline(_MAX_LINE_BYTES).strip():
                raise _Refused(400, "a chunk of the body is longer than its size says", ends=True)
            yield chunk

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > _MAX_BODY_BYTES:
            raise _Refused(413, f"the body is larger than {format_bytes(_MAX_BODY_BYTES)}", ends=True)

    def _linger(self) -> None:
        """Reads on for a short time. A client that still sends would otherwise lose the answer when we close."""
        due = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_SECONDS)
            while time.monotonic() < due and self.connection.recv(1 << 16):
                pass

    def _has_key(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or self.headers.get("X-Api-Key", "")
        keys = self.server.keys
        return not keys or any(hmac.compare_digest(given.encode(), key.encode()) for key in keys)

    def _pass_on(self, port: int, body: bytes) -> None:
        """Forwards the request and streams the answer. If either side closes its connection, so does the other.

        The model's server sees a request of this machine, because this one has checked where it is from.
        """
        headers = {name: re.sub(r"[\r\n]+", " ", value) for name, value in self.headers.items() if name.lower() not in (
            "connection", "content-length", "expect", "host", "origin", "transfer-encoding")}
        headers |= {"Host": f"127.0.0.1:{port}", "Connection": "close", "Content-Length": str(len(body))}
        head = f"{self.requestline}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        self.close_connection = True
        client, answered, begun = self.connection, False, b""
        try:
            with socket.create_connection(("127.0.0.1", port)) as server:
                with contextlib.suppress(ConnectionError):  # the server may answer before it has read everything
                    server.sendall(head.encode("latin-1") + body)
                readable = select.poll()  # select() is limited to 1024 descriptors
                readable.register(server, select.POLLIN)
                readable.register(client, select.POLLIN)
                while True:
                    ready = {descriptor for descriptor, _ in readable.poll()}
                    if server.fileno() in ready:
                        part = server.recv(1 << 16)
                        if not part:
                            break
                        if not answered:
                            begun += part
                            if b"\r\n\r\n" not in begun:
                                continue
                            part = self._allowing(begun)
                        answered = True
                        client.sendall(part)
                    elif not client.recv(1 << 16):  # the client has disconnected
                        return
        except OSError:
            pass
        if not answered:
            raise _Refused(502, "the server of the model ended before it answered")

    def _serve_ollama(self, path: str, body: bytes) -> None:
        models = self.server.models
        try:
            if (self._method, path) == ("GET", "/api/version"):
                return self._answer(200, json.dumps({"version": ollama.VERSION}))
            if (self._method, path) == ("GET", "/api/tags"):
                return self._answer(200, json.dumps(ollama.tags(models.refresh().values())))
            if (self._method, path) == ("GET", "/api/ps"):
                return self._answer(200, json.dumps(ollama.running(models.loaded(), models.key)))
            if self._method != "POST" or path not in ollama.PATHS:
                raise _Refused(404, f"{self.command} {path} is not served here")
            asked = ollama.read(body)
            model = models.find(asked["model"])
            if model is None:
                raise _Refused(404, f"model '{asked['model']}' not found")
            if path == "/api/show":
                try:
                    return self._answer(200, json.dumps(ollama.show(model.path)))
                except PyorchError as error:
                    raise _Refused(400, without_folders(str(error), [model.path])) from None
            keep_alive = ollama.keep_alive(asked)
            url, request = ollama.to_openai(path, asked, model)
        except PyorchError as error:
            raise _Refused(400, str(error)) from None
        except (AttributeError, TypeError, ValueError):
            raise _Refused(400, "a part of the request has the wrong type") from None
        self.close_connection = True
        reply, begun = ollama.Reply(path, asked), False
        if not request and keep_alive == 0:
            models.unload(model)
            return self._answer(200, json.dumps(reply.end("unload")))
        with self.server.answering(), contextlib.suppress(OSError):
            try:
                with models.held(model, keep_alive) as port:
                    reply.load_seconds = reply.seconds()
                    ollama.check_context(port, asked, models.key)
                    for part in ollama.ask(port, url, request, models.key, self.connection):
                        if not request.get("stream"):
                            return self._answer(200, json.dumps(reply.whole(part)))
                        begun = begun or self._begin_lines()
                        self._send_line(reply.part(part))
            except PyorchError as error:
                status = error.status if isinstance(error, ollama.Refused) else 503
                return self._send_line({"error": str(error)}) if begun else self._refuse(status, str(error), path)
            if begun:
                self._send_line(reply.end())
            else:  # the request only loads the model
                self._answer(200, json.dumps(reply.end("load")))

    def _begin(self, kind: str) -> None:
        """Sends the head of a stream."""
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Connection", "close"),
                            ("Access-Control-Allow-Origin", self._origin())):
            self.send_header(name, value)
        self.end_headers()

    def _begin_lines(self) -> bool:
        self._begin("application/x-ndjson")
        return True

    def _send_line(self, line: dict | None) -> None:
        if line is not None:
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends errors of http.server in the form of other refusals."""
        self.close_connection = True
        self._refuse(code, message or explain or self.responses[code][0], "")
        self._linger()

    def _refuse(self, status: int, sentence: str, path: str) -> None:
        """Sends an error in the form of Ollama or llama-server."""
        kind = "server_error" if status >= 500 else {403: "permission_error", 404: "not_found_error"}.get(
            status, "invalid_request_error")
        error = sentence if path.startswith("/api/") else {"code": status, "message": sentence, "type": kind}
        with contextlib.suppress(OSError):
            self._answer(status, json.dumps({"error": error}))

    def _send_file(self, file: PageFile) -> None:
        """Sends a file of llama-server's chat page as llama-server does."""
        known = self.headers.get("If-None-Match", "").removeprefix("W/") == file.etag
        packed = file.gzip and "gzip" in self.headers.get("Accept-Encoding", "")
        data = file.data if packed or not file.gzip else gzip.decompress(file.data)
        fixed = file.path.startswith("_app/immutable/")  # a new version has another name
        self.send_response(304 if known else 200)
        for name, value in (("ETag", file.etag), ("Vary", "Accept-Encoding"),
                            ("Cache-Control", "public, max-age=31536000, immutable" if fixed else "no-cache"),
                            *((("Cross-Origin-Embedder-Policy", "require-corp"),
                               ("Cross-Origin-Opener-Policy", "same-origin")) if file.path == "index.html" else ()),
                            *((("Content-Encoding", "gzip"),) if packed else ()),
                            *(() if known else (("Content-Type", file.type), ("Content-Length", str(len(data)))))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and not known:
            self.wfile.write(data)

    def _answer(
        self, status: int, text: str, kind: str = "application/json; charset=utf-8",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        body = text.encode(errors="backslashreplace")  # a file's name need not be text
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                            *([("Access-Control-Allow-Origin", self._origin())] if self.may_be_read else []), *headers,
                            *([("Connection", "close")] if self.close_connection else [])):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _allowing(self, begun: bytes) -> bytes:
        """Returns the beginning of an answer with the permission for the page that sent the request, if a page did."""
        if "Origin" not in self.headers:
            return begun
        line = b"Access-Control-Allow-Origin: " + self._origin().encode("latin-1")
        return re.sub(rb"(?im)^Access-Control-Allow-Origin:[^\r]*", lambda _: line, begun, count=1)

    def _origin(self) -> str:
        return re.sub(r"[\r\n]+", " ", self.headers.get("Origin", "*"))

    def log_message(self, *_: object) -> None:
        pass


class Deadlines:
    """Times by which connections must have sent their requests. A late connection is shut down."""

    def __init__(self) -> None:
        self._due: dict[socket.socket, float] = {}
        self._changing = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, connection: socket.socket, seconds: float) -> None:
        with self._changing:
            self._due[connection] = time.monotonic() + seconds

    def end(self, connection: socket.socket) -> None:
        with self._changing:
            self._due.pop(connection, None)

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            now = time.monotonic()
            with self._changing:  # so that no connection closes now and another takes its descriptor
                for connection in [each for each, due in self._due.items() if now >= due]:
                    del self._due[connection]
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, address: Address, models: Models, keys: Sequence[str], silent_seconds: float, root: Root,
        origins: Origins,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.models, self.keys, self.silent_seconds = models, keys, silent_seconds
        self.conversations = router.Conversations()
        self.pages = pages.contents(bool(keys), root)
        self.files = {f"/{file.path}": file for file in chat_page()} if root is Root.LLAMA_SERVER else {}
        if self.files:
            self.files["/"] = self.files["/index.html"]
        self.origins = origins
        self.deadlines = Deadlines()
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
        """Ignores clients that disconnect."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*_)


def _listed(model: Model) -> dict:
    """Returns a model's entry in /v1/models."""
    return {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "pyorch",
            "status": {"value": model.state}}


def _allow_descriptors() -> None:
    """Raises the process's limit of descriptors, which is low by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _N_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _N_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve_models(
    find_paths: Callable[[], dict[str, Path]], options: Sequence[str], flags: Sequence[str], budget: Budget,
    keep_alive: float,
) -> int:
    """Serves models by their names until SIGINT or SIGTERM. Call it on the main thread.

    Args:
        find_paths: Returns the present files, by name.
        options: Options of `pyorch serve` for each model.
        flags: Flags of llama-server for each model.
        keep_alive: Seconds after which an idle model is unloaded.

    Raises:
        PyorchError: There are no models, or the server cannot listen on the address.
    """
    llama_server.check(flags)
    given = Flags(flags)
    address = free_address(given)
    if not address.port or address.prefix:
        raise PyorchError("several models are served at a host and a port, without --api-prefix")
    if given.has(llama_server.STATIC_FILES):
        raise PyorchError("several models are served without --path: the server has the chat page, or none (--no-ui)")
    root = given.root

    def command(name: str, path: Path, announces: int) -> list[str]:
        child = Flags(given.arguments)
        child.replace(llama_server.HOST, "127.0.0.1")
        child.replace(llama_server.PORT, 0)
        child.replace(llama_server.CORS_ORIGINS, "localhost")  # no page needs it
        return [sys.executable, "-m", "pyorch", "serve", str(path), *options, "--while-stdin", "--announce",
                str(announces), "--", *child.arguments, "--alias", name]

    origins = Origins.of(given)
    logs.install()
    logs.set_quiet(True)
    models = Models(find_paths, budget, keep_alive, next(iter(given.api_keys), ""), command)
    _allow_descriptors()
    ended = threading.Event()

    def end(*_: object) -> None:
        if ended.is_set():
            models.tell_to_end()
        ended.set()

    silent = given.number(llama_server.TIMEOUT, llama_server.SILENT_SECONDS)
    with _Server(address, models, given.api_keys, silent, root, origins) as server:
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        serving = threading.Thread(target=server.serve_forever, name="models")
        serving.start()
        try:
            limit = format_bytes(memory.memory_limit().free_bytes)
            names = models.by_name
            say(f"serving {counted(len(names), 'model')} at {address.url} ({limit} of memory free): {', '.join(names)}")
            chat = "" if root is Root.LIVE_VIEW else f"chat at {address.url}/, "
            say(f"{chat}live view at {address.url}/pyorch, API for programs at {address.url}/v1")
            ended.wait()
        finally:
            server.shutdown()
            server.deadlines.close()
            for process in models.tell_to_end():
                process.wait()
            server.wait_for_answers(3.0)
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0

