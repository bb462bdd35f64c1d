"""Processes that keep a processor busy while something is measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# Ctrl-C is for the benchmark, which ends them. They end by themselves, too, when it is gone, however it ended.
_PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """n processes that compute without a pause, until the block is left."""
    command = [sys.executable, "-S", "-E", "-c", _PROGRAM, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
