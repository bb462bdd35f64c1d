"""What can go wrong, as sentences for the user.

The command line prints one as `pyorch: error: ...` and exits with status 2.
"""

from __future__ import annotations

import unicodedata


class PyorchError(Exception):
    """A sentence: what was wrong, with which value, and what would be right."""


class BudgetError(PyorchError):
    """The memory that was asked for, or that there is, does not do."""


class OutOfMemoryError(PyorchError, MemoryError):
    """The system has no memory for what was asked."""


class FormatError(PyorchError):
    """A file is missing, damaged, or not what it should be."""


class DeviceError(PyorchError, RuntimeError):
    """A decode failed because the device that computes is lost. A RuntimeError too, as ExpertReadError is."""


class ExpertReadError(PyorchError, RuntimeError):
    """A decode failed because an expert could not be read. The next decode may succeed.

    A RuntimeError too, which is what llama_cpp raises for a failed decode.
    """


def one_line(sentence: str) -> str:
    """A sentence for a terminal or a log.

    A file may have line ends and terminal escapes in its name and in its metadata. They are written as `\\n` and
    `\\x1b`, so a name cannot begin a line of its own, and the terminal does not obey it.
    """
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in sentence)
