"""TLS around the connections of a server's engine, which are plain: a process beside it.

    engine --plain, loopback--> tunnel process --TLS--> tunnel process of another server --plain, loopback--> its engine

Another one does so for a server's endpoint, a socket in a directory that nobody else can read: users come with TLS, and
show no certificate.

It is a process of its own so that neither waits for the other's interpreter. It ends with the one that owns this. When
it dies, its connections break, which engines notice at once; it is started again, with the same ports: those belong to
the owner, so that nobody else can take them, and be told the token, meanwhile.
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
_PAUSE_SECONDS = 0.25, 8.0  # before it is started again: the longer the more often it died soon
_SOON_SECONDS = 10.0
_START_SECONDS, _END_SECONDS = 60.0, 5.0


class Tunnel:
    """Of one server, ready when it is made. May be used by several threads.

    handshake_seconds: that one may take. PyorchError, by file, where its certificate cannot be used.
    """

    def __init__(self, tls: Tls, handshake_seconds: float = HANDSHAKE_SECONDS) -> None:
        for listens in (True, False):
            tls.context(listens=listens)
        self._tls, self._handshake_seconds = tls, handshake_seconds
        self._ways: list[tuple[socket.socket, Way]] = []
        self._changing = threading.Lock()
        self._closed, self._ready = threading.Event(), threading.Event()
        self._said = threading.Condition()
        self._error, self.n_errors = "", 0  # the last one, and how many there were
        self._process, self._channel = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        if not self._ready.wait(_START_SECONDS):
            self.close()
            raise PyorchError("the process that speaks TLS does not start")

    @property
    def pid(self) -> int:
        """Of its process, now."""
        return self._process.pid

    def error_after(self, n_errors: int, seconds: float = 0.5) -> str:
        """The next one after so many, which may still be on its way; "" if none comes."""
        with self._said:
            return self._error if self._said.wait_for(lambda: self.n_errors > n_errors, seconds) else ""

    def listen(self, address: str, port: int, to_port: int) -> int:
        """Others reach a port of the loopback interface through TLS there. Returns the port; for 0 a free one.

        PyorchError where nobody can listen there.
        """
        return self._open(address, port, Way(True, "", _LOOPBACK, to_port))

    def listen_to_users(self, address: str, port: int, to: str) -> int:
        """The same for who has no certificate, to a Unix socket."""
        return self._open(address, port, Way(True, "", to, 0, public=True))

    def port_to(self, address: str, port: int) -> int:
        """The port of the loopback interface from which TLS leads to another server."""
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
        """Ends the process and all connections."""
        self._closed.set()
        with self._changing:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)  # which both ends hear
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
        # Packets keep a message and the descriptor in it together.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen([sys.executable, "-m", PROGRAM, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                                       pass_fds=(theirs.fileno(),), start_new_session=True)
        ours.sendall(pickle.dumps((self._tls, self._handshake_seconds)))
        return process, ours

    def _tell(self, listening: socket.socket, way: Way) -> None:
        with contextlib.suppress(OSError):  # it has just died: the next one is told of all ways
            socket.send_fds(self._channel, [pickle.dumps(way)], [listening.fileno()])

    def _keep(self) -> None:
        """Hears what the process says, and starts another one when it ends."""
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
