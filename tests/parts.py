"""Parts of an engine, asked by themselves: native/tests/parts/parts.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cffi
import numpy as np
from native_build import built_tests

from pyorch.library import bindings
from pyorch.library.bindings import array, check
from pyorch.runtime.callbacks import Routing, hold
from pyorch.runtime.engine import Engine
from pyorch.runtime.statistics import SubstitutionStats, read
from pyorch.sidecars.history import ExpertMaps

_ffi = cffi.FFI()
_ffi.cdef("""
    typedef void (*observer_fn)(const void * context, int32_t il_from, int32_t il, const int32_t * experts, int32_t n);
    typedef void (*decided_fn)(const int32_t * rows, int64_t n);
    int parts_apply_router(void *, int32_t, void *, int32_t, void *, void *);
    int parts_estimate(void *, int32_t, void *, int32_t, void *, int32_t);
    int parts_apply_ghosts(void *, int32_t, void *, void *, int32_t, void *);
    int parts_substitute(void *, void *, void *, int32_t, int32_t, void *, void *, void *);
    int parts_set_prediction_observer(void *, observer_fn);
    int parts_watch_replay(void *, const int64_t *, int64_t, decided_fn);
    void parts_search_map(void *, void *, void *, int32_t, int32_t *, float *);
""")


@functools.cache
def _lib() -> Any:
    return _ffi.dlopen(str(built_tests("pyorch-parts") / "bin" / "libpyorch-parts.so"))


def _pointer(value: Any) -> Any:
    """Of the library's bindings, for ours."""
    return _ffi.cast("void *", int(bindings.ffi.cast("uintptr_t", value)))


def _floats(values: np.ndarray | None) -> tuple[Any, Any]:
    """A pointer, and what must outlive it."""
    kept = array("float", values)
    return _pointer(kept), kept


def apply_router(engine: Engine, il: int, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What predictors take the layer's router to select for inputs float32[n_tokens, n_embd], the best first: experts
    int32 and weights float32, [n_tokens, n_used]. Raises as Engine.router() does."""
    router = engine.router(il)
    inputs = np.ascontiguousarray(inputs, np.float32).reshape(-1, router.gate.shape[1])
    experts, weights = (np.empty((len(inputs), router.n_used), dtype) for dtype in (np.int32, np.float32))
    check(_lib().parts_apply_router(_pointer(engine.handle), il, _pointer(array("float", inputs)), len(inputs),
                                    _pointer(array("int32_t", experts)), _pointer(array("float", weights))))
    return experts, weights


def estimate(engine: Engine, il: int, state: np.ndarray) -> np.ndarray:
    """What the estimator adds to the router logits of the layer after il; state: quasi-hidden, float32[n_embd]."""
    state, logits = np.ascontiguousarray(state, np.float32), np.empty(engine.n_expert[il], np.float32)
    check(_lib().parts_estimate(_pointer(engine.handle), il, _pointer(array("float", state)), state.size,
                                _pointer(array("float", logits)), logits.size))
    return logits


def apply_ghosts(engine: Engine, il: int, inputs: np.ndarray, experts: np.ndarray, n_out: int) -> np.ndarray:
    """What ghosts give: float32[n, n_out] for router inputs float32[n, n_in] of experts int32[n]. PyorchError for an
    expert that has none."""
    inputs, experts = np.ascontiguousarray(inputs, np.float32), np.ascontiguousarray(experts, np.int32)
    outputs = np.empty((len(experts), n_out), np.float32)
    check(_lib().parts_apply_ghosts(_pointer(engine.handle), il, _pointer(array("float", inputs)),
                                    _pointer(array("int32_t", experts)), len(experts),
                                    _pointer(array("float", outputs))))
    return outputs


def substitute(
    engine: Engine, routing: Routing, resident: np.ndarray, normalized: bool = False, softmax_selected: bool = False
) -> tuple[np.ndarray, np.ndarray, SubstitutionStats]:
    """What substitution would make of a routing while just these experts are resident, bool[n_expert]: experts, weights
    and what was done. Changes and counts nothing. normalized, softmax_selected: how the model makes weights of
    probabilities."""
    (n_tokens, n_expert_used), n_expert = routing.experts.shape, routing.probs.shape[1]
    experts, weights = routing.experts.astype(np.int32), routing.weights.astype(np.float32)
    raw = bindings.given(
        "pyorch_routing", il=routing.il, n_tokens=n_tokens, n_expert_used=n_expert_used, n_expert=n_expert,
        experts=array("int32_t", routing.experts),
        **{name: array("float", getattr(routing, name)) for name in ("weights", "probs", "logits")},
    )
    mask = array("uint8_t", resident)
    counts = bindings.ffi.new("pyorch_substitution_counts *")
    check(_lib().parts_substitute(
        _pointer(engine.handle), _pointer(raw), _pointer(mask), normalized, softmax_selected,
        _pointer(array("int32_t", experts)), _pointer(array("float", weights)), _pointer(counts)))
    return experts, weights, read(SubstitutionStats, counts)


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one token when layer il_from was routed (-1: when its ubatch began).

    experts: int32[n] of layer il, the likeliest first.
    """

    context: int
    il_from: int
    il: int
    experts: np.ndarray


_observers: dict[int, Any] = {}  # by engine


def set_prediction_observer(engine: Engine, observer: Callable[[Prediction], None] | None) -> None:
    """Shows each prediction to the observer, on the prefetching thread; None removes it."""
    callback = _ffi.NULL
    if observer is not None:
        @_ffi.callback("observer_fn", onerror=hold)
        def callback(context: Any, il_from: int, il: int, experts: Any, n: int) -> None:
            ids = np.frombuffer(_ffi.buffer(experts, n * 4), np.int32).copy()
            observer(Prediction(int(_ffi.cast("uintptr_t", context)), il_from, il, ids))

    check(_lib().parts_set_prediction_observer(_pointer(engine.handle), callback))
    _observers[id(engine)] = callback  # the old one is freed only now, when no call of it can be running


def watch_replay(
    engine: Engine, changes: Sequence[tuple[int, ...]], decided: Callable[[np.ndarray], None]
) -> None:
    """Shows decided() what the tables of a simulated engine decide in replays; see parts_watch_replay."""
    @_ffi.callback("decided_fn", onerror=hold)
    def callback(rows: Any, n: int) -> None:
        decided(np.frombuffer(_ffi.buffer(rows, n * 24), np.int32).reshape(n, 6).copy())

    flat = np.array(changes, np.int64).reshape(-1)
    check(_lib().parts_watch_replay(_pointer(engine.handle), _ffi.from_buffer("int64_t[]", flat), len(changes),
                                    callback))
    _observers[id(engine)] = callback


class Found(NamedTuple):
    """The most alike entry and its cosine. entry -1: there is none."""

    entry: int
    score: float


def search_embedding(store: ExpertMaps, embedding: np.ndarray) -> Found:
    """The iteration with the most alike embedding (FineMoE, eq. 4)."""
    return _search(store, embedding, None, 0)


def search_map(store: ExpertMaps, rows: np.ndarray) -> Found:
    """The iteration most alike in its first layers, [n, n_expert] with n from 1 to n_layers (eq. 5)."""
    return _search(store, None, rows, len(rows))


def _search(store: ExpertMaps, embedding: np.ndarray | None, rows: np.ndarray | None, n_known: int) -> Found:
    (by, _by), (known, _known) = _floats(embedding), _floats(rows)
    index, score = _ffi.new("int32_t *"), _ffi.new("float *")
    _lib().parts_search_map(_pointer(store.handle), by, known, n_known, index, score)
    return Found(index[0], score[0])
