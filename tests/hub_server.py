"""A hub on this machine: what huggingface_hub asks for, served from memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_PIECE = 256 << 10


@dataclass
class Repository:
    """files: contents by path, in memory or in a file, which may be one of holes. token: that is asked for. gated: its
    terms have to be accepted; "files": it is listed all the same, as the hub does."""

    files: dict[str, bytes | Path]
    token: str = ""
    gated: bool | str = False
    commit: str = field(default="0123456789abcdef0123456789abcdef01234567")


class _Http(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Says nothing of clients that leave."""


class HubServer:
    """repositories: by ORG/NAME. requests: (method, path, Range), in their order. n_sent: bytes of files so far.
    cut_after: bytes of a file after which the connection breaks. cuts: how many times it does. ignores_ranges: it sends
    whole files. shifts: how many later ranges begin too early. redirects: files come from another host, as from the
    hub, which refuses the token of this one."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str]] = []
        self.n_sent = 0
        self.cut_after: int | None = None
        self.cuts = 1
        self.ignores_ranges = False
        self.redirects = False
        self.shifts = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                server.answer(self, "HEAD")

            def do_GET(self) -> None:
                server.answer(self, "GET")

        self._http = _Http(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        path = request.path.partition("?")[0]
        self.requests.append((method, path, request.headers.get("Range", "")))
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/([\w.-]+))?", path):
            repository = self._find(request, match[1], match[2] or "main", True)
            if repository is not None:
                _send(request, 200, json.dumps(_listing(match[1], repository)).encode(),
                      {"Content-Type": "application/json"}, method)
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path):
            repository = self._find(request, match[1], match[2], False)
            if repository is not None and self.redirects:
                where = f"http://localhost:{self._http.server_port}/elsewhere{path}"
                _send(request, 302, b"", {"Location": where}, method)
            elif repository is not None:
                self._send_file(request, repository, match[3], method)
        elif match := re.fullmatch(r"/elsewhere/([\w.-]+/[\w.-]+)/resolve/[\w.-]+/(.+)", path):
            if request.headers.get("Authorization"):
                _send(request, 400, b"", {}, method)
            else:
                self._send_file(request, self.repositories[match[1]], match[2], method)
        else:
            _send(request, 404, b"", {}, method)

    def _find(self, request: BaseHTTPRequestHandler, name: str, revision: str, listing: bool) -> Repository | None:
        repository = self.repositories.get(name)
        known = repository is not None and request.headers.get("Authorization", "") in (
            ("",) if not repository.token else (f"Bearer {repository.token}",))
        if not known:
            _refuse(request, 401, "RepoNotFound")
        elif repository.gated and not (repository.gated == "files" and listing):
            _refuse(request, 403, "GatedRepo")
        elif revision not in ("main", repository.commit):
            _refuse(request, 404, "RevisionNotFound")
        else:
            return repository
        return None

    def _send_file(self, request: BaseHTTPRequestHandler, repository: Repository, name: str, method: str) -> None:
        if name not in repository.files:
            _refuse(request, 404, "EntryNotFound")
            return
        content = repository.files[name]
        n_bytes = size(content)
        headers = {"ETag": f'"{_blob(name, content)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if self.ignores_ranges:
            wanted = None
        first, end = (int(wanted[1]), int(wanted[2] or n_bytes - 1) + 1) if wanted else (0, n_bytes)
        end = min(end, n_bytes)
        if first and self.shifts:
            first, self.shifts = first // 2, self.shifts - 1
        if first >= end > 0:
            _send(request, 416, b"", {}, method)
            return
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{n_bytes}"
        cut = end
        if method == "GET" and self.cut_after is not None and end - first > self.cut_after:
            cut, self.cuts = first + self.cut_after, self.cuts - 1
            if self.cuts <= 0:
                self.cut_after = None
            request.close_connection = True
        request.send_response(206 if wanted else 200)
        for key, value in {**headers, "Content-Length": str(end - first)}.items():
            request.send_header(key, value)
        request.end_headers()
        if method == "GET":
            with contextlib.suppress(ConnectionError):  # the client has enough
                for piece in _pieces(content, first, cut):
                    request.wfile.write(piece)
                    self.n_sent += len(piece)
                request.wfile.flush()


def size(content: bytes | Path) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def _pieces(content: bytes | Path, first: int, end: int) -> Iterator[bytes]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(content.open("rb") if isinstance(content, Path) else io.BytesIO(content))
        file.seek(first)
        for at in range(first, end, _PIECE):
            yield file.read(min(_PIECE, end - at))


def _blob(name: str, content: bytes | Path) -> str:
    """A hash, which of a file on disk is that of its name and size: such files are large."""
    known = f"{name} {size(content)}".encode() if isinstance(content, Path) else content
    return hashlib.sha256(known).hexdigest()


def _listing(name: str, repository: Repository) -> dict[str, object]:
    files = [{"rfilename": path, "size": size(content), "blobId": _blob(path, content)[:40],
              "lfs": {"sha256": _blob(path, content), "size": size(content), "pointerSize": 134}}
             for path, content in repository.files.items()]
    return {"id": name, "modelId": name, "sha": repository.commit, "private": False, "gated": False, "downloads": 0,
            "tags": [], "siblings": files}


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    _send(request, status, b"", {"X-Error-Code": code, "X-Error-Message": code}, request.command)


def _send(request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], method: str) -> None:
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if method == "GET":
        request.wfile.write(content)
