"""TLS for the engine's plain connections to other servers, in a separate process.

    engine --plain, loopback--> tunnel process --TLS--> tunnel process of another server --plain, loopback--> its engine

Another such process serves HTTPS at a server's endpoint: users connect with TLS, without a certificate, and it forwards
to a Unix socket in a private directory.

It is a separate process so that TLS and the server do not wait for each other's interpreter. It ends with its owner. If
it dies, its connections break, which engines notice at once. It is restarted with the same listening sockets: the owner
keeps these, so that no other program can take the ports meanwhile and learn the token.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import sys
import threading
import time

from pyorch.cluster.tls import Tls
from pyorch.cluster.tunnel_process import READY, Way
from pyorch.errors import PyorchError

PROGRAM = "pyorch.cluster.tunnel_process"
HANDSHAKE_SECONDS = 3.0
_LOOPBACK = "127.0.0.1"
_PAUSE_SECONDS = 0.25, 8.0  # before a restart; grows if the process dies soon after each start
_SOON_SECONDS = 10.0
_START_SECONDS, _END_SECONDS = 60.0, 5.0


class Tunnel:
    """The TLS process of one server, which is ready after the constructor. May be used by several threads."""

    def __init__(self, tls: Tls, handshake_seconds: float = HANDSHAKE_SECONDS) -> None:
        for listens in (True, False):
            tls.context(listens=listens)
        self._tls, self._handshake_seconds = tls, handshake_seconds
        self._ways: list[tuple[socket.socket, Way]] = []
        self._changing = threading.Lock()
        self._closed, self._ready = threading.Event(), threading.Event()
        self._said = threading.Condition()
        self._error, self.n_errors = "", 0  # the last error, and the number of errors
        self._process, self._channel = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        if not self._ready.wait(_START_SECONDS):
            self.close()
            raise PyorchError("the process that speaks TLS does not start")

    @property
    def pid(self) -> int:
        """The present process."""
        return self._process.pid

    def error_after(self, n_errors: int, seconds: float = 0.5) -> str:
        """Waits for the error after the first `n_errors`; "" if there is none in time."""
        with self._said:
            return self._error if self._said.wait_for(lambda: self.n_errors > n_errors, seconds) else ""

    def listen(self, address: str, port: int, to_port: int) -> int:
        """Accepts TLS at an address and forwards to a port of the loopback interface.

        Returns:
            The port; for 0 a free one.

        Raises:
            PyorchError: The address and port cannot be used.
        """
        return self._open(address, port, Way(True, "", _LOOPBACK, to_port))

    def listen_to_users(self, address: str, port: int, to: str) -> int:
        """Accepts users, without certificates, and forwards to a Unix socket. Returns and raises as listen()."""
        return self._open(address, port, Way(True, "", to, 0, public=True))

    def port_to(self, address: str, port: int) -> int:
        """Returns a port of the loopback interface that leads to another server through TLS.

        Raises:
            PyorchError: The address does not exist.
        """
        try:
            found = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise PyorchError(f"{address} is no address: {error.strerror}") from None
        wanted = Way(False, address, found, port)
        for listening, way in list(self._ways):
            if way == wanted:
                return listening.getsockname()[1]
        return self._open(_LOOPBACK, 0, wanted)

    def close(self) -> None:
        """Ends the process and all its connections."""
        self._closed.set()
        with self._changing:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes both ends
            for listening, _ in self._ways:
                listening.close()
            self._ways.clear()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._keeper.join()
        self._channel.close()

    def _open(self, host: str, port: int, way: Way) -> int:
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(where[:2], family=family, backlog=64)
        except OSError as error:
            raise PyorchError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
        with self._changing:
            self._ways.append((listening, way))
            self._tell(listening, way)
        return listening.getsockname()[1]

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        # Packets keep a message together with its descriptor.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen([sys.executable, "-m", PROGRAM, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                                       pass_fds=(theirs.fileno(),), start_new_session=True)
        ours.sendall(pickle.dumps((self._tls, self._handshake_seconds)))
        return process, ours

    def _tell(self, listening: socket.socket, way: Way) -> None:
        with contextlib.suppress(OSError):  # it has just died: the next one will be told all ways
            socket.send_fds(self._channel, [pickle.dumps(way)], [listening.fileno()])

    def _keep(self) -> None:
        """Receives errors of the process, and restarts it when it ends."""
        began, pause = time.monotonic(), _PAUSE_SECONDS[0]
        while not self._closed.is_set():
            try:
                said = self._channel.recv(1 << 16)
            except OSError:
                said = b""
            if said == READY.encode():
                self._ready.set()
                continue
            if said:
                self._note(said.decode(errors="replace"))
                continue
            self._process.wait()
            soon = time.monotonic() - began < _SOON_SECONDS
            pause = min(2 * pause, _PAUSE_SECONDS[1]) if soon else _PAUSE_SECONDS[0]
            if self._closed.wait(pause):
                return
            began = time.monotonic()
            self._note("the process that speaks TLS has died, and was started again")
            with self._changing:
                if self._closed.is_set():
                    return
                self._channel.close()
                with contextlib.suppress(OSError):
                    self._process, self._channel = self._start()
                    for listening, way in self._ways:
                        self._tell(listening, way)

    def _note(self, error: str) -> None:
        with self._said:
            self._error, self.n_errors = error, self.n_errors + 1
            self._said.notify_all()
