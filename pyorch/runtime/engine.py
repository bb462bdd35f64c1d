"""The engine: keeps a budgeted set of experts resident while llama.cpp computes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pyorch.errors import PyorchError
from pyorch.library.bindings import array, call, check, ffi, given, lib, string
from pyorch.library.choices import policies, predictors, speculation
from pyorch.library.numerics import np
from pyorch.runtime import routers
from pyorch.runtime.callbacks import Source, observer_callback, read_callback
from pyorch.runtime.devices import Devices
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.routers import Router
from pyorch.runtime.statistics import (
    Peer,
    RemoteStats,
    Residency,
    Served,
    Snapshot,
    SpeculationStats,
    Stats,
    SubstitutionStats,
    read,
)
from pyorch.settings.budget import Budget
from pyorch.settings.device import DEVICE_MISSES, PROCESSOR
from pyorch.settings.pools import Pools
from pyorch.settings.reads import READERS, Reads
from pyorch.settings.rows import ROW_TYPES

FORKED = (
    "the model was loaded before this process was forked, and threads are not copied: load it in a process that starts "
    'anew, such as one of multiprocessing.get_context("spawn")'
)

LOOPBACK = "127.0.0.1"
HERE = -1  # in a placement: this server computes the expert

_WHAT_PAYS = -1.0  # as a min_precision

_capturing = threading.local()  # engine: that captures what this thread loads


class History(Protocol):
    """Past iterations: pyorch.sidecars.history.ExpertMaps."""

    handle: Any  # pyorch_history *

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None: ...


class Engine:
    """Manages the experts of the models that are loaded under capture().

    What its methods do, and what they refuse (PyorchError), is said in pyorch.h; il is llama.cpp's number of a block.
    n_expert: experts of each layer, by il. history: what was set by set_history(), None before. simulates_cache:
    which experts are absent for substitution is simulated.

    Args:
        model_map: the model's map; copied.
        budget: bytes, a share such as "40%", or a size such as "1.5GiB". BudgetError below the floor.
        policy: which expert goes first: one of pyorch.library.choices.policies(), None: default_policy() of them.
        reads: who reads, and how much at once.
        source: reads in place of the map's files.
        simulated: for pyorch.replay: nothing is read, and no model can be loaded under it.
        pools: how the budget is divided among the forms of compressed experts.
        devices: compute with experts that lie in their memory; need plain. device_bytes: of the memory of each.
        device_misses: what computes an expert that is not there: one of DEVICE_MISSES.
        config: further fields of pyorch_config, as the header says them, such as plain: compute with experts as they
            lie in the file, not repacked for faster kernels (Role.layout).
    """

    def __init__(
        self,
        model_map: ModelMap,
        budget: Budget | int | str,
        policy: str | None = None,
        reads: Reads | str = "auto",
        source: Source | None = None,
        simulated: bool = False,
        pools: Pools | str = Pools(),
        devices: Devices | None = None,
        device_bytes: Sequence[int] = (),
        device_misses: str = PROCESSOR,
        **config: int,
    ) -> None:
        self._read = read_callback(source) if source is not None else ffi.NULL
        self._observers: dict[int, Any] = {}  # by thread
        self.simulated = simulated
        self.simulates_cache = False
        self.history: History | None = None
        self.has_pack = model_map.pack is not None
        self.n_expert = {layer.il: layer.n_expert for layer in model_map.layers}
        how = Reads.parse(reads)
        raw = given(
            "pyorch_config", budget_bytes=Budget.parse(budget).resolve(model_map.info),
            reader=READERS.index(how.reader), read_depth=how.depth, read_bytes=how.request_bytes, read=self._read,
            pool_shares=Pools.parse(pools).shares, device_misses=DEVICE_MISSES.index(device_misses), **config,
        )
        if devices is not None:
            raw.n_devices = len(devices.each)
            for i, (device, end) in enumerate(zip(devices.each, devices.layer_ends(model_map))):
                raw.devices[i], raw.device_ends[i] = device.handle, end
            for i, n_bytes in enumerate(device_bytes):
                raw.device_bytes[i] = n_bytes
        if policy is not None:
            raw.policy = policies().choose(policy, simulated).value
        make = lib.pyorch_simulation_new if simulated else lib.pyorch_engine_new
        self._engine = call(make, model_map.handle, raw, out="pyorch_engine *")[0]
        self._pid = os.getpid()

    @property
    def handle(self):
        """The pyorch_engine *, owned by this object."""
        if self._engine is None:
            raise PyorchError("the engine was closed: its model is no longer loaded")
        if self._pid != os.getpid():
            raise PyorchError(FORKED)
        return self._engine

    def close(self) -> None:
        """Frees the experts; nothing in a forked process, whose parent has them.

        REQUIRES: the models loaded under this engine, and their contexts, are freed.
        """
        if self._engine is not None:
            check(lib.pyorch_engine_free(self._engine))
            self._engine = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Models that this thread loads inside leave their experts to the engine. Nests."""
        before = getattr(_capturing, "engine", ffi.NULL)
        check(lib.pyorch_engine_capture(self.handle))
        _capturing.engine = self.handle
        try:
            yield
        finally:
            check(lib.pyorch_engine_capture(before))
            _capturing.engine = before

    def error(self) -> str:
        """Why the engine failed the last of all decodes that it failed, "" if it never did.

        For who watches the contexts of other threads; bindings.decode_error() is about the decodes of this one.
        """
        return string(lib.pyorch_engine_error(self.handle))

    def set_observer(self, observer: Callable[[Any], None] | None, copy: bool = True) -> None:
        """Shows each routing decision to the observer, between router and experts; None removes it.

        It runs on a compute thread: it must return quickly, and not decode. What it raises is printed. copy: False: not
        a Routing but a RoutingView, whose arrays are made when they are asked for, and valid during the call only.
        """
        callback = observer_callback(observer, copy) if observer is not None else ffi.NULL
        check(lib.pyorch_set_observer(self.handle, callback, ffi.NULL))
        # This thread's old one is freed only now, when no call of it can be running; another thread's may be in force.
        self._observers[threading.get_ident()] = callback

    # What is resident, what is ordered, what was counted

    def set_budget(self, n_bytes: int) -> None:
        """BudgetError below the floor, or below what is pinned."""
        check(lib.pyorch_set_budget(self.handle, n_bytes))

    def set_device_budget(self, device: int, n_bytes: int) -> None:
        """Of the memory of one of the devices for experts, at most. It is taken when the first context is made:
        PyorchError then."""
        check(lib.pyorch_set_device_budget(self.handle, device, n_bytes))

    def set_policy(self, policy: str) -> None:
        """Which expert goes first from now on: one of policies()."""
        check(lib.pyorch_set_policy(self.handle, policies().choose(policy, self.simulated).value))

    def set_pools(self, pools: Pools | str) -> None:
        """Divides the budget anew. What is pinned, and the largest layer beside it, have room in any case."""
        check(lib.pyorch_set_pools(self.handle, Pools.parse(pools).shares))

    def set_uses(self, il: int, uses: np.ndarray) -> None:
        """How often each expert of a layer was used before the engine was made, float64[n_expert], as if up to now.

        Ranks, by which experts of a compressed pack belong to pools, go on from there. PyorchError for numbers below 0.
        """
        check(lib.pyorch_set_uses(self.handle, il, array("double", uses), len(uses)))

    def learned(self) -> dict[str, np.ndarray]:
        """A copy of what the policy "learned" has learned: the arrays of pyorch_learned, as LEARNED says.

        PyorchError under another policy.
        """
        raw = call(lib.pyorch_get_learned, self.handle, out="pyorch_learned")
        arrays = {name: np.empty(shape, LEARNED[name]) for name, shape in _learned_shapes(raw).items()}
        filled = given("pyorch_learned", n_moments=raw.n_moments, **_pointers(arrays))
        check(lib.pyorch_get_learned(self.handle, filled))
        return {name: values[: filled.n_moments] if name in ("moments", "previous") else values
                for name, values in arrays.items()}

    def set_learned(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on from what learned() gave. PyorchError under another policy, and for arrays that do not fit."""
        raw = call(lib.pyorch_get_learned, self.handle, out="pyorch_learned")
        raw.n_moments = len(arrays["previous"]) if "previous" in arrays else 0
        shapes = {name: shape for name, shape in _learned_shapes(raw).items() if 0 not in shape}
        for name, shape in shapes.items():
            found = list(arrays[name].shape) if name in arrays else "nothing"
            if found != list(shape):
                raise PyorchError(f"what was learned for eviction has {found} as {name}, the model needs {list(shape)}")
        pointers = _pointers({name: arrays[name] for name in shapes})
        for name, pointer in pointers.items():
            setattr(raw, name, pointer)
        check(lib.pyorch_set_learned(self.handle, raw))

    def set_layer_limits(self, il: int, min_experts: int, max_experts: int) -> None:
        """How many experts of a layer eviction leaves, and how many the layer may hold."""
        check(lib.pyorch_set_layer_limits(self.handle, il, min_experts, max_experts))

    def set_device_limits(self, il: int, min_experts: int, max_experts: int) -> None:
        """The same in slots of the device, whose memory a first context has taken. PyorchError before, BudgetError
        where the minima leave no slot."""
        check(lib.pyorch_set_device_limits(self.handle, il, min_experts, max_experts))

    def residency(self, il: int) -> Residency:
        """Which experts of a layer are resident, being read, pinned, in use and in the memory of the device, now."""
        flags = np.empty(self.n_expert[il], np.uint8)
        check(lib.pyorch_get_residency(self.handle, il, array("uint8_t", flags), flags.size))
        states = (lib.PYORCH_RESIDENT, lib.PYORCH_LOADING, lib.PYORCH_PINNED, lib.PYORCH_IN_USE, lib.PYORCH_ON_DEVICE)
        return Residency(*((flags & state) != 0 for state in states))

    def prefetch(self, il: int, experts: Iterable[int]) -> None:
        """Queues reads behind all demand, in this order. Returns at once."""
        self._order(lib.pyorch_prefetch, il, experts)

    def pin(self, il: int, experts: Iterable[int]) -> None:
        """Brings in experts and never evicts them. BudgetError if the rest would fall below the floor."""
        self._order(lib.pyorch_pin, il, experts)

    def unpin(self, il: int, experts: Iterable[int]) -> None:
        """Lets eviction take these experts again."""
        self._order(lib.pyorch_unpin, il, experts)

    def evict(self, il: int, experts: Iterable[int]) -> None:
        """Frees resident experts that are neither pinned nor in use."""
        self._order(lib.pyorch_evict, il, experts)

    def _order(self, function, il: int, experts: Iterable[int]) -> None:
        try:
            ids = np.fromiter(experts, np.int32)
        except (OverflowError, TypeError, ValueError):
            raise PyorchError(f"experts of layer {il} are said by their numbers") from None
        check(function(self.handle, il, array("int32_t", ids), ids.size))

    def offer(self, il: int, expert: int, matrices: bytes) -> None:
        """The bytes of an expert, as the model's file has them, in the order of its roles: taken in place of a read,
        the next time it comes into memory. Ignored of one that is there, or on its way, and where experts are in a
        pack.

        PyorchError for another size.
        """
        check(lib.pyorch_offer(self.handle, il, expert, ffi.from_buffer(matrices), len(matrices)))

    def wait_idle(self) -> None:
        """Waits until no read is queued or running."""
        check(lib.pyorch_wait_idle(self.handle))

    def stats(self, il: int = -1) -> Stats:
        """Of one layer, or of all of them (-1)."""
        return read(Stats, call(lib.pyorch_get_stats, self.handle, il, out="pyorch_stats"))

    def snapshot(self) -> Snapshot:
        """Residency, uses and statistics of all layers, at one moment."""
        shape = len(self.n_expert), max(self.n_expert.values())
        flags, uses = np.empty(shape, np.uint8), np.empty(shape, np.uint64)
        layers = ffi.new("pyorch_stats[]", shape[0])
        raw = given("pyorch_snapshot", n_layers=shape[0], n_expert=shape[1], flags=array("uint8_t", flags),
                    uses=array("uint64_t", uses), layers=layers)
        check(lib.pyorch_get_snapshot(self.handle, raw))
        return Snapshot(flags, uses, [read(Stats, layer) for layer in layers], read(Stats, raw.stats))

    def activations(self, il: int) -> np.ndarray:
        """How often the router of a layer selected each expert since the engine was made: uint64[n_expert].

        Of tokens of this engine's contexts, wherever the expert was computed. reset_stats() leaves it as it is.
        """
        counts = np.empty(self.n_expert[il], np.uint64)
        check(lib.pyorch_get_activations(self.handle, il, array("uint64_t", counts), counts.size))
        return counts

    def reset_stats(self) -> None:
        """Zeroes the counters, not the gauges."""
        check(lib.pyorch_reset_stats(self.handle))

    # What forecasts are made of, and what becomes of them

    def set_prefetch(
        self, predictor: str, distance: int = 1, min_precision: float | None = 0.0, automatic: bool = False,
        il: int = -1,
    ) -> None:
        """What reads experts of a layer (-1: of all) ahead while up to `distance` layers before it decode; one of
        pyorch.library.choices.predictors().

        min_precision: guesses that come true less often than this, as counted while running, are not read. None: those
        are read that gain more than they cost. automatic: only while experts are absent, unless a trial tells that
        decoding is sooner without.
        """
        kind = predictors().choose(predictor, self.simulated).value
        least = _WHAT_PAYS if min_precision is None else min_precision
        check(lib.pyorch_set_prefetch(self.handle, il, kind, distance, least, automatic))

    def set_router(self, il: int, router: Router) -> None:
        """What predictors apply, for a simulated engine, which has no graph to take it from. Copied, as float32."""
        check(lib.pyorch_set_router(self.handle, il, routers.to_struct(router)))

    def router(self, il: int) -> Router:
        """A copy. PyorchError where it is not known: no context was made yet, or it cannot be applied, with the
        reason."""
        return routers.from_struct(call(lib.pyorch_get_router, self.handle, il, out="pyorch_router"))

    def check_routers(self) -> None:
        """PyorchError where a predictor that was chosen, or speculation, applies routers and a graph has one that
        cannot be applied. Graphs are known once a context was made."""
        check(lib.pyorch_check_routers(self.handle))

    def set_default_vectors(self, il: int, vectors: np.ndarray) -> None:
        """Mean outputs of the experts of a layer, float32[n_expert, n_embd], for the quasi-hidden predictor."""
        check(lib.pyorch_set_default_vectors(self.handle, il, array("float", vectors), *vectors.shape))

    def set_estimator(self, weights: Mapping[str, np.ndarray]) -> None:
        """The arrays of pyorch_estimator, float32 (see pyorch.sidecars.predictor.Estimator).

        PyorchError if they do not fit.
        """
        n_latent, n_embd = weights["in_weight"].shape
        n_layers, n_expert = weights["head_bias"].shape
        raw = given("pyorch_estimator", n_latent=n_latent, n_embd=n_embd, n_hidden=len(weights["up_bias"]),
                    n_layers=n_layers, n_expert=n_expert, **_pointers(weights))
        check(lib.pyorch_set_estimator(self.handle, raw))

    def set_hybrid(self, layers: Iterable[bool]) -> None:
        """Whether the hybrid predictor takes the estimator, and not quasi-hidden, by layer in the order of il."""
        mask = np.fromiter(layers, np.uint8)
        check(lib.pyorch_set_hybrid(self.handle, array("uint8_t", mask), mask.size))

    def set_history(self, history: History) -> None:
        """Past iterations, that the predictor expert-map searches and adds to."""
        check(lib.pyorch_set_history(self.handle, history.handle))
        self.history = history

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
        check(lib.pyorch_get_mean_outputs(
            self.handle, il, array("float", vectors), array("uint64_t", counts), n_expert, n_embd))
        return vectors, counts

    # Lossy

    def set_speculation(self, mode: str) -> None:
        """Whether layers execute what is forecast for them one layer earlier: one of
        pyorch.library.choices.speculation()."""
        check(lib.pyorch_set_speculation(self.handle, speculation().choose(mode).value))

    def speculation_stats(self) -> SpeculationStats:
        """Zeroed by reset_stats()."""
        counts = call(lib.pyorch_get_speculation_counts, self.handle, out="pyorch_speculation_counts")
        return read(SpeculationStats, counts)

    def set_substitution(self, il: int, settings: Mapping[str, int | float]) -> None:
        """How a layer treats absent experts: fields of pyorch_substitution, the others by default."""
        check(lib.pyorch_set_substitution(self.handle, il, given("pyorch_substitution", **settings)))

    def substitution_stats(self, il: int = -1) -> SubstitutionStats:
        """Of one layer, or of all of them (-1). Zeroed by reset_stats()."""
        counts = call(lib.pyorch_get_substitution_counts, self.handle, il, out="pyorch_substitution_counts")
        return read(SubstitutionStats, counts)

    def set_buddies(self, il: int, ids: np.ndarray, q: np.ndarray) -> None:
        """The buddies of each expert of a layer, best first: ids int32[n_expert, k_max], -1 after the last, and their
        similarities float32[n_expert, k_max] (eq. 4 of BuddyMoE)."""
        if q.shape != ids.shape:
            raise PyorchError(f"buddies of the shape {list(ids.shape)} have similarities of {list(q.shape)}")
        check(lib.pyorch_set_buddies(self.handle, il, *ids.shape, array("int32_t", ids), array("float", q)))

    def set_ghosts(self, il: int, rank: np.ndarray, mean: np.ndarray, down: np.ndarray, up: np.ndarray) -> None:
        """What estimates the outputs of a layer's experts, as pyorch.sidecars.ghosts.LayerGhosts has it. PyorchError
        for ghosts of other experts."""
        (n_expert, n_out), (n_rows, n_in) = mean.shape, down.shape
        if up.shape != (n_rows, n_out) or rank.shape != (n_expert,):
            raise PyorchError(f"the arrays of ghosts of {n_expert} experts do not fit together")
        arrays = _pointers({"mean": mean, "down": down, "up": up})
        check(lib.pyorch_set_ghosts(self.handle, il, given(
            "pyorch_ghosts", n_expert=n_expert, n_in=n_in, n_out=n_out, n_rows=n_rows, rank=array("int32_t", rank),
            **arrays)))

    def set_cache(self, il: int, mask: np.ndarray | None) -> None:
        """Substitution takes exactly the experts of mask, bool[n_expert], for resident; None: those that are."""
        check(lib.pyorch_set_cache(self.handle, il, array("uint8_t", mask), 0 if mask is None else len(mask)))

    def simulate_cache(self, read_layers: float, seed: int = 0) -> None:
        """From now on substitution takes for resident what would be in a cache with the engine's budget and policy, in
        simulated time, empty at first. An expert is read for so many times as long as a layer of a token computes.
        REQUIRES: nothing is being decoded."""
        check(lib.pyorch_simulate_cache(self.handle, read_layers, seed))
        self.simulates_cache = True

    def fill_simulated_cache(self, il: int, experts: Iterable[int]) -> None:
        """These come into the simulated cache at once, as far as its budget reaches."""
        self._order(lib.pyorch_fill_simulated_cache, il, experts)

    def simulated_stats(self, il: int = -1) -> Stats:
        """Of the simulated cache, as stats(). PyorchError where there is none."""
        return read(Stats, call(lib.pyorch_get_simulated_stats, self.handle, il, out="pyorch_stats"))

    # Other servers. Numbers and tokens travel as they are: for a network that nobody else listens to, or for a tunnel.

    def listen(
        self, token: str, model: str, address: str = LOOPBACK, port: int = 0, n_threads: int = 1
    ) -> int:
        """Computes experts for other servers from now on, and returns the port; for 0 it is a free one.

        token: what they must know. model: the fingerprint that theirs must have
        (pyorch.sidecars.container.fingerprint). A layer is computed once a context of the model was made. What waits
        takes memory beside the budget, an eighth of that or what four requests of 1024 rows times experts do.
        """
        return call(lib.pyorch_listen, self.handle, _endpoint(port, address=address, token=token, model=model),
                    n_threads, out="int32_t")[0]

    def stop_listening(self) -> None:
        """Ends all connections of others."""
        check(lib.pyorch_stop_listening(self.handle))

    def served(self) -> Served:
        """PyorchError if it does not listen."""
        return read(Served, call(lib.pyorch_get_served, self.handle, out="pyorch_served"))

    def connect(
        self, address: str, port: int, token: str, model: str, timeout: float = 2.0, rows: str = "f32"
    ) -> int:
        """Joins a server that listens, and returns its number, for set_placement(). One that is silent for so many
        seconds is lost, and joined again. PyorchError with the reason where it cannot be joined now.

        rows: what numbers travel as, there and back. With "bf16" they take half the bytes, and results are others.
        """
        if rows not in ROW_TYPES:
            raise PyorchError(f'rows travel as {" or ".join(ROW_TYPES)}, not as {rows}')
        at, peer = _endpoint(port, address=address, token=token, model=model), ffi.new("int32_t *")
        how = round(timeout * 1000), ROW_TYPES.index(rows)
        if lib.pyorch_connect(self.handle, at, *how, peer) != lib.PYORCH_OK:
            raise PyorchError(string(lib.pyorch_last_error()))  # that it cannot be reached is no fault of a file
        return peer[0]

    def disconnect(self, peer: int) -> None:
        """What it had a place for is computed here from now on."""
        check(lib.pyorch_disconnect(self.handle, peer))

    def peer(self, peer: int) -> Peer:
        """What is known of a server, by the number that connect() gave it. PyorchError if there is none."""
        return read(Peer, call(lib.pyorch_get_peer, self.handle, peer, out="pyorch_peer_info"))

    def set_placement(self, il: int, peers: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> None:
        """Who can compute each expert of a layer: int[n_expert] or int[n_expert, n_places], numbers of connect().

        HERE ends a list, and where it is empty, this server computes. Of several that are there, the one is asked that
        is expected to have answered first, of equals the first. An expert that is resident here is computed here. At
        any time: a ubatch under way keeps to what it began with.
        """
        ids = np.asarray(peers, np.int32)
        if ids.ndim not in (1, 2):
            raise PyorchError(f"a placement has a row for each expert, not the shape {list(ids.shape)}")
        n_places = 1 if ids.ndim == 1 else ids.shape[1]
        check(lib.pyorch_set_placement(self.handle, il, array("int32_t", ids), len(ids), n_places))

    def allow_reads(self, allowed: bool) -> None:
        """Whether an expert that another server has is read from the own disk where that is estimated to be faster.

        Until this is called, it is read only when no server is there that has it. The results are the same.
        """
        check(lib.pyorch_allow_reads(self.handle, allowed))

    def expect_trial(self) -> None:
        """Of a share of the experts: the next ubatch, if it comes before any placement, is only a trial. See
        pyorch_expect_trial."""
        check(lib.pyorch_expect_trial(self.handle))

    def remote_stats(self) -> RemoteStats:
        """What other servers computed for this one since the engine was made."""
        return read(RemoteStats, call(lib.pyorch_get_remote_counts, self.handle, out="pyorch_remote_counts"))


# The arrays of a pyorch_learned, and what their numbers are.
LEARNED = {
    **dict.fromkeys(("weights", "counts", "bias", "tables"), "float32"),
    **dict.fromkeys(("moments", "previous"), "int32"),
}


def _learned_shapes(raw) -> dict[str, tuple[int, ...]]:
    """Of the arrays of a pyorch_learned, by name."""
    return {
        "weights": (raw.n_weights,),
        "counts": (raw.n_layers, raw.n_counts, raw.n_expert),
        "bias": (raw.n_layers, raw.n_expert),
        "tables": (raw.n_layers, raw.n_tables, raw.n_expert, raw.n_expert),
        "moments": (raw.n_moments, raw.n_layers, raw.n_moment_words),
        "previous": (raw.n_moments,),
    }


def _pointers(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    kinds = {"float32": "float", "int32": "int32_t"}
    return {name: array(kinds[LEARNED.get(name, "float32")], values) for name, values in arrays.items()}


def _endpoint(port: int, **texts: str):
    for name, text in texts.items():
        if "\0" in text:
            raise PyorchError(f"a {name} cannot have a zero in it")
    pointers = {name: ffi.new("char[]", text.encode()) for name, text in texts.items()}
    return given("pyorch_endpoint", port=port, **pointers)
