"""The address that a server listens on, and requests to it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pyorch import ports
from pyorch.errors import PyorchError
from pyorch.serve import llama_server
from pyorch.serve.llama_server import Flags

_SECONDS = 1.0  # timeout of a request


@dataclass(frozen=True)
class Address:
    """The address of a server.

    Attributes:
        host: The path of a Unix socket if `port` is 0.
        port: 0 for a Unix socket.
        prefix: The value of --api-prefix.
        scheme: https if a proxy before the server speaks TLS.
    """

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
        """Returns whether the server answers that its model is loaded."""
        return self.get("/health") is not None

    def get(self, path: str, key: str = "") -> str | None:
        """Returns the body of an answer with status 200. None: there was no such answer within a second."""
        return self._ask("GET", path, None, key)

    def post(self, path: str, body: str, key: str = "") -> str | None:
        """Sends JSON. Returns as get() does."""
        return self._ask("POST", path, body, key)

    def _ask(self, method: str, path: str, body: str | None, key: str) -> str | None:
        import http.client  # takes 10 ms, so import it only once the model is loaded

        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        connection = http.client.HTTPConnection(host if self.port else "localhost", self.port or None, timeout=_SECONDS)
        try:
            if not self.port:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(_SECONDS)
                connection.sock.connect(self.host)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            headers |= {"Content-Type": "application/json"} if body else {}
            connection.request(method, f"{self.prefix}{path}", body and body.encode(), headers)
            answer = connection.getresponse()
            return answer.read().decode(errors="replace") if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def free_address(server: Flags) -> Address:
    """Returns the address to listen on, with a free port if --port is 0.

    Called before the model is loaded, because llama-server would fail only afterwards.

    Raises:
        PyorchError: The server cannot listen on this address.
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
