"""The part of an engine that says which experts are resident."""

from __future__ import annotations

from collections.abc import Iterable

from pyorch.library.bindings import array, check, default, ffi, lib, new
from pyorch.library.numerics import np
from pyorch.runtime.handle import EngineHandle
from pyorch.runtime.statistics import Residency, Snapshot, Stats, read


class ResidencyCalls(EngineHandle):
    """What is resident, what is ordered, what was counted."""

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
        check(lib.pyorch_get_residency(self.handle, il, array("uint8_t[]", flags), flags.size))
        states = (lib.PYORCH_RESIDENT, lib.PYORCH_LOADING, lib.PYORCH_PINNED, lib.PYORCH_IN_USE, lib.PYORCH_ON_DEVICE)
        return Residency(*((flags & state) != 0 for state in states))

    def prefetch(self, il: int, experts: Iterable[int]) -> None:
        """Queues reads behind all demand, in this order. Returns at once."""
        self._order(lib.pyorch_prefetch, il, experts)

    def pin(self, il: int, experts: Iterable[int]) -> None:
        """Brings in experts and never evicts them. BudgetError if the rest would fall below the floor."""
        self._order(lib.pyorch_pin, il, experts)

    def offer(self, il: int, expert: int, matrices: bytes) -> None:
        """The bytes of an expert, as the model's file has them, in the order of its roles: taken in place of a read,
        the next time it comes into memory. Ignored of one that is there, or on its way, and where experts are in a
        pack.

        PyorchError for another size.
        """
        check(lib.pyorch_offer(self.handle, il, expert, ffi.from_buffer(matrices), len(matrices)))

    def unpin(self, il: int, experts: Iterable[int]) -> None:
        """Lets eviction take these experts again."""
        self._order(lib.pyorch_unpin, il, experts)

    def evict(self, il: int, experts: Iterable[int]) -> None:
        """Frees resident experts that are neither pinned nor in use."""
        self._order(lib.pyorch_evict, il, experts)

    def wait_idle(self) -> None:
        """Waits until no read is queued or running."""
        check(lib.pyorch_wait_idle(self.handle))

    def stats(self, il: int = -1) -> Stats:
        """Of one layer, or of all of them (-1)."""
        raw = new("pyorch_stats")
        check(lib.pyorch_get_stats(self.handle, il, raw))
        return read(Stats, raw)

    def snapshot(self) -> Snapshot:
        """Residency, uses and statistics of all layers, at one moment."""
        shape = len(self.n_expert), max(self.n_expert.values())
        flags, uses = np.empty(shape, np.uint8), np.empty(shape, np.uint64)
        layers = ffi.new("pyorch_stats[]", shape[0])
        raw = default("pyorch_snapshot", n_layers=shape[0], n_expert=shape[1], flags=array("uint8_t[]", flags),
                      uses=array("uint64_t[]", uses), layers=layers)
        check(lib.pyorch_get_snapshot(self.handle, raw))
        return Snapshot(flags, uses, [read(Stats, layer) for layer in layers], read(Stats, raw.stats))

    def activations(self, il: int) -> np.ndarray:
        """How often the router of a layer selected each expert since the engine was made: uint64[n_expert].

        Of tokens of this engine's contexts, wherever the expert was computed. reset_stats() leaves it as it is.
        """
        counts = np.empty(self.n_expert[il], np.uint64)
        check(lib.pyorch_get_activations(self.handle, il, array("uint64_t[]", counts), counts.size))
        return counts

    def reset_stats(self) -> None:
        """Zeroes the counters, not the gauges."""
        check(lib.pyorch_reset_stats(self.handle))

    def _order(self, function, il: int, experts: Iterable[int]) -> None:
        ids = np.fromiter(experts, np.int32)
        check(function(self.handle, il, ffi.from_buffer("int32_t[]", ids), ids.size))
