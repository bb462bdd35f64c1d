"""Runs before the imports of a command: handling of Ctrl-C, and numpy's number of threads.

Ctrl-C while the program starts or ends is quiet, with exit status 130.

A command spends its first tenths of a second on imports. An exception that a signal raises inside an import becomes a
traceback, or an ImportError of a half-imported package. Nothing has started yet that would need cleanup.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

INTERRUPTED = 130  # exit status after the signal


def begin() -> None:
    """Makes Ctrl-C quiet; the program calls this first. An ignored SIGINT, as in a background script, stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def limit_blas(argv: Sequence[str]) -> None:
    """Limits numpy's OpenBLAS to one thread, unless the user chose a number. OpenBLAS reads it when numpy is imported.

    Our matrices are small, and other threads compute at the same time: threads of OpenBLAS would mostly spin. Scripts
    of `pyorch exec` are exempt, also after --config FILE.
    """
    if "exec" not in argv[1:4]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def give_back() -> None:
    """Makes SIGINT raise KeyboardInterrupt again, as in every Python program."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end() -> None:
    """Makes Ctrl-C quiet again, when all output is printed."""
    if signal.getsignal(signal.SIGINT) in (_interrupted, signal.default_int_handler):
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _interrupted(signum: int, frame: FrameType | None) -> None:
    if _imports_for_a_command(frame):
        os._exit(INTERRUPTED)
    signal.default_int_handler(signum, frame)


def _imports_for_a_command(frame: FrameType | None) -> bool:
    """Whether an import is running that the program or a command itself requested."""
    importing, modules = False, []  # modules: modules of the frames around the outermost import
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            importing, modules = True, []
        else:
            modules.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return importing and all(map(_is_the_program, modules))


def _is_the_program(module: str) -> bool:
    return module in ("__main__", "runpy", "pyorch.__main__") or module.split(".")[:2] == ["pyorch", "cli"]
