"""Terminals to look at, and to type into."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time

from processes import HANG_SECONDS

_LOOKS = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")  # what users set
_WHERE = b"\x1b[6n"  # asks a terminal where its cursor is


class Terminal:
    """A pseudo-terminal that is read as it is written."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last writer has closed it
            while part := os.read(self._master, 65536):
                self._parts.append(part)

    def text(self) -> str:
        """All that was written, after which nothing more can be."""
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._parts).decode()


class Dialogue:
    """A process on a pseudo-terminal of its own, which is typed into when it has said what is waited for."""

    def __init__(self, *command: object, **variables: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in _LOOKS}
        environment = {**inherited, "TERM": "xterm", **variables}
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=_take_terminal)
        os.close(slave)
        self._said = b""  # since the last expect()

    def expect(self, text: str) -> str:
        """Waits until the process says this. Returns what it said until then."""
        return self._read(text.encode()).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> tuple[int, str]:
        """The exit status, when it has ended, and what it said at last."""
        said = self._read(None).decode(errors="replace")
        return self._process.wait(HANG_SECONDS), said

    def _read(self, wanted: bytes | None) -> bytes:
        until = time.monotonic() + HANG_SECONDS
        while wanted is None or wanted not in self._said:
            ready, _, _ = select.select([self._master], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{wanted!r} did not come, but {self._said!r}"
            try:
                part = os.read(self._master, 65536)
            except OSError:  # it has ended
                part = b""
            if not part:
                assert wanted is None, f"{wanted!r} did not come, but {self._said!r}"
                said, self._said = self._said, b""
                return said
            for _ in range(part.count(_WHERE)):
                self.type("\x1b[1;1R")
            self._said += part
        said, _, self._said = self._said.partition(wanted)
        return said + wanted

    def __enter__(self) -> Dialogue:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    """Ctrl-C reaches it, also where the tests run in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
