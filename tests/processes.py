"""Child processes of the tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

# Only there to end a hang: no test says how fast anything is, and the machine may have much else to do.
HANG_SECONDS = 900


def heed_ctrl_c() -> None:
    """A preexec_fn: what runs in the background of a shell ignores Ctrl-C, or the end of its terminal."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_alive(pid: int | str) -> bool:
    """Whether there is such a process that has not ended: nobody may ever ask how an orphan did. Reads /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def python(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter with arguments. What it prints is text, unless an option says otherwise."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": HANG_SECONDS, **options})


def pyorch(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of pyorch."""
    return python("-m", "pyorch", *arguments, **options)
