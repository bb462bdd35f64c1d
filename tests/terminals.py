"""A terminal to look at."""

from __future__ import annotations

import contextlib
import os
import pty
import threading


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
