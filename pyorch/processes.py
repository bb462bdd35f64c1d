"""Processes of our own that are told what to do, and answer, over a connection. They end with their parent."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


def started(
    command: Sequence[str], pass_fds: Iterable[int] = (), **options: Any
) -> tuple[subprocess.Popen, Connection]:
    """A process whose last argument is the descriptor of its end of a connection, and our end of that.

    Objects are sent as pickles. When one of the two ends, the other reads the end of the connection. options: of
    Popen.
    """
    ours, theirs = Pipe()
    with theirs:
        descriptor = theirs.fileno()
        try:
            return subprocess.Popen([*command, str(descriptor)], stdin=subprocess.DEVNULL,
                                    pass_fds=[descriptor, *pass_fds], **options), ours
        except BaseException:
            ours.close()
            raise


def end_with(descriptor: int, seconds: float = 0.0) -> None:
    """Ends this process when the other end of a connection or a pipe is closed, also by a signal that kills its owner.

    Whatever this process computes then is for nobody. What arrives at the descriptor is left to others.

    Args:
        descriptor: Our end.
        seconds: The time in which this process may end in order by itself.
    """
    def wait() -> None:
        closed = select.poll()
        closed.register(descriptor, 0)  # the end of a connection is told unasked
        closed.poll()
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
