"""The engine: keeps a budgeted set of experts resident while llama.cpp computes."""

from __future__ import annotations

import contextlib
import errno
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pyorch.runtime.bindings import check, ffi, lib, string
from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.observers import Prediction, Routing, observer_callback, prediction_callback
from pyorch.settings.budget import Budget


PREDICTORS = {
    "none": "PYORCH_PREDICT_NONE",
    "previous-token": "PYORCH_PREDICT_PREVIOUS_TOKEN",
    "layer-all": "PYORCH_PREDICT_LAYER_ALL",
    "next-router": "PYORCH_PREDICT_NEXT_ROUTER",
    "quasi-hidden": "PYORCH_PREDICT_QUASI_HIDDEN",
    "activation-matrix": "PYORCH_PREDICT_ACTIVATION_MATRIX",
    "estimator": "PYORCH_PREDICT_ESTIMATOR",
    "hybrid": "PYORCH_PREDICT_HYBRID",
    "expert-map": "PYORCH_PREDICT_EXPERT_MAP",
}
# "decode": in ubatches of one token of each sequence; "all": in prompts too.
SPECULATION = {"none": "PYORCH_SPECULATE_NONE", "decode": "PYORCH_SPECULATE_DECODE", "all": "PYORCH_SPECULATE_ALL"}
POLICIES = {"lru": "PYORCH_LRU", "lfu": "PYORCH_LFU", "finemoe": "PYORCH_FINEMOE"}

# What needs to know the future: for simulated engines.
FORESIGHT = {"predictor": {"oracle": "PYORCH_PREDICT_ORACLE"}, "policy": {"belady": "PYORCH_BELADY"}}


