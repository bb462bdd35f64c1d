"""`pyorch serve` whose reads do as a file says, while it is there. Run by tests with MODEL FILE GRACE.

"broken": they fail. "slow": they wait until the file is gone; FILE.reached is there when one does.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from pyorch.serve.server import serve


class FaultySource:
    def __init__(self, path: str, fault: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._fault = fault

    def read(self, file: int, offset: int, size: int) -> bytes:
        try:
            told = self._fault.read_text()  # nothing yet, of one that is being written
        except FileNotFoundError:
            told = ""
        if told == "broken":
            raise OSError(errno.EIO, "the disk is gone")
        if told == "slow":
            self._fault.with_suffix(".reached").touch()
            while self._fault.exists():
                time.sleep(0.01)
        return os.pread(self._file, size, offset)


model, fault, grace = sys.argv[1:]
sys.exit(serve(model, "20%", ["--port", "0", "-t", "1"], source=FaultySource(model, Path(fault)), grace=float(grace)))
