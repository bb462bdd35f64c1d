"""The engine: keeps a budgeted set of experts resident while llama.cpp computes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyorch.errors import PyorchError
from pyorch.library.bindings import array, check, default, ffi, lib, string
from pyorch.library.choices import policies
from pyorch.library.numerics import np
from pyorch.runtime.devices import Device
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.observers import Prediction, observer_callback, prediction_callback
from pyorch.runtime.prediction import PredictionCalls
from pyorch.runtime.remote import RemoteCalls
from pyorch.runtime.residency import ResidencyCalls
from pyorch.runtime.sources import Source, read_callback
from pyorch.runtime.substitution import SubstitutionCalls
from pyorch.settings.budget import Budget
from pyorch.settings.device import DEVICE_MISSES, DeviceMisses
from pyorch.settings.pools import Pools
from pyorch.settings.reads import READERS, Reads

_capturing = threading.local()  # engine: that captures what this thread loads


class Engine(ResidencyCalls, PredictionCalls, SubstitutionCalls, RemoteCalls):
    """Manages the experts of the models that are loaded under capture().

    Args:
        model_map: the model's map; copied.
        budget: bytes, a share such as "40%", or a size such as "1.5GiB". BudgetError below the floor.
        policy: which expert goes first: one of pyorch.library.choices.policies(), None: default_policy() of them.
        reads: who reads, and how much at once.
        source: reads in place of the map's files.
        simulated: for pyorch.replay: nothing is read, and no model can be loaded under it.
        pools: how the budget is divided among the forms of compressed experts.
        device: computes with experts that lie in its memory; needs plain.
        device_misses: what computes an expert that is not there; of auto, with its rates.
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
        device: Device | None = None,
        device_misses: DeviceMisses = DeviceMisses(),
        **config: int,
    ) -> None:
        self._read = read_callback(source) if source is not None else ffi.NULL
        self._observer = self._prediction_observer = ffi.NULL
        self.simulated = simulated
        self.history = None
        self.n_expert = {layer.il: layer.n_expert for layer in model_map.layers}  # by il
        how = Reads.parse(reads)
        raw = default(
            "pyorch_config", budget_bytes=Budget.parse(budget).resolve(model_map.info),
            reader=READERS.index(how.reader), read_depth=how.depth, read_bytes=how.request_bytes, read=self._read,
            pool_shares=Pools.parse(pools).shares, device=device.handle if device is not None else ffi.NULL,
            device_misses=DEVICE_MISSES.index(device_misses.who), device_rates=device_misses.rates, **config,
        )
        if policy is not None:
            raw.policy = policies().choose(policy, simulated).value
        out = ffi.new("pyorch_engine **")
        make = lib.pyorch_simulation_new if simulated else lib.pyorch_engine_new
        check(make(model_map.handle, raw, out))
        self._engine = out[0]
        self._pid = os.getpid()

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
        buffer = ffi.new("char[]", 1024)
        check(lib.pyorch_engine_error(self.handle, buffer, len(buffer)))
        return string(buffer)

    def set_budget(self, n_bytes: int) -> None:
        """BudgetError below the floor, or below what is pinned."""
        check(lib.pyorch_set_budget(self.handle, n_bytes))

    def set_device_budget(self, n_bytes: int) -> None:
        """Of the device's memory for experts, at most. It is taken when the first context is made: PyorchError then."""
        check(lib.pyorch_set_device_budget(self.handle, n_bytes))

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
        uses = np.ascontiguousarray(uses, np.float64)
        check(lib.pyorch_set_uses(self.handle, il, array("double[]", uses), uses.size))

    def learned(self) -> dict[str, np.ndarray]:
        """A copy of what the policy "learned" has learned: the arrays of pyorch_learned, float32.

        PyorchError under another policy.
        """
        raw = default("pyorch_learned")
        check(lib.pyorch_get_learned(self.handle, raw))
        arrays = {name: np.empty(shape, np.float32) for name, shape in _learned_shapes(raw).items()}
        for name, values in arrays.items():
            setattr(raw, name, array("float[]", values))
        check(lib.pyorch_get_learned(self.handle, raw))
        return arrays

    def set_learned(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on from what learned() gave. PyorchError under another policy, and for arrays that do not fit."""
        raw = default("pyorch_learned")
        check(lib.pyorch_get_learned(self.handle, raw))
        shapes = _learned_shapes(raw)
        given = {name: np.ascontiguousarray(arrays[name], np.float32) for name in shapes if name in arrays}
        for name, shape in shapes.items():
            if name not in given or given[name].shape != shape:
                found = list(given[name].shape) if name in given else "nothing"
                raise PyorchError(f"what was learned for eviction has {found} as {name}, the model needs {list(shape)}")
            setattr(raw, name, array("float[]", given[name]))
        check(lib.pyorch_set_learned(self.handle, raw))

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

    def set_prediction_observer(self, observer: Callable[[Prediction], None] | None) -> None:
        """Shows each prediction to the observer, on the prefetching thread; None removes it."""
        callback = prediction_callback(observer) if observer is not None else ffi.NULL
        check(lib.pyorch_set_prediction_observer(self.handle, callback, ffi.NULL))
        self._prediction_observer = callback


def _learned_shapes(raw) -> dict[str, tuple[int, ...]]:
    """Of the arrays of a pyorch_learned, by name."""
    return {
        "weights": (raw.n_weights,),
        "counts": (raw.n_layers, raw.n_counts, raw.n_expert),
        "bias": (raw.n_layers, raw.n_expert),
        "tables": (raw.n_layers, raw.n_tables, raw.n_expert, raw.n_expert),
    }
