"""Where a server listens, and what it answers there."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pyorch import ports
from pyorch.errors import PyorchError
from pyorch.serve import llama_server
from pyorch.serve.llama_server import Flags

_SECONDS = 1.0  # that an answer has


@dataclass(frozen=True)
class Address:
    """Port 0: a Unix socket, whose path is the host. scheme: https where something in front of it speaks TLS."""

    host: str
    port: int
    prefix: str
    scheme: str = "http"

    @property
    def url(self) -> str:
        if not self.port:
            return f"unix://{self.host}{self.prefix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def is_healthy(self) -> bool:
        """Whether the server answers that its model is loaded."""
        return self.get("/health") is not None

    def get(self, path: str, key: str = "") -> str | None:
        """What the server answers, None where it has not done so within a second, or not with status 200."""
        import http.client  # takes a hundredth of a second, and is for when the model is loaded

        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        connection = http.client.HTTPConnection(host if self.port else "localhost", self.port or None, timeout=_SECONDS)
        try:
            if not self.port:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(_SECONDS)
                connection.sock.connect(self.host)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request("GET", f"{self.prefix}{path}", headers=headers)
            answer = connection.getresponse()
            return answer.read().decode(errors="replace") if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def free_address(server: Flags) -> Address:
    """The address to listen on, a free port for port 0. PyorchError if it cannot be listened on.

    Tried here before the model is loaded, to say it in a sentence.
    """
    server.default(llama_server.HOST, "--host", "127.0.0.1")
    server.default(llama_server.PORT, "--port", 8080)
    host = server.value(llama_server.HOST).split(",")[0]
    port = server.number(llama_server.PORT, 8080)
    prefix = server.value(llama_server.API_PREFIX)
    if host.endswith(".sock"):
        return Address(host, 0, prefix)
    try:
        with ports.held(host, port) as free:
            pass
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PyorchError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None
    if port == 0:
        server.replace(llama_server.PORT, free)
    return Address(host, free, prefix)
