"""Processes of our own that are told what to do, and answer, over a connection."""

from __future__ import annotations

import subprocess
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
