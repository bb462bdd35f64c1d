"""A hub on this machine: what huggingface_hub asks for, served from memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Repository:
    """files: contents by path. token: that is asked for. gated: its terms have to be accepted."""

    files: dict[str, bytes]
    token: str = ""
    gated: bool = False
    commit: str = field(default="0123456789abcdef0123456789abcdef01234567")


class HubServer:
    """repositories: by ORG/NAME. requests: (method, path, Range), in their order. cut_after: bytes of a file after
    which the connection breaks, once."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str]] = []
        self.cut_after: int | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                server.answer(self, "HEAD")

            def do_GET(self) -> None:
                server.answer(self, "GET")

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
            repository = self._find(request, match[1], match[2] or "main")
            if repository is not None:
                _send(request, 200, json.dumps(_listing(match[1], repository)).encode(),
                      {"Content-Type": "application/json"}, method)
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path):
            repository = self._find(request, match[1], match[2])
            if repository is not None:
                self._send_file(request, repository, match[3], method)
        else:
            _send(request, 404, b"", {}, method)

    def _find(self, request: BaseHTTPRequestHandler, name: str, revision: str) -> Repository | None:
        repository = self.repositories.get(name)
        known = repository is not None and request.headers.get("Authorization", "") in (
            ("",) if not repository.token else (f"Bearer {repository.token}",))
        if not known:
            _refuse(request, 401, "RepoNotFound")
        elif repository.gated:
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
        headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if method == "GET" and self.cut_after is not None and len(content) > self.cut_after:
            cut, self.cut_after = self.cut_after, None
            request.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                request.send_header(key, value)
            request.end_headers()
            request.wfile.write(content[:cut])
            request.wfile.flush()
            request.close_connection = True
            return
        _send(request, 206 if wanted else 200, content[first:], headers, method)


def _blob(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _listing(name: str, repository: Repository) -> dict[str, object]:
    files = [{"rfilename": path, "size": len(content), "blobId": _blob(content)[:40],
              "lfs": {"sha256": _blob(content), "size": len(content), "pointerSize": 134}}
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
