"""llama.cpp's log: quiet by default. Its last errors are kept for error messages.

llama.cpp has one log per process. The callback installed here keeps the rule of llama-cpp-python (Llama(verbose=...)
sets the level), but errors of a quiet load become part of the exception and are not written to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator

import llama_cpp.llama_cpp as llama
from llama_cpp._logger import logger

from pyorch.library.bindings import ffi, string
from pyorch.runtime import fatal
from pyorch.runtime.callbacks import hold

# enum ggml_log_level. llama_cpp's own table belongs to an older llama.cpp.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUED = 5

_last_errors: deque[str] = deque(maxlen=16)
_collecting = threading.local()
_last_level = logging.NOTSET
_quiet = False


# By cffi: ctypes would print and lose a Ctrl-C, and while a model is loaded, no other Python code runs.
@ffi.callback("void(int, const char *, void *)", onerror=hold)
def _on_log(level: int, text, _user: object) -> None:
    global _last_level
    line = string(text)
    if level != _CONTINUED:
        _last_level = _LEVELS.get(level, logging.CRITICAL)
    if _last_level == logging.ERROR:
        _last_errors.append(line.strip())
    lines = getattr(_collecting, "lines", None)
    if lines is not None:
        lines.append(line)
        return
    if not _quiet and logger.level <= _last_level:
        sys.stderr.write(line)


def install() -> None:
    """Installs this log for the process, including fatal errors. llama_cpp installs its own at import."""
    fatal.show()
    llama.llama_log_set(llama.llama_log_callback(int(ffi.cast("uintptr_t", _on_log))), ctypes.c_void_p(0))


def set_quiet(quiet: bool) -> None:
    """Turns the log off, including errors, or on."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    return _quiet


def last_error() -> str:
    """Returns the first error of llama.cpp's log, "" if there is none."""
    # The first error is the cause. A line begins with the name of a function.
    first = " ".join(next((line for line in _last_errors if line), "").split())
    return first.split(": ", 1)[-1].removeprefix("error loading model: ")


def forget_errors() -> None:
    _last_errors.clear()


@contextlib.contextmanager
def collect() -> Iterator[list[str]]:
    """Collects the lines that this thread makes llama.cpp log, without writing them. The innermost call gets them."""
    before, _collecting.lines = getattr(_collecting, "lines", None), []
    try:
        yield _collecting.lines
    finally:
        _collecting.lines = before
