"""What an engine shows its observers: what routers decide, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyorch.library.bindings import ffi
from pyorch.library.numerics import np
from pyorch.runtime.interrupts import hold


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

    __slots__ = ("_raw",)

    def __init__(self, raw) -> None:
        self._raw = raw

    @property
    def context(self) -> int:
        return int(ffi.cast("uintptr_t", self._raw.context))

    @property
    def il(self) -> int:
        return self._raw.il

    @property
    def decode(self) -> bool:
        return bool(self._raw.decode)

    def __getattr__(self, name: str) -> np.ndarray | None:
        if name not in _ROUTING_ARRAYS:
            raise AttributeError(name)
        raw, (dtype, columns) = self._raw, _ROUTING_ARRAYS[name]
        pointer, n = getattr(raw, name), getattr(raw, columns)
        if not pointer:
            return None
        return np.frombuffer(ffi.buffer(pointer, raw.n_tokens * n * 4), dtype).reshape(raw.n_tokens, n)


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one token when layer il_from was routed (-1: when its ubatch began).

    experts: int32[n] of layer il, the likeliest first.
    """

    context: int
    il_from: int
    il: int
    experts: np.ndarray


def observer_callback(observer: Callable[[Any], None], copy: bool):
    """Shows an observer each Routing or, without a copy, a RoutingView."""
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


def prediction_callback(observer: Callable[[Prediction], None]):
    """Shows an observer each Prediction."""
    @ffi.callback("pyorch_prediction_fn", onerror=hold)
    def observe(_user, context, il_from, il, experts, n):
        ids = np.frombuffer(ffi.buffer(experts, n * 4), np.int32).copy()
        observer(Prediction(int(ffi.cast("uintptr_t", context)), il_from, il, ids))

    return observe
