"""A source of experts that fails when it is told to."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class FaultySource:
    """Reads a file, and misbehaves as told by `fault`."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.fault = ""
        self.n_faults = 0

    def read(self, file: int, offset: int, size: int) -> bytes:
        assert file == 0
        if not self.fault:
            return os.pread(self._file, size, offset)
        self.n_faults += 1
        if self.fault == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fault == "nothing":
            return b""
        if self.fault == "short":
            return os.pread(self._file, size // 2, offset)
        if self.fault == "too much":
            return os.pread(self._file, size, offset) + b"!"
        raise RuntimeError(self.fault)
