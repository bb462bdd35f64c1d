"""`pyorch serve` whose reads fail while a file exists. Run by tests/serve/test_serve.py: MODEL PORT FILE."""

from __future__ import annotations

import errno
import os
import sys

from pyorch.serve.server import serve


class FaultySource:
    def __init__(self, path: str, broken: str) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._broken = broken

    def read(self, file: int, offset: int, size: int) -> bytes:
        if os.path.exists(self._broken):
            raise OSError(errno.EIO, "the disk is gone")
        return os.pread(self._file, size, offset)


model, port, broken = sys.argv[1:]
sys.exit(serve(model, "20%", ["--port", port, "-t", "1"], source=FaultySource(model, broken)))
