"""One request to a server."""

from __future__ import annotations

import http.client
import socket

_SECONDS = 1.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(host: str, port: int, path: str) -> str | None:
    """The answer, None where there is none within a second, or not with status 200. Port 0: the host is a Unix
    socket."""
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS) if port else _UnixConnection(host)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read().decode(errors="replace") if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
