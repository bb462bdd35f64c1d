"""What C calls in Python while an engine runs: who observes its routing, what it reads from, and Ctrl-C meanwhile.

An exception cannot pass through C: an interrupt waits until C returns.
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
    """What cffi calls with what a callback raised (onerror): holds an interrupt, prints everything else."""
    if issubclass(kind, KeyboardInterrupt):
        _thread.held = True
    else:
        traceback.print_exception(kind, error, trace)


def raise_held() -> None:
    """KeyboardInterrupt if one is held in this thread. To be called when C has returned."""
    if getattr(_thread, "held", False):
        _thread.held = False
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Routing:
    """What a layer's router decided for one ubatch.

    experts: int32[n_tokens, n_expert_used]; weights: float32[n_tokens, n_expert_used], as multiplied
    with the outputs; probs: float32[n_tokens, n_expert] after gating; logits: float32[n_tokens, n_expert]
    and inputs: float32[n_tokens, n_embd] of the router; residuals: float32[n_tokens, n_embd] of which the
    inputs are the RMS normalization, None where the model has none. context tells contexts apart; decode: one
    token of each sequence. Before any substitution.
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


# dtype, and the field of pyorch_routing that says how many columns there are
_ROUTING_ARRAYS = {
    "experts": ("int32", "n_expert_used"), "weights": ("float32", "n_expert_used"), "probs": ("float32", "n_expert"),
    "logits": ("float32", "n_expert"), "inputs": ("float32", "n_embd"), "residuals": ("float32", "n_embd"),
}


class RoutingView:
    """What a Routing is made of, while the engine shows it: the same attributes, arrays as views of its memory."""

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
    """A pyorch_observer_fn, which shows an observer each Routing or, without a copy, a RoutingView."""
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
    """Stands in for the files of a map."""

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of shard `file` from offset, fewer than size only at its end. An OSError fails the decode.

        Called by several threads at once. It may ask the engine, but not wait for it (see pyorch.h).
        """


def read_callback(source: Source):
    """A pyorch_read_fn."""
    printed = False  # a bug in a source fails hundreds of reads alike

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
