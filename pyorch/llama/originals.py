"""Replaces functions of `llama_cpp.llama_cpp` for the whole process, and keeps the originals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import llama_cpp
import llama_cpp.llama_cpp as llama

_originals: dict[str, Callable] = {}


def original(name: str) -> Callable:
    """Returns a function of llama_cpp.llama_cpp as it was before a replacement."""
    return _originals.get(name) or getattr(llama, name)


def replace(name: str, wrapper: Callable) -> None:
    """Replaces a function by wrapper, which gets the original before the arguments."""
    function = _originals[name] = getattr(llama, name)
    replacement = functools.wraps(function)(functools.partial(wrapper, function))
    setattr(llama, name, replacement)
    setattr(llama_cpp, name, replacement)
