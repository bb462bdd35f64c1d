"""Child processes that receive requests and answer over a connection. They end with their parent."""

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
    """Starts a process whose last argument is the descriptor of its end of a connection.

    Objects are sent as pickles. When one process ends, the other reads the end of the connection.

    Args:
        command: The command without that argument.
        pass_fds: Further descriptors that the process inherits.
        options: Options of Popen.

    Returns:
        The process, and our end of the connection.
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
    """Ends this process when the other end of a connection or pipe closes, also if a signal kills its owner.

    Data at the descriptor stays for others.

    Args:
        descriptor: Our end.
        seconds: The time in which this process may end by itself.
    """
    def wait() -> None:
        closed = select.poll()
        closed.register(descriptor, 0)  # poll() reports the end of a connection without a request
        closed.poll()
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
