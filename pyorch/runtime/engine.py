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
from pyorch.settings.device_options import DEVICE_MISSES, PROCESSOR
from pyorch.settings.pools import Pools
from pyorch.settings.reads import READERS, Reads
from pyorch.settings.rows import ROW_TYPES

FORKED = (
    "the model was loaded before this process was forked, and threads are not copied: load it in a process that starts "
    'anew, such as one of multiprocessing.get_context("spawn")'
)

LOOPBACK = "127.0.0.1"
HERE = -1  # in a placement: this server computes the expert

_WHAT_PAYS = -1.0  # a min_precision: prefetch each guess that gains more than it costs

_capturing = threading.local()  # .engine: captures models that this thread loads


class History(Protocol):
    """A history of iterations: pyorch.sidecars.history.ExpertMaps."""

    handle: Any  # pyorch_history *

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the history to a file."""
        ...


class Engine:
    """Manages the experts of the models that are loaded under capture().

    pyorch.h describes each function in full. `il` is llama.cpp's number of a block. All methods raise PyorchError for
    arguments that do not fit the model.

    Attributes:
        n_expert: Experts of each layer, by il.
        history: The history given to set_history(). None before.
        simulates_cache: Substitution takes residency from a simulated cache.
        lossy_layers: By il, the layers that treat absent experts in a lossy way.

    Args:
        model_map: The model's map; copied.
        budget: Bytes, a share such as "40%", or a size such as "1.5GiB".
        policy: The eviction policy, one of pyorch.library.choices.policies(). None: their default_policy().
        reads: The reader, its depth and the size of its requests.
        source: Reads in place of the map's files.
        simulated: For pyorch.replay: the engine reads nothing, and no model can be loaded under it.
        pools: Divides the budget among the forms of compressed experts.
        devices: Compute with the experts in their memory. They need plain=1.
        device_bytes: Memory for experts, by device.
        device_misses: Computes an expert that the device lacks: one of DEVICE_MISSES.
        config: Further fields of pyorch_config, as pyorch.h defines them, such as plain: compute with experts in the
            order of the file, not repacked for faster kernels (Role.layout).

    Raises:
        BudgetError: The budget is below the floor.
        PyorchError: An option is unknown or impossible.
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
        self.lossy_layers: set[int] = set()
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
        """The pyorch_engine *, owned by this object.

        Raises:
            PyorchError: The engine was closed, or this process was forked from its process.
        """
        if self._engine is None:
            raise PyorchError("the engine was closed: its model is no longer loaded")
        if self._pid != os.getpid():
            raise PyorchError(FORKED)
        return self._engine

    @property
    def is_closed(self) -> bool:
        """Whether the engine was freed, or belongs to the process from which this one was forked."""
        return self._engine is None or self._pid != os.getpid()

    def close(self) -> None:
        """Frees the experts. In a forked process it does nothing: the parent has them.

        REQUIRES: The models loaded under this engine, and their contexts, are freed.
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
        """Manages the experts of models that this thread loads in the `with` block. Can be nested."""
        before = getattr(_capturing, "engine", ffi.NULL)
        check(lib.pyorch_engine_capture(self.handle))
        _capturing.engine = self.handle
        try:
            yield
        finally:
            check(lib.pyorch_engine_capture(before))
            _capturing.engine = before

    def error(self) -> str:
        """Returns the reason of the engine's last failed decode, of any thread; "" if none failed.

        bindings.decode_error() returns the reason of this thread's decodes.
        """
        return string(lib.pyorch_engine_error(self.handle))

    def set_observer(self, observer: Callable[[Any], None] | None, copy: bool = True) -> None:
        """Calls the observer with each routing decision, between the router and the experts. None removes it.

        The observer runs on a compute thread: it must return quickly and must not decode. Its exceptions are printed.

        Args:
            observer: The function to call.
            copy: Pass a Routing. False: pass a RoutingView, which makes arrays on access and is valid during the call
                only.
        """
        callback = observer_callback(observer, copy) if observer is not None else ffi.NULL
        check(lib.pyorch_set_observer(self.handle, callback, ffi.NULL))
        # Frees this thread's old observer only now, when no call of it can run. Another thread's may be active.
        self._observers[threading.get_ident()] = callback

    # Residency, orders and counters

    def set_budget(self, n_bytes: int) -> None:
        """Changes the budget.

        Raises:
            BudgetError: It is below the floor, or below the pinned experts.
        """
        check(lib.pyorch_set_budget(self.handle, n_bytes))

    def set_device_budget(self, device: int, n_bytes: int) -> None:
        """Limits a device's memory for experts. The memory is allocated when the first context is made.

        Raises:
            PyorchError: The memory is allocated already.
        """
        check(lib.pyorch_set_device_budget(self.handle, device, n_bytes))

    def set_policy(self, policy: str) -> None:
        """Sets the eviction policy: one of policies()."""
        check(lib.pyorch_set_policy(self.handle, policies().choose(policy, self.simulated).value))

    def set_pools(self, pools: Pools | str) -> None:
        """Divides the budget anew. Pinned experts and the largest layer always have room."""
        check(lib.pyorch_set_pools(self.handle, Pools.parse(pools).shares))

    def set_uses(self, il: int, uses: np.ndarray) -> None:
        """Sets how often each expert of a layer was used before, float64[n_expert].

        The ranks that assign experts of a compressed pack to pools continue from there.

        Raises:
            PyorchError: A number is negative.
        """
        check(lib.pyorch_set_uses(self.handle, il, array("double", uses), len(uses)))

    def learned(self) -> dict[str, np.ndarray]:
        """Returns a copy of the state of the policy "learned": the arrays of pyorch_learned, with dtypes of LEARNED.

        Raises:
            PyorchError: Another policy is set.
        """
        raw = call(lib.pyorch_get_learned, self.handle, out="pyorch_learned")
        arrays = {name: np.empty(shape, LEARNED[name]) for name, shape in _learned_shapes(raw).items()}
        filled = given("pyorch_learned", n_moments=raw.n_moments, **_pointers(arrays))
        check(lib.pyorch_get_learned(self.handle, filled))
        return {name: values[: filled.n_moments] if name in ("moments", "previous") else values
                for name, values in arrays.items()}

    def set_learned(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores the state that learned() returned.

        Raises:
            PyorchError: Another policy is set, or the arrays do not fit.
        """
        raw = call(lib.pyorch_get_learned, self.handle, out="pyorch_learned")
        raw.n_moments = len(arrays["previous"]) if "previous" in arrays else 0
        shapes = {name: shape for name, shape in _learned_shapes(raw).items() if 0 not in shape}
        for name, shape in shapes.items():
            found = list(arrays[name].shape) if name in arrays else "nothing"
            if found != list(shape):
                raise PyorchError(f"the state of the eviction policy has {found} as {name}, the model needs "
                                  f"{list(shape)}")
        pointers = _pointers({name: arrays[name] for name in shapes})
        for name, pointer in pointers.items():
            setattr(raw, name, pointer)
        check(lib.pyorch_set_learned(self.handle, raw))

    def set_layer_limits(self, il: int, min_experts: int, max_experts: int) -> None:
        """Sets the number of a layer's experts that eviction keeps, and the number that the layer may hold."""
        check(lib.pyorch_set_layer_limits(self.handle, il, min_experts, max_experts))

    def set_device_limits(self, il: int, min_experts: int, max_experts: int) -> None:
        """Sets the same limits in slots of the device. The first context allocates these.

        Raises:
            BudgetError: The minima leave no slot.
            PyorchError: No context was made yet.
        """
        check(lib.pyorch_set_device_limits(self.handle, il, min_experts, max_experts))

    def residency(self, il: int) -> Residency:
        """Returns which experts of a layer are resident, loading, pinned, in use and on the device."""
        flags = np.empty(self.n_expert[il], np.uint8)
        check(lib.pyorch_get_residency(self.handle, il, array("uint8_t", flags), flags.size))
        states = (lib.PYORCH_RESIDENT, lib.PYORCH_LOADING, lib.PYORCH_PINNED, lib.PYORCH_IN_USE, lib.PYORCH_ON_DEVICE)
        return Residency(*((flags & state) != 0 for state in states))

    def prefetch(self, il: int, experts: Iterable[int]) -> None:
        """Queues reads after all demand, in this order, and returns at once."""
        self._order(lib.pyorch_prefetch, il, experts)

    def pin(self, il: int, experts: Iterable[int]) -> None:
        """Loads experts and never evicts them.

        Raises:
            BudgetError: The rest of the budget would fall below the floor.
        """
        self._order(lib.pyorch_pin, il, experts)

    def unpin(self, il: int, experts: Iterable[int]) -> None:
        """Allows eviction of these experts again."""
        self._order(lib.pyorch_unpin, il, experts)

    def evict(self, il: int, experts: Iterable[int]) -> None:
        """Evicts resident experts that are neither pinned nor in use."""
        self._order(lib.pyorch_evict, il, experts)

    def _order(self, function, il: int, experts: Iterable[int]) -> None:
        try:
            ids = np.fromiter(experts, np.int32)
        except (OverflowError, TypeError, ValueError):
            raise PyorchError(f"experts of layer {il} are named by their numbers") from None
        check(function(self.handle, il, array("int32_t", ids), ids.size))

    def offer(self, il: int, expert: int, matrices: bytes) -> None:
        """Offers an expert's bytes as the model's file has them, all matrices in the order of the roles.

        The next load takes them and reads nothing. Ignored if the expert is resident or loading, and for packs.

        Raises:
            PyorchError: The size is not that of the expert.
        """
        check(lib.pyorch_offer(self.handle, il, expert, ffi.from_buffer(matrices), len(matrices)))

    def wait_idle(self) -> None:
        """Waits until no read is queued or running."""
        check(lib.pyorch_wait_idle(self.handle))

    def stats(self, il: int = -1) -> Stats:
        """Returns the statistics of one layer, or of all layers (-1)."""
        return read(Stats, call(lib.pyorch_get_stats, self.handle, il, out="pyorch_stats"))

    def snapshot(self) -> Snapshot:
        """Returns residency, uses and statistics of all layers at one moment."""
        shape = len(self.n_expert), max(self.n_expert.values())
        flags, uses = np.empty(shape, np.uint8), np.empty(shape, np.uint64)
        layers = ffi.new("pyorch_stats[]", shape[0])
        raw = given("pyorch_snapshot", n_layers=shape[0], n_expert=shape[1], flags=array("uint8_t", flags),
                    uses=array("uint64_t", uses), layers=layers)
        check(lib.pyorch_get_snapshot(self.handle, raw))
        return Snapshot(flags, uses, [read(Stats, layer) for layer in layers], read(Stats, raw.stats))

    def activations(self, il: int) -> np.ndarray:
        """Counts how often a layer's router selected each expert since the engine was made: uint64[n_expert].

        Only tokens of this engine's contexts count, wherever the expert was computed. reset_stats() keeps the counts.
        """
        counts = np.empty(self.n_expert[il], np.uint64)
        check(lib.pyorch_get_activations(self.handle, il, array("uint64_t", counts), counts.size))
        return counts

    def reset_stats(self) -> None:
        """Sets the counters to 0, not the gauges."""
        check(lib.pyorch_reset_stats(self.handle))

    # Predictors

    def set_prefetch(
        self, predictor: str, distance: int = 1, min_precision: float | None = 0.0, automatic: bool = False,
        il: int = -1,
    ) -> None:
        """Sets the predictor that prefetches experts of a layer up to `distance` layers ahead while decoding.

        Args:
            predictor: One of pyorch.library.choices.predictors().
            distance: Layers ahead at most.
            min_precision: Prefetch only guesses that came true at least this often, counted while running. None:
                prefetch guesses that gain more than they cost.
            automatic: Predict only while experts are absent, and stop if a trial shows that decoding is faster without.
            il: The layer. -1: all layers.
        """
        kind = predictors().choose(predictor, self.simulated).value
        least = _WHAT_PAYS if min_precision is None else min_precision
        check(lib.pyorch_set_prefetch(self.handle, il, kind, distance, least, automatic))

    def set_router(self, il: int, router: Router) -> None:
        """Gives a simulated engine, which has no graph, a router for its predictors. Copied, as float32."""
        check(lib.pyorch_set_router(self.handle, il, routers.to_struct(router)))

    def router(self, il: int) -> Router:
        """Returns a copy of a layer's router.

        Raises:
            PyorchError: No context was made yet, or the router cannot be applied, with the reason.
        """
        return routers.from_struct(call(lib.pyorch_get_router, self.handle, il, out="pyorch_router"))

    def check_routers(self) -> None:
        """Checks the routers of the graphs, which are known once a context was made.

        Raises:
            PyorchError: The predictor or speculation applies routers, and one of a graph cannot be applied.
        """
        check(lib.pyorch_check_routers(self.handle))

    def set_default_vectors(self, il: int, vectors: np.ndarray) -> None:
        """Sets mean outputs of a layer's experts, float32[n_expert, n_embd], for the quasi-hidden predictor."""
        check(lib.pyorch_set_default_vectors(self.handle, il, array("float", vectors), *vectors.shape))

    def set_estimator(self, weights: Mapping[str, np.ndarray]) -> None:
        """Sets the arrays of pyorch_estimator, float32 (see pyorch.sidecars.predictor.Estimator).

        Raises:
            PyorchError: The arrays do not fit.
        """
        n_latent, n_embd = weights["in_weight"].shape
        n_layers, n_expert = weights["head_bias"].shape
        raw = given("pyorch_estimator", n_latent=n_latent, n_embd=n_embd, n_hidden=len(weights["up_bias"]),
                    n_layers=n_layers, n_expert=n_expert, **_pointers(weights))
        check(lib.pyorch_set_estimator(self.handle, raw))

    def set_hybrid(self, layers: Iterable[bool]) -> None:
        """Sets the layers, in the order of il, for which the hybrid predictor uses the estimator."""
        mask = np.fromiter(layers, np.uint8)
        check(lib.pyorch_set_hybrid(self.handle, array("uint8_t", mask), mask.size))

    def set_history(self, history: History) -> None:
        """Sets the history that the predictor expert-map searches and extends."""
        check(lib.pyorch_set_history(self.handle, history.handle))
        self.history = history

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Sums up the outputs of all experts in the `with` block, for mean_outputs()."""
        check(lib.pyorch_set_calibration(self.handle, True))
        try:
            yield
        finally:
            check(lib.pyorch_set_calibration(self.handle, False))

    def mean_outputs(self, il: int, n_embd: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the last calibration: float32[n_expert, n_embd], 0 for unused experts, and uint64[n_expert] uses."""
        n_expert = self.n_expert[il]
        vectors, counts = np.empty((n_expert, n_embd), np.float32), np.empty(n_expert, np.uint64)
        check(lib.pyorch_get_mean_outputs(
            self.handle, il, array("float", vectors), array("uint64_t", counts), n_expert, n_embd))
        return vectors, counts

    # Lossy

    def set_speculation(self, mode: str) -> None:
        """Sets how layers execute the forecasts of the previous layer: one of pyorch.library.choices.speculation()."""
        check(lib.pyorch_set_speculation(self.handle, speculation().choose(mode).value))

    def speculation_stats(self) -> SpeculationStats:
        """Returns the counts of speculation since the last reset_stats()."""
        counts = call(lib.pyorch_get_speculation_counts, self.handle, out="pyorch_speculation_counts")
        return read(SpeculationStats, counts)

    def set_substitution(self, il: int, settings: Mapping[str, int | float]) -> None:
        """Sets a layer's treatment of absent experts: fields of pyorch_substitution; others get their defaults."""
        check(lib.pyorch_set_substitution(self.handle, il, given("pyorch_substitution", **settings)))

    def substitution_stats(self, il: int = -1) -> SubstitutionStats:
        """Returns the counts of substitution of one layer, or of all (-1), since the last reset_stats()."""
        counts = call(lib.pyorch_get_substitution_counts, self.handle, il, out="pyorch_substitution_counts")
        return read(SubstitutionStats, counts)

    def set_buddies(self, il: int, ids: np.ndarray, q: np.ndarray) -> None:
        """Sets the buddies of each expert of a layer (eq. 4 of BuddyMoE).

        Args:
            il: The layer.
            ids: int32[n_expert, k_max], the best first, -1 after the last.
            q: float32[n_expert, k_max], their similarities.
        """
        if q.shape != ids.shape:
            raise PyorchError(f"buddies of the shape {list(ids.shape)} have similarities of {list(q.shape)}")
        check(lib.pyorch_set_buddies(self.handle, il, *ids.shape, array("int32_t", ids), array("float", q)))

    def set_ghosts(self, il: int, rank: np.ndarray, mean: np.ndarray, down: np.ndarray, up: np.ndarray) -> None:
        """Sets the estimators of a layer's expert outputs; for the arrays see pyorch.sidecars.ghosts.LayerGhosts.

        Raises:
            PyorchError: The arrays do not fit each other or the layer.
        """
        (n_expert, n_out), (n_rows, n_in) = mean.shape, down.shape
        if up.shape != (n_rows, n_out) or rank.shape != (n_expert,):
            raise PyorchError(f"the arrays of ghosts of {n_expert} experts do not fit together")
        arrays = _pointers({"mean": mean, "down": down, "up": up})
        check(lib.pyorch_set_ghosts(self.handle, il, given(
            "pyorch_ghosts", n_expert=n_expert, n_in=n_in, n_out=n_out, n_rows=n_rows, rank=array("int32_t", rank),
            **arrays)))

    def set_cache(self, il: int, mask: np.ndarray | None) -> None:
        """Makes substitution treat the experts of mask, bool[n_expert], as resident. None: the real residents."""
        check(lib.pyorch_set_cache(self.handle, il, array("uint8_t", mask), 0 if mask is None else len(mask)))

    def simulate_cache(self, read_layers: float, seed: int = 0) -> None:
        """Makes substitution take residency from a simulated cache with the engine's budget and policy.

        The cache runs in simulated time and starts empty. REQUIRES: Nothing is being decoded.

        Args:
            read_layers: The time to read an expert, in times that one layer of a token computes.
            seed: Of the simulation.
        """
        check(lib.pyorch_simulate_cache(self.handle, read_layers, seed))
        self.simulates_cache = True

    def fill_simulated_cache(self, il: int, experts: Iterable[int]) -> None:
        """Loads experts into the simulated cache at once, as far as its budget allows."""
        self._order(lib.pyorch_fill_simulated_cache, il, experts)

    def simulated_stats(self, il: int = -1) -> Stats:
        """Returns the simulated cache's statistics, as stats().

        Raises:
            PyorchError: No cache is simulated.
        """
        return read(Stats, call(lib.pyorch_get_simulated_stats, self.handle, il, out="pyorch_stats"))

    # Other servers. Numbers and tokens are sent unencrypted: use a private network or a tunnel.

    def listen(
        self, token: str, model: str, address: str = LOOPBACK, port: int = 0, n_threads: int = 1
    ) -> int:
        """Starts to compute experts for other servers, and returns the port.

        A layer is available once a context of the model was made. Waiting requests take memory in addition to the
        budget: an eighth of it, or enough for four requests of 1024 rows times experts.

        Args:
            token: The secret that clients must send.
            model: The fingerprint that their model must have (pyorch.sidecars.container.fingerprint).
            address: The address to listen at.
            port: The port. 0: a free one.
            n_threads: Threads that compute.
        """
        return call(lib.pyorch_listen, self.handle, _endpoint(port, address=address, token=token, model=model),
                    n_threads, out="int32_t")[0]

    def stop_listening(self) -> None:
        """Closes the connections of all other servers."""
        check(lib.pyorch_stop_listening(self.handle))

    def served(self) -> Served:
        """Returns the counts of computing for other servers.

        Raises:
            PyorchError: The engine does not listen.
        """
        return read(Served, call(lib.pyorch_get_served, self.handle, out="pyorch_served"))

    def connect(
        self, address: str, port: int, token: str, model: str, timeout: float = 2.0, rows: str = "f32"
    ) -> int:
        """Connects to a server that listens, and returns its number for set_placement().

        Args:
            address: Of the server.
            port: Of the server.
            token: The secret of the server.
            model: The fingerprint of this model.
            timeout: Seconds without an answer after which the server counts as lost. It is then connected again.
            rows: The type in which rows travel in both directions. "bf16" halves the bytes and changes results.

        Raises:
            PyorchError: The server cannot be reached or refuses, with the reason.
        """
        if rows not in ROW_TYPES:
            raise PyorchError(f'rows travel as {" or ".join(ROW_TYPES)}, not as {rows}')
        at, peer = _endpoint(port, address=address, token=token, model=model), ffi.new("int32_t *")
        how = round(timeout * 1000), ROW_TYPES.index(rows)
        if lib.pyorch_connect(self.handle, at, *how, peer) != lib.PYORCH_OK:
            raise PyorchError(string(lib.pyorch_last_error()))  # an unreachable server is no FormatError
        return peer[0]

    def disconnect(self, peer: int) -> None:
        """Disconnects from a server. This server computes the experts that were placed there."""
        check(lib.pyorch_disconnect(self.handle, peer))

    def peer(self, peer: int) -> Peer:
        """Returns the state of a server by the number that connect() returned.

        Raises:
            PyorchError: No server has this number.
        """
        return read(Peer, call(lib.pyorch_get_peer, self.handle, peer, out="pyorch_peer_info"))

    def set_placement(self, il: int, peers: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> None:
        """Sets which servers can compute each expert of a layer.

        The engine asks the connected server that it expects to answer first; of equal ones, the first in the list. It
        computes resident experts itself. A running ubatch keeps the placement that it began with.

        Args:
            il: The layer.
            peers: int[n_expert] or int[n_expert, n_places], numbers of connect(). HERE ends a list. For an empty list,
                this server computes.
        """
        ids = np.asarray(peers, np.int32)
        if ids.ndim not in (1, 2):
            raise PyorchError(f"a placement has a row for each expert, not the shape {list(ids.shape)}")
        n_places = 1 if ids.ndim == 1 else ids.shape[1]
        check(lib.pyorch_set_placement(self.handle, il, array("int32_t", ids), len(ids), n_places))

    def allow_reads(self, allowed: bool) -> None:
        """Allows to read an expert from the own disk if this is expected to be faster than another server.

        By default it is read only if no connected server has it. The results are the same.
        """
        check(lib.pyorch_allow_reads(self.handle, allowed))

    def expect_trial(self) -> None:
        """Marks the next ubatch, if it starts before any placement, as a trial. For a share of the experts.

        See pyorch_expect_trial.
        """
        check(lib.pyorch_expect_trial(self.handle))

    def remote_stats(self) -> RemoteStats:
        """Returns the counts of other servers' computing for this engine since it was made."""
        return read(RemoteStats, call(lib.pyorch_get_remote_counts, self.handle, out="pyorch_remote_counts"))


# The arrays of a pyorch_learned, and their dtypes.
LEARNED = {
    **dict.fromkeys(("weights", "counts", "bias", "tables"), "float32"),
    **dict.fromkeys(("moments", "previous"), "int32"),
}


def _learned_shapes(raw) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays of a pyorch_learned, by name."""
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
