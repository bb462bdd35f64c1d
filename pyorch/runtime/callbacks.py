"""Functions that C calls in Python while an engine runs: observers of routing, and sources of bytes.

An exception cannot pass through C, so an interrupt (Ctrl-C) is held until C returns.
"""

from __future__ import annotations

import errno
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from pyorch.library.bindings import ffi
from pyorch.library.numerics import np

_thread = threading.local()


def hold(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Handles the exception of a callback (onerror of cffi): holds an interrupt, and prints any other one."""
    if issubclass(kind, KeyboardInterrupt):
        _thread.held = True
    else:
        traceback.print_exception(kind, error, trace)


def raise_held() -> None:
    """Raises KeyboardInterrupt if this thread holds one. Call it when C has returned."""
    if getattr(_thread, "held", False):
        _thread.held = False
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Routing:
    """The decision of a layer's router for one ubatch, before any substitution.

    Attributes:
        context: Identifies the context.
        il: The block.
        decode: The ubatch has one token of each sequence.
        experts: int32[n_tokens, n_expert_used].
        weights: float32[n_tokens, n_expert_used], as multiplied with the outputs.
        probs: float32[n_tokens, n_expert], after gating.
        logits: float32[n_tokens, n_expert], of the router.
        inputs: float32[n_tokens, n_embd], of the router.
        residuals: float32[n_tokens, n_embd]; `inputs` are their RMS normalization. None: the model has none.
    """

    context: int
    il: int
    decode: bool
    experts: np.ndarray
    weights: np.ndarray
    probs: np.ndarray
    logits: np.ndarray
    inputs: np.ndarray
    residuals: np.ndarray | None = None


# By array: its dtype, and the field of pyorch_routing with its number of columns.
_ROUTING_ARRAYS = {
    "experts": ("int32", "n_expert_used"), "weights": ("float32", "n_expert_used"), "probs": ("float32", "n_expert"),
    "logits": ("float32", "n_expert"), "inputs": ("float32", "n_embd"), "residuals": ("float32", "n_embd"),
}


class RoutingView:
    """A Routing during the observer's call: the same attributes, with arrays that are views of the engine's memory."""

    __slots__ = ("_raw", "context", "decode", "il")

    def __init__(self, raw) -> None:
        self._raw, self.il, self.decode = raw, raw.il, bool(raw.decode)
        self.context = int(ffi.cast("uintptr_t", raw.context))

    def __getattr__(self, name: str) -> np.ndarray | None:
        if name not in _ROUTING_ARRAYS:
            raise AttributeError(name)
        raw, (dtype, columns) = self._raw, _ROUTING_ARRAYS[name]
        pointer, n = getattr(raw, name), getattr(raw, columns)
        if not pointer:
            return None
        return np.frombuffer(ffi.buffer(pointer, raw.n_tokens * n * 4), dtype).reshape(raw.n_tokens, n)


def observer_callback(observer: Callable[[Any], None], copy: bool):
    """Makes a pyorch_observer_fn that passes each Routing or, without a copy, RoutingView to an observer."""
    @ffi.callback("pyorch_observer_fn", onerror=hold)
    def observe(_user, raw):
        view = RoutingView(raw)
        if not copy:
            observer(view)
            return
        arrays = {name: getattr(view, name) for name in _ROUTING_ARRAYS}
        copies = {name: None if array is None else array.copy() for name, array in arrays.items()}
        observer(Routing(view.context, view.il, view.decode, **copies))

    return observe


class Source(Protocol):
    """Replaces the files of a map."""

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Returns bytes of shard `file` from offset, fewer than size only at its end. An OSError fails the decode.

        Several threads call it at once. It may query the engine, but must not wait for it (see pyorch.h).
        """


def read_callback(source: Source):
    """Makes a pyorch_read_fn of a source."""
    printed = False  # a bug in a source fails hundreds of reads in the same way

    @ffi.callback("pyorch_read_fn")
    def read(_user, file, offset, buffer, size):
        nonlocal printed
        try:
            data = source.read(file, offset, size)
            if len(data) > size:
                raise ValueError(f"the source returned {len(data)} bytes where {size} were asked for")
            ffi.memmove(buffer, data, len(data))
            return len(data)
        except OSError as error:
            return -(error.errno if error.errno in errno.errorcode else errno.EIO)
        except Exception:
            if not printed:
                traceback.print_exc()
            printed = True
            return -errno.EIO

    return read
