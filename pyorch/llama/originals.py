"""Functions of `llama_cpp.llama_cpp` that are replaced for the whole process, and as they were before."""

from __future__ import annotations

import functools
from collections.abc import Callable

import llama_cpp
import llama_cpp.llama_cpp as llama

_originals: dict[str, Callable] = {}


def original(name: str) -> Callable:
    """A function of llama_cpp.llama_cpp as it was before it was replaced, if it was."""
    return _originals.get(name) or getattr(llama, name)


def replace(name: str, wrapper: Callable) -> None:
    """From now on a call is one of wrapper, which gets the function itself before the arguments."""
    function = _originals[name] = getattr(llama, name)
    replacement = functools.wraps(function)(functools.partial(wrapper, function))
    setattr(llama, name, replacement)
    setattr(llama_cpp, name, replacement)
