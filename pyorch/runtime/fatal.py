"""llama.cpp's fatal errors, which end the process: their sentence is seen, and a model can be refused instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyorch.library.bindings import lib


def show() -> None:
    """From now on their sentence reaches the stderr of this moment, whatever llama_cpp redirects."""
    lib.pyorch_show_fatal_errors()


def notice(line: str) -> None:
    """A line "pyorch: ..." to that stderr."""
    lib.pyorch_notice(line.encode())


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Inside, loading or quantizing a model and making a context fail, with the sentence in llama.cpp's log.

    For these three alone: llama.cpp catches exceptions nowhere else.
    """
    show()  # which hears of them
    lib.pyorch_refuse_fatal_errors(1)
    try:
        yield
    finally:
        lib.pyorch_refuse_fatal_errors(0)
