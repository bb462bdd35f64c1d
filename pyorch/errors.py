"""What can go wrong, as sentences for the user.

The command line prints one as `pyorch: error: ...` and exits with status 2.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable


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


def because(error: Exception) -> str:
    """What Python says of a text that it cannot read as a number, JSON or TOML, without its advice to programmers."""
    said = str(error)
    return "a number in it has too many digits" if "set_int_max_str_digits" in said else said


def short_numbers(sentence: str) -> str:
    """A sentence in which no number fills the terminal."""
    return re.sub(r"\d{100,}", lambda digits: f"{digits[0][:20]}... ({len(digits[0])} digits)", sentence)


def without_folders(sentence: str, files: Iterable[str | os.PathLike]) -> str:
    """A sentence for the users of a server, who are told the names of its files and not where these are.

    Args:
        files: Files in the folders to leave out.
    """
    folders = {os.path.join(os.path.dirname(file), "") for file in files if os.path.dirname(file)}
    for folder in sorted(folders, key=len, reverse=True):
        sentence = re.sub(rf"(?<![\w./-]){re.escape(folder)}", "", sentence)
    return sentence
