"""What comes before the imports of a command: Ctrl-C, and how many threads numpy has.

Ctrl-C while the program starts or ends is quiet, with exit status 130.

A command spends its first tenths of a second on imports. An exception that a signal raises inside one comes out as a
traceback, or as an ImportError of a package that was half there; nothing has begun yet that would have to be ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

INTERRUPTED = 130  # exit status, as of a program that the signal ends


def begin() -> None:
    """Called first by the program. Where SIGINT is ignored, as in the background of a script, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def limit_blas(argv: Sequence[str]) -> None:
    """Has numpy's OpenBLAS compute on one thread, unless the user says otherwise. It reads this when numpy is imported.

    Our matrices are small, and other threads compute beside numpy: threads of OpenBLAS would spin most of their time.
    Not for the scripts of `pyorch exec`, which may have a --config FILE before it.
    """
    if "exec" not in argv[1:4]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def give_back() -> None:
    """From now on SIGINT raises KeyboardInterrupt wherever it comes, as in every program of Python."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end() -> None:
    """Called when all is done and printed: what the interpreter still does is not worth a traceback."""
    if signal.getsignal(signal.SIGINT) in (_interrupted, signal.default_int_handler):
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _interrupted(signum: int, frame: FrameType | None) -> None:
    if _imports_for_a_command(frame):
        os._exit(INTERRUPTED)
    signal.default_int_handler(signum, frame)


def _imports_for_a_command(frame: FrameType | None) -> bool:
    """Whether an import is under way that the program or a command itself asked for, not what it is doing."""
    importing, modules = False, []  # modules: of the frames around the outermost import
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            importing, modules = True, []
        else:
            modules.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return importing and all(map(_is_the_program, modules))


def _is_the_program(module: str) -> bool:
    return module in ("__main__", "runpy", "pyorch.__main__") or module.split(".")[:2] == ["pyorch", "cli"]
