"""Ctrl-C while C calls back into Python. An exception cannot pass through C: the interrupt waits until C returns."""

from __future__ import annotations

import threading
import traceback
from types import TracebackType

_thread = threading.local()


def hold(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What cffi calls with what a callback raised (onerror): holds an interrupt, prints everything else."""
    if issubclass(kind, KeyboardInterrupt):
        _thread.held = True
    else:
        traceback.print_exception(kind, error, trace)


def raise_held() -> None:
    """KeyboardInterrupt if one is held in this thread. To be called when C has returned."""
    if getattr(_thread, "held", False):
        _thread.held = False
        raise KeyboardInterrupt
