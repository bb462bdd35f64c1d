"""Ends a server in order: running requests get time, and learned data is written."""

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

GRACE_SECONDS = 10.0  # for running requests to finish

_TELLING_SECONDS = 3.0  # for unfinished requests to receive the error that ends them

# For the computation that still runs after all requests have ended. Then the process exits without it.
_LAST_SECONDS = 20.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = 255  # sent like the number of a signal


class Ending:
    """Ends the server that runs inside serving() on SIGINT or SIGTERM.

    After the first signal:

    1. The server accepts no connection, and closes connections without a complete request.
    2. Running requests have the grace period. Then they end with an error that names the reason.
    3. llama-server returns, and the caller writes its data. Further signals have no effect until the context is left.

    A second signal before llama-server has returned does not wait for it: the data is written and the process exits.

    begin_again() ends the server in the same order.

    Attributes:
        again: The last server ended by begin_again(), without a signal: start another.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._handlers = contextlib.ExitStack()
        self._wakeup: socket.socket | None = None
        self.again = False

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the former signal handlers."""
        self._handlers.close()

    def begin_again(self) -> None:
        """Ends the server so that another can start. Callable on any thread while the server answers."""
        self._wakeup.send(bytes([_AGAIN]))

    @contextlib.contextmanager
    def serving(
        self, is_ready: Callable[[], bool], keep: Callable[[], None], write: Callable[[], None]
    ) -> Iterator[None]:
        """Handles signals while the server runs inside. May be entered again if `again` is True.

        REQUIRES: the main thread.

        Args:
            is_ready: Returns whether the server answers. Before that a signal ends the process: there is no data.
            keep: Called after all requests have ended, before the server ends.
            write: Writes the data if the server does not end in time.
        """
        self._is_ready, self._keep, self._write, self.again = is_ready, keep, write, False
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        # Python's C handler writes the number of a signal to this socket at once. The Python handler has to wait until
        # the main thread returns from llama-server, so it does nothing.
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
                    self._handlers.close()  # signals work as before the first server until the next one is prepared
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
            with contextlib.suppress(OSError):  # stderr is closed
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
        """Waits until every request is answered, at most `seconds`. Returns the signal that ends the server."""
        due = time.monotonic() + seconds
        while self._n_answering() and time.monotonic() < due:
            number = self._heed(self._next(0.05), number)
        return number

    def _heed(self, signaled: int | None, number: int) -> int:
        """Returns the signal that ends the server. The second signal exits the process."""
        if signaled not in _SIGNALS:
            return number
        if not self.again:
            self._end_now(number)
        self.again = False
        return signaled

    def _next(self, seconds: float | None) -> int | None:
        """Returns the next signal or _AGAIN; 0 if the server has returned, None after `seconds`."""
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