class Source(Protocol):
    """Stands in for the files of a map."""

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of shard `file` from offset, fewer than size only at its end. An OSError fails the decode.

        Called by several reader threads at once.
        """


class MapStore(Protocol):
    """Past iterations and requests, such as pyorch.sidecars.history.ExpertMaps."""

    handle: Any  # the store of the C API


@dataclass(frozen=True)
class Stats:
    """Counters since the start or the last reset, and gauges. The names are those of pyorch_stats.

    Of a single layer only uses, loads, evictions and residency are counted.
    """

    hits: int
    misses: int
    loads: int
    prefetch_loads: int
    prefetch_hits: int
    prefetch_late: int
    prefetch_wasted: int
    evictions: int
    bytes_read: int
    read_ns: int
    stall_ns: int
    failures: int
    layer_passes: int
    tokens: int
    resident_experts: int
    resident_bytes: int
    used_bytes: int
    peak_bytes: int
    budget_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the uses of experts that found the expert resident; nan without any."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else float("nan")

    @property
    def unused_loads(self) -> int:
        """Experts that were read ahead and not used. What was read before counting began makes it too small."""
        return max(0, self.prefetch_loads - self.prefetch_hits)

    @property
    def useful_share(self) -> float:
        """Of the experts read, those that were not read ahead in vain; nan without any."""
        return 1 - self.unused_loads / self.loads if self.loads else float("nan")


@dataclass(frozen=True)
class SubstitutionStats:
    """What substitution did in the ubatches that it may touch. The names are those of pyorch_substitution_counts.

    A slot is one of the experts of a token in a layer; tokens are counted once for each layer.
    """

    tokens: int
    lossy_tokens: int
    substituted: int
    dropped: int
    refused_tae: int
    refused_margin: int
    refused_distribution: int
    refused_rho: int
    refused_buddies: int
    rank_sum: int
    absent: int
    avoided: int


@dataclass(frozen=True)
class SpeculationStats:
    """What layers executed in place of their routers' choice. The names are those of pyorch_speculation_counts.

    tokens: of the ubatches concerned, counted once for each layer. slots: experts of tokens that were forecast;
    right: of them, those that the router chose too.
    """

    tokens: int
    slots: int
    right: int


@dataclass(frozen=True)
class Residency:
    """Flags of the experts of a layer, each bool[n_expert]."""

    resident: np.ndarray
    loading: np.ndarray
    pinned: np.ndarray
    in_use: np.ndarray


# How probabilities are made of logits, by the value of GGUF's expert_gating_func.
GATINGS = {1: "softmax", 2: "sigmoid", 3: "softmax-selected", 4: "sqrt-softplus"}


@dataclass(frozen=True)
class Router:
    """How a layer chooses its experts; arrays float32, None where there is no such thing.

    gate: [n_expert, n_embd]; bias: [n_expert] of the logits; selection_bias: [n_expert], added to the probabilities for
    the choice only; norm: [n_embd] of the RMS normalization, with eps, that makes the input. gating: one of GATINGS'
    names, how probabilities are made of logits; "softmax-selected": the weights are a softmax of the selected logits.
    n_used: experts of a token. n_groups, n_groups_used: it chooses from the groups whose two best experts have the
    highest sum. normalized: weights are divided by their sum; scale: and multiplied by this.
    """

    gate: np.ndarray
    bias: np.ndarray | None
    selection_bias: np.ndarray | None
    norm: np.ndarray | None
    eps: float
    gating: str
    n_used: int
    n_groups: int = 1
    n_groups_used: int = 1
    normalized: bool = False
    scale: float = 1.0

    def arrays(self) -> dict[str, np.ndarray]:
        """Those that there are, by name."""
        arrays = {name: getattr(self, name) for name in ("gate", "bias", "selection_bias", "norm")}
        return {name: array for name, array in arrays.items() if array is not None}

    def choice(self) -> dict[str, object]:
        """How it chooses, without the arrays, by name."""
        names = ("eps", "gating", "n_used", "n_groups", "n_groups_used", "normalized", "scale")
        return {name: getattr(self, name) for name in names}


class Engine:
    """Manages the experts of the models that are loaded under capture().

    Args:
        model_map: the model's map; copied.
        budget: bytes, a share such as "40%", or a size such as "1.5GiB". BudgetError below the floor.
        policy: which expert goes first, "lru" (least recently used), "lfu" (least frequently) or "finemoe": the least
            frequently used, but those first that nothing forecasts.
        n_readers: reader threads, 0 for the default.
        direct_io: read around the page cache where the file system can.
        source: reads in place of the map's files.
        simulated: for pyorch.replay: nothing is read, and no model can be loaded under it.
    """

    def __init__(
        self,
        model_map: ModelMap,
        budget: Budget | int | str,
        policy: str = "finemoe",
        n_readers: int = 0,
        direct_io: bool = True,
        source: Source | None = None,
        simulated: bool = False,
    ) -> None:
        self._read = _read_callback(source) if source is not None else ffi.NULL
        self._observer = self._prediction_observer = ffi.NULL
        self.simulated = simulated
        self.maps: MapStore | None = None  # set_maps()
        self.n_expert = {layer.il: layer.n_expert for layer in model_map.layers}  # by il
        config = ffi.new("pyorch_config *")
        config.budget_bytes = Budget.parse(budget).resolve(model_map.info)
        config.policy = self._constant(policy, "policy", POLICIES)
        config.n_readers = n_readers
        config.direct_io = direct_io
        config.read = self._read
        config.simulated = simulated
        out = ffi.new("pyorch_engine **")
        check(lib.pyorch_engine_new(model_map.handle, config, out))
        self._engine = out[0]

    @property
    def handle(self):
        """The pyorch_engine *, owned by this object."""
        if self._engine is None:
            raise PyorchError("the engine was closed: its model is no longer loaded")
        return self._engine

    def close(self) -> None:
        """Frees the experts. REQUIRES: the models loaded under this engine, and their contexts, are freed."""
        if self._engine is not None:
            lib.pyorch_engine_free(self._engine)
            self._engine = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Models that this thread loads inside leave their experts to the engine."""
        check(lib.pyorch_engine_capture(self.handle))
        try:
            yield
        finally:
            check(lib.pyorch_engine_capture(ffi.NULL))

    def error(self) -> str:
        """Why the engine failed the last decode that it failed, "" if it never did."""
        buffer = ffi.new("char[]", 1024)
        check(lib.pyorch_engine_error(self.handle, buffer, len(buffer)))
        return string(buffer)

    def set_budget(self, n_bytes: int) -> None:
        """BudgetError below the floor, or below what is pinned."""
        check(lib.pyorch_set_budget(self.handle, n_bytes))

    def set_policy(self, policy: str) -> None:
        check(lib.pyorch_set_policy(self.handle, self._constant(policy, "policy", POLICIES)))

    def set_prefetch(
        self, predictor: str, distance: int = 1, min_precision: float = 0.0, automatic: bool = False
    ) -> None:
        """What reads experts ahead while a layer decodes, for up to `distance` layers later; "none": nothing.

        Args:
            predictor: one of PREDICTORS.
            min_precision: guesses that come true less often than this, as counted while running, are not read.
            automatic: only while it makes decoding faster, which is tried again and again.
        """
        kind = self._constant(predictor, "predictor", PREDICTORS)
        check(lib.pyorch_set_prefetch(self.handle, kind, distance, min_precision, automatic))

    def set_layer_prefetch(self, il: int, predictor: str, distance: int = 1, min_precision: float = 0.0) -> None:
        """What reads experts of one layer ahead, see set_prefetch()."""
        kind = self._constant(predictor, "predictor", PREDICTORS)
        check(lib.pyorch_set_layer_prefetch(self.handle, il, kind, distance, min_precision))

    def set_router(self, il: int, router: Router) -> None:
        """What predictors apply, for a simulated engine, which has no graph to take it from. Copied, as float32."""
        arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in router.arrays().items()}
        n_expert, n_embd = arrays["gate"].shape
        for name, width in (("bias", n_expert), ("selection_bias", n_expert), ("norm", n_embd)):
            if name in arrays and arrays[name].shape != (width,):
                raise PyorchError(f"the {name} of a router with {n_expert} experts and {n_embd} inputs has the shape "
                                  f"{arrays[name].shape}, not ({width},)")
        gating = next((number for number, name in GATINGS.items() if name == router.gating), 0)
        raw = ffi.new("pyorch_router *", {"n_expert": n_expert, "n_embd": n_embd, **router.choice(), "gating": gating})
        for name, array in arrays.items():
            setattr(raw, name, _pointer("float[]", array))
        check(lib.pyorch_set_router(self.handle, il, raw))

    def set_maps(self, maps: MapStore) -> None:
        """Past iterations and requests, that predictors search and add to."""
        check(lib.pyorch_set_maps(self.handle, maps.handle))
        self.maps = maps

    def set_speculation(self, mode: str) -> None:
        """Whether layers execute what is forecast for them one layer earlier (lossy): one of SPECULATION."""
        if mode not in SPECULATION:
            raise PyorchError(f'speculation "{mode}" is not known: use {", ".join(SPECULATION)}')
        check(lib.pyorch_set_speculation(self.handle, getattr(lib, SPECULATION[mode])))

    def speculation_stats(self) -> SpeculationStats:
        """Zeroed by reset_stats()."""
        raw = ffi.new("pyorch_speculation_counts *")
        check(lib.pyorch_get_speculation_counts(self.handle, raw))
        return _dataclass(SpeculationStats, raw)

    def set_default_vectors(self, il: int, vectors: np.ndarray) -> None:
        """Mean outputs of the experts of a layer, float32[n_expert, n_embd], for the quasi-hidden predictor."""
        vectors = np.ascontiguousarray(vectors, np.float32)
        check(lib.pyorch_set_default_vectors(self.handle, il, _pointer("float[]", vectors), *vectors.shape))

    def set_estimator(self, weights: Mapping[str, np.ndarray]) -> None:
        """The arrays of pyorch_estimator, float32 (see pyorch.sidecars.predictor.Estimator). PyorchError if they do not fit."""
        arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
        raw = ffi.new("pyorch_estimator *")
        raw.n_latent, raw.n_embd = arrays["in_weight"].shape
        raw.n_hidden = len(arrays["up_bias"])
        raw.n_layers, raw.n_expert = arrays["head_bias"].shape
        for name, array in arrays.items():
            setattr(raw, name, _pointer("float[]", array))
        check(lib.pyorch_set_estimator(self.handle, raw))

    def set_hybrid(self, layers: Iterable[bool]) -> None:
        """Whether the hybrid predictor takes the estimator, and not quasi-hidden, to guess each layer, in the order of il."""
        mask = np.fromiter(layers, np.uint8)
        check(lib.pyorch_set_hybrid(self.handle, _pointer("uint8_t[]", mask), mask.size))

    def estimate(self, il: int, state: np.ndarray) -> np.ndarray:
        """What the estimator adds to the router logits of the layer after il, for a quasi-hidden state float32[n_embd]."""
        state = np.ascontiguousarray(state, np.float32)
        logits = np.empty(self.n_expert[il], np.float32)
        check(
            lib.pyorch_estimate(
                self.handle, il, _pointer("float[]", state), state.size, _pointer("float[]", logits), logits.size
            )
        )
        return logits

    def router(self, il: int) -> Router:
        """A copy. PyorchError where it is not known: no context was made yet, or it cannot be applied, with the reason."""
        raw = ffi.new("pyorch_router *")
        check(lib.pyorch_get_router(self.handle, il, raw))

        def copied(pointer, *shape: int) -> np.ndarray | None:
            return np.frombuffer(ffi.buffer(pointer, 4 * math.prod(shape)), np.float32).reshape(shape).copy() if pointer else None

        n_expert, n_embd = raw.n_expert, raw.n_embd
        return Router(
            gate=copied(raw.gate, n_expert, n_embd), bias=copied(raw.bias, n_expert),
            selection_bias=copied(raw.selection_bias, n_expert), norm=copied(raw.norm, n_embd), eps=raw.eps,
            gating=GATINGS[raw.gating], n_used=raw.n_used, n_groups=raw.n_groups, n_groups_used=raw.n_groups_used,
            normalized=bool(raw.normalized), scale=raw.scale,
        )

    def apply_router(self, il: int, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What predictors take the layer's router to select for inputs float32[n_tokens, n_embd], the best first.

        Returns experts int32 and weights float32, [n_tokens, n_used]. Raises as router() does.
        """
        router = self.router(il)
        inputs = np.ascontiguousarray(inputs, np.float32).reshape(-1, router.gate.shape[1])
        experts, weights = (np.empty((len(inputs), router.n_used), dtype) for dtype in (np.int32, np.float32))
        check(lib.pyorch_apply_router(self.handle, il, _pointer("float[]", inputs), len(inputs),
                                      _pointer("int32_t[]", experts), _pointer("float[]", weights)))
        return experts, weights

    def check_routers(self) -> None:
        """PyorchError where a predictor that was chosen, or speculation, applies routers and a graph has one that cannot
        be applied. Graphs are known once a context was made."""
        check(lib.pyorch_check_routers(self.handle))

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Inside, the outputs of all experts are summed up, for mean_outputs()."""
        check(lib.pyorch_set_calibration(self.handle, True))
        try:
            yield
        finally:
            check(lib.pyorch_set_calibration(self.handle, False))

    def mean_outputs(self, il: int, n_embd: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the last calibrating(): float32[n_expert, n_embd], 0 for experts never used, and uint64[n_expert] uses."""
        n_expert = self.n_expert[il]
        vectors, counts = np.empty((n_expert, n_embd), np.float32), np.empty(n_expert, np.uint64)
        check(
            lib.pyorch_get_mean_outputs(
                self.handle, il, _pointer("float[]", vectors), _pointer("uint64_t[]", counts), n_expert, n_embd
            )
        )
        return vectors, counts

    def set_prediction_observer(self, observer: Callable[[Prediction], None] | None) -> None:
        """Shows each prediction to the observer, on the prefetching thread; None removes it."""
        callback = prediction_callback(observer) if observer is not None else ffi.NULL
        check(lib.pyorch_set_prediction_observer(self.handle, callback, ffi.NULL))
        self._prediction_observer = callback

    def set_layer_limits(self, il: int, min_experts: int, max_experts: int) -> None:
        """How many experts of a layer eviction leaves, and how many the layer may hold."""
        check(lib.pyorch_set_layer_limits(self.handle, il, min_experts, max_experts))

    def residency(self, il: int) -> Residency:
        flags = np.empty(self.n_expert[il], np.uint8)
        check(lib.pyorch_get_residency(self.handle, il, ffi.from_buffer("uint8_t[]", flags), flags.size))
        states = (lib.PYORCH_RESIDENT, lib.PYORCH_LOADING, lib.PYORCH_PINNED, lib.PYORCH_IN_USE)
        return Residency(*((flags & state) != 0 for state in states))

    def prefetch(self, il: int, experts: Iterable[int]) -> None:
        """Queues reads behind all demand, in this order. Returns at once."""
        self._on_experts(lib.pyorch_prefetch, il, experts)

    def pin(self, il: int, experts: Iterable[int]) -> None:
        """Brings in experts and never evicts them. BudgetError if the rest would fall below the floor."""
        self._on_experts(lib.pyorch_pin, il, experts)

    def unpin(self, il: int, experts: Iterable[int]) -> None:
        self._on_experts(lib.pyorch_unpin, il, experts)

    def evict(self, il: int, experts: Iterable[int]) -> None:
        """Frees resident experts that are neither pinned nor in use."""
        self._on_experts(lib.pyorch_evict, il, experts)

    def wait_idle(self) -> None:
        """Waits until no prediction is being made, and no read is queued or running."""
        check(lib.pyorch_wait_idle(self.handle))

    def stats(self, il: int = -1) -> Stats:
        """Of one layer, or of all of them (-1)."""
        raw = ffi.new("pyorch_stats *")
        check(lib.pyorch_get_stats(self.handle, il, raw))
        return _dataclass(Stats, raw)

    def reset_stats(self) -> None:
        """Zeroes the counters, not the gauges."""
        check(lib.pyorch_reset_stats(self.handle))

    def set_observer(self, observer: Callable[[Any], None] | None, copy: bool = True) -> None:
        """Shows each routing decision to the observer, between router and experts; None removes it.

        It runs on a compute thread: it must return quickly, and not decode. What it raises is printed.

        Args:
            copy: False: not a Routing but a RoutingView, whose arrays are made when they are asked for, and valid
                during the call only.
        """
        callback = observer_callback(observer, copy) if observer is not None else ffi.NULL
        check(lib.pyorch_set_observer(self.handle, callback, ffi.NULL))
        self._observer = callback  # the old one is freed only now, when no call of it can be running

    def set_substitution(self, il: int, settings: Mapping[str, int | float]) -> None:
        """How a layer treats absent experts: the fields of pyorch_substitution."""
        raw = ffi.new("pyorch_substitution *", dict(settings))
        check(lib.pyorch_set_substitution(self.handle, il, raw))

    def set_buddies(
        self, il: int, ids: np.ndarray, q: np.ndarray, scale: np.ndarray | None = None, hops: np.ndarray | None = None
    ) -> None:
        """The buddies of each expert of a layer, best first.

        Args:
            ids: int32[n_expert, k_max], -1 after the last. q, scale: float32 of the same shape; scale is the
                factor of the buddy's output, nan where it is not known.
            hops: uint8[n_expert], to where an expert is.
        """
        ids = np.ascontiguousarray(ids, np.int32)
        q = np.ascontiguousarray(q, np.float32)
        scale = None if scale is None else np.ascontiguousarray(scale, np.float32)
        hops = None if hops is None else np.ascontiguousarray(hops, np.uint8)
        if q.shape != ids.shape or (scale is not None and scale.shape != ids.shape):
            raise PyorchError(f"buddy lists of shape {ids.shape} do not fit priorities of shape {q.shape}")
        if hops is not None and hops.shape != ids.shape[:1]:
            raise PyorchError(f"hops of shape {hops.shape} do not fit buddy lists of shape {ids.shape}")
        check(
            lib.pyorch_set_buddies(
                self.handle, il, *ids.shape, _pointer("int32_t[]", ids), _pointer("float[]", q),
                _pointer("float[]", scale), _pointer("uint8_t[]", hops),
            )
        )

    def set_cache(self, il: int, mask: np.ndarray | None) -> None:
        """Substitution takes exactly the experts of mask, bool[n_expert], for resident; None: those that are."""
        raw = None if mask is None else np.ascontiguousarray(mask, np.uint8)
        check(lib.pyorch_set_cache(self.handle, il, _pointer("uint8_t[]", raw), 0 if raw is None else raw.size))

    def substitute(
        self, routing: Routing, resident: np.ndarray, normalized: bool = False, softmax_selected: bool = False
    ) -> tuple[np.ndarray, np.ndarray, SubstitutionStats]:
        """What substitution would make of a routing while just these experts are resident, bool[n_expert].

        Changes and counts nothing. normalized, softmax_selected: how the model makes weights of probabilities.
        Returns experts, weights and what was done.
        """
        raw = ffi.new("pyorch_routing *")
        raw.il = routing.il
        (raw.n_tokens, raw.n_expert_used), raw.n_expert = routing.experts.shape, routing.probs.shape[1]
        arrays = {name: np.ascontiguousarray(getattr(routing, name), np.float32) for name in ("weights", "probs", "logits")}
        given = np.ascontiguousarray(routing.experts, np.int32)
        raw.experts = _pointer("int32_t[]", given)
        for name, array in arrays.items():
            setattr(raw, name, _pointer("float[]", array))
        mask = np.ascontiguousarray(resident, np.uint8)
        experts, weights = np.empty_like(given), np.empty_like(arrays["weights"])
        counts = ffi.new("pyorch_substitution_counts *")
        check(
            lib.pyorch_substitute(
                self.handle, raw, _pointer("uint8_t[]", mask), normalized, softmax_selected,
                _pointer("int32_t[]", experts), _pointer("float[]", weights), counts,
            )
        )
        return experts, weights, _dataclass(SubstitutionStats, counts)

    def substitution_stats(self, il: int = -1) -> SubstitutionStats:
        """Of one layer, or of all of them (-1). Zeroed by reset_stats()."""
        raw = ffi.new("pyorch_substitution_counts *")
        check(lib.pyorch_get_substitution_counts(self.handle, il, raw))
        return _dataclass(SubstitutionStats, raw)

    def _constant(self, name: str, what: str, known: dict[str, str]) -> int:
        """Of the C API. PyorchError for what is not known, or knows the future while the engine does not."""
        if name in FORESIGHT[what] and not self.simulated:
            raise PyorchError(f'{what} "{name}" needs to know the future: only pyorch replay does')
        constant = known.get(name) or FORESIGHT[what].get(name)
        if constant is None:
            *names, last = known
            raise PyorchError(f'{what} "{name}" is not known: use {", ".join(names)} or {last}')
        return getattr(lib, constant)

    def _on_experts(self, function, il: int, experts: Iterable[int]) -> None:
        ids = np.fromiter(experts, np.int32)
        check(function(self.handle, il, ffi.from_buffer("int32_t[]", ids), ids.size))


def _read_callback(source: Source):
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
            return -(error.errno or errno.EIO)
        except Exception:
            if not printed:
                traceback.print_exc()
            printed = True
            return -errno.EIO

    return read


def _pointer(kind: str, array: np.ndarray | None):
    return ffi.NULL if array is None else ffi.from_buffer(kind, array)


def _dataclass(cls: type, raw):
    """A dataclass whose fields are those of a C struct."""
    return cls(**{name: getattr(raw, name) for name in cls.__dataclass_fields__})
