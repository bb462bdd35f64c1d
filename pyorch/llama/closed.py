"""What a llama_cpp.Llama becomes when its model is freed.

llama_cpp hands null pointers to llama.cpp then, which ends the process. Whoever still holds the object, or a generator
that it made, gets an exception instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import llama_cpp

from pyorch.errors import PyorchError
from pyorch.library.bindings import check, ffi, lib


class ClosedLlama(llama_cpp.Llama):
    """A Llama without a model. All that it has left can be closed again."""

    def __getattribute__(self, name: str) -> object:
        if name in ("close", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise PyorchError("the model was closed: load it again")

    def __repr__(self) -> str:
        return "<closed llama_cpp.Llama>"

    def close(self) -> None:
        """Does nothing."""

    def __del__(self) -> None:
        pass


def closing(close: Callable[[llama_cpp.Llama], None], is_managed: Callable[[int], bool]) -> Callable:
    """Llama.close, after which nothing else can be done with the objects of managed models.

    PyorchError inside a callback of an engine, and the model stays.
    """

    @functools.wraps(close)
    def wrapper(self: llama_cpp.Llama) -> None:
        model = getattr(getattr(self, "_model", None), "model", None)
        managed = model is not None and is_managed(model)
        if managed:
            check(lib.pyorch_engine_free(ffi.NULL))  # refused inside a callback, whose decode needs the model
        close(self)
        if managed:
            self.__class__ = ClosedLlama

    return wrapper
