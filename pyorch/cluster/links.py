"""Measures the link between two servers, over a TCP connection on which both prove that they have the token."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

from pyorch.errors import PyorchError
from pyorch.sizes import MiB

_SMALL = bytes(64)  # sent to and fro to measure latency
_LARGE = bytes(4 * MiB)  # sent to measure bandwidth; small enough for a slow network
_ROUND_TRIPS, _TRANSFERS = 50, 5


@dataclass(frozen=True)
class Measured:
    """A measured link. latency: seconds, one way."""

    bytes_per_second: float
    latency: float


class Echo(socketserver.ThreadingTCPServer):
    """Answers each message with 64 bytes, until it is closed.

    Attributes:
        port: A free port of the address, on which it listens.
    """

    daemon_threads = True  # closing does not wait for connected clients

    def __init__(self, address: str, token: str) -> None:
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self._token = token.encode()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def finish_request(self, request: socket.socket, client_address: object) -> None:
        """Answers one connection, in its thread."""
        _send_at_once(request)
        # Strangers may send anything.
        with Connection(request.detach()) as connection, contextlib.suppress(AuthenticationError, OSError, EOFError):
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            while True:
                connection.recv_bytes(len(_LARGE))
                connection.send_bytes(_SMALL)


def measure_link(address: str, port: int, token: str) -> Measured:
    """Measures the link from here to an Echo.

    Raises:
        PyorchError: It cannot be reached, or has another token.
    """
    try:
        with Client((address, port), authkey=token.encode()) as connection:
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                _send_at_once(same)
            _seconds(connection, _SMALL)  # not measured: it includes the start of the other side's thread
            small = statistics.median(_seconds(connection, _SMALL) for _ in range(_ROUND_TRIPS))
            large = statistics.median(_seconds(connection, _LARGE) for _ in range(_TRANSFERS))
    except AuthenticationError:
        raise PyorchError(f"{address} port {port} has another token") from None
    except (OSError, EOFError) as error:
        raise PyorchError(f"{address} port {port} cannot be reached: {error}") from None
    # The transfer takes the time beyond a round trip, which may be within the noise on a very fast link.
    return Measured(len(_LARGE) / max(large - small, 1e-6), small / 2)


def _seconds(connection: Connection, message: bytes) -> float:
    begin = time.perf_counter()
    connection.send_bytes(message)
    connection.recv_bytes(len(_SMALL))
    return time.perf_counter() - begin


def _send_at_once(connection: socket.socket) -> None:
    """Turns off Nagle's algorithm, which would delay small messages."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
