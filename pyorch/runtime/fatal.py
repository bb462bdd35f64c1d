"""Fatal errors of llama.cpp, which end the process: shows their message, or refuses a model instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyorch.library.bindings import lib


def show() -> None:
    """Prints their messages to the present stderr, even if llama_cpp redirects stderr later."""
    lib.pyorch_show_fatal_errors()


def notice(line: str) -> None:
    """Prints a line "pyorch: ..." to that stderr."""
    lib.pyorch_notice(line.encode())


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Makes loading, quantizing and making a context fail without ending the process, in the `with` block.

    The message is in llama.cpp's log. Only for these three: llama.cpp catches exceptions nowhere else.
    """
    show()  # installs the handler
    lib.pyorch_refuse_fatal_errors(1)
    try:
        yield
    finally:
        lib.pyorch_refuse_fatal_errors(0)
