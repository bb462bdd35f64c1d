"""How a server ends: when it is told, in order, and not before what it learned is written."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from pyorch.serve.library import ffi, lib
from pyorch.sizes import counted

GRACE_SECONDS = 10.0  # in which requests that run may end

_TELLING_SECONDS = 3.0  # in which requests that did not end are told that the server does

# For what is being computed when the requests were ended; then the process ends without it.
_LAST_SECONDS = 20.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = 255  # among their numbers


class Ending:
    """SIGINT and SIGTERM end the server that runs inside serving().

    The first one: no connection is accepted any more, and those end that have not sent a whole request. Requests that
    run have so many seconds; what is left of them ends with an error that says why. Then llama-server returns, and the
    caller writes what it has to write; further signals are without effect until the context is left. A second signal
    before llama-server has returned does not wait for it: what is to be written is written, and the process ends.

    begin_again() ends the server in the same order. again: that was all, and another server is to begin: no signal
    came.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._handlers = contextlib.ExitStack()
        self._wakeup: socket.socket | None = None
        self.again = False

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, *_: object) -> None:
        """Signals go to whom they went before."""
        self._handlers.close()

    def begin_again(self) -> None:
        """On any thread, while the server answers."""
        self._wakeup.send(bytes([_AGAIN]))

    @contextlib.contextmanager
    def serving(
        self, is_ready: Callable[[], bool], keep: Callable[[], None], write: Callable[[], None]
    ) -> Iterator[None]:
        """The server runs inside. REQUIRES: the main thread. May be entered once more where `again` says so.

        Args:
            is_ready: whether the server answers. Before, there is nothing to write, and a signal ends the process.
            keep: what is to be done before the server ends, when all requests have.
            write: what is to be written when the server ended, for the case that it does not.
        """
        self._is_ready, self._keep, self._write, self.again = is_ready, keep, write, False
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        # Python's own handler in C writes the number of a signal there at once; that in Python, which waits until the
        # main thread comes back from llama-server, does nothing.
        for number in _SIGNALS:
            self._handlers.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        thread = threading.Thread(target=self._run, name="ending", daemon=True)
        with self._signals, self._wakeup:
            before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            thread.start()
            try:
                yield
            finally:
                if self.again:
                    self._handlers.close()  # while the next server is prepared, as before the first one
                self._signals.shutdown(socket.SHUT_RD)
                thread.join()
                signal.set_wakeup_fd(before)

    def _run(self) -> None:
        number = self._next(None)
        if number == 0:
            return
        self.again = number == _AGAIN
        if not self.again and not self._is_ready():
            os._exit(128 + number)
        lib.pyorch_server_stop_accepting()
        n = self._n_answering()
        if n and not self.again:
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(f"pyorch: ending, with {self._grace:g} s for {counted(n, 'request')}; a second signal ends at "
                      "once", file=sys.stderr, flush=True)
        number = self._let_end(self._grace, number)
        lib.pyorch_server_end_answers()
        number = self._let_end(_TELLING_SECONDS, number)
        if not self.again:
            self._keep()
        threading.Thread(target=lib.pyorch_server_cancel, daemon=True).start()
        due = time.monotonic() + _LAST_SECONDS
        while self.again or time.monotonic() < due:
            signaled = self._next(0.5)
            if signaled == 0:
                return
            number = self._heed(signaled, number)
        self._end_now(number)

    def _let_end(self, seconds: float, number: int) -> int:
        """Waits until every request is answered, for so long at most."""
        due = time.monotonic() + seconds
        while self._n_answering() and time.monotonic() < due:
            number = self._heed(self._next(0.05), number)
        return number

    def _heed(self, signaled: int | None, number: int) -> int:
        """The signal that ends the server, after this one: the first of all, the second ends the process."""
        if signaled not in _SIGNALS:
            return number
        if not self.again:
            self._end_now(number)
        self.again = False
        return signaled

    def _next(self, seconds: float | None) -> int | None:
        """The number of the next signal, or _AGAIN; 0 when the server has returned, None after so many seconds."""
        due = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if due is None else max(0.0, due - time.monotonic())
            if not select.select([self._signals], [], [], left)[0]:
                return None
            received = self._signals.recv(1)
            if not received:
                return 0
            if received[0] in (*_SIGNALS, _AGAIN):
                return received[0]

    def _end_now(self, number: int) -> None:
        try:
            self._write()
        finally:
            os._exit(128 + number)

    @staticmethod
    def _n_answering() -> int:
        connections = ffi.new("pyorch_connections *")
        lib.pyorch_server_get_connections(connections)
        return connections.answering
