"""Errors, as sentences for the user.

The command line prints one as `pyorch: error: ...` and exits with status 2.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable


class PyorchError(Exception):
    """A sentence that says what was wrong, with which value, and what to do."""


class BudgetError(PyorchError):
    """The requested or available memory is too small."""


class OutOfMemoryError(PyorchError, MemoryError):
    """The system has no memory for the request."""


class FormatError(PyorchError):
    """A file is missing, damaged, or of the wrong kind."""


class DeviceError(PyorchError, RuntimeError):
    """A decode failed because a computing device is lost. Also a RuntimeError, like ExpertReadError."""


class ExpertReadError(PyorchError, RuntimeError):
    """A decode failed because an expert could not be read. The next decode may succeed.

    Also a RuntimeError, which llama_cpp raises for a failed decode.
    """


def one_line(sentence: str) -> str:
    r"""Returns a sentence for a terminal or a log, on one line.

    Names and metadata of files may have line ends and terminal escapes. They become `\n` and `\x1b`, so a name cannot
    start a line of its own or control the terminal.
    """
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in sentence)


def because(error: Exception) -> str:
    """Returns Python's reason why a text is no number, JSON or TOML, without its advice to programmers."""
    said = str(error)
    return "a number in it has too many digits" if "set_int_max_str_digits" in said else said


def short_numbers(sentence: str) -> str:
    """Returns a sentence with long numbers shortened."""
    return re.sub(r"\d{100,}", lambda digits: f"{digits[0][:20]}... ({len(digits[0])} digits)", sentence)


def without_folders(sentence: str, files: Iterable[str | os.PathLike]) -> str:
    """Returns a sentence for the users of a server, with names of files but without their folders.

    Args:
        sentence: A sentence that may have paths.
        files: Files in the folders to leave out.
    """
    folders = {os.path.join(os.path.dirname(file), "") for file in files if os.path.dirname(file)}
    for folder in sorted(folders, key=len, reverse=True):
        sentence = re.sub(rf"(?<![\w./-]){re.escape(folder)}", "", sentence)
    return sentence
