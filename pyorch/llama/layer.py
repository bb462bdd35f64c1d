"""A layer of a loaded model: its residency, and the settings of its experts."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pyorch.errors import PyorchError
from pyorch.llama.apply import apply_prefetch, apply_substitution, find_ghosts
from pyorch.llama.managed import ManagedModel
from pyorch.runtime.statistics import Stats
from pyorch.settings.prefetch import AUTO, Prefetch
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.buddies import Buddies

MAX_EXPERTS = (1 << 31) - 1  # the largest number of the library; it reports the layer's own limit


@dataclass(frozen=True)
class LayerSettings:
    """The settings of one layer's experts.

    Attributes:
        min_experts: Eviction keeps this many.
        max_experts: The layer holds at most this many, except while it computes. None: no limit.
        pinned: Experts that are never evicted.
        substitution: Replaces absent experts (lossy). None: nothing is replaced.
        prefetch: The predictor for this layer, such as "quasi-hidden:2:0.5". None: as for load().
        min_on_device: Eviction keeps this many on the device.
        max_on_device: The device holds at most this many. None: no limit.

    Raises:
        PyorchError: A value is invalid. No layer was changed.
    """

    min_experts: int = 0
    max_experts: int | None = None
    pinned: frozenset[int] = frozenset()
    substitution: Substitution | None = None
    prefetch: str | None = None
    min_on_device: int = 0
    max_on_device: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_experts", "max_experts", "min_on_device", "max_on_device"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or not 0 <= given <= MAX_EXPERTS):
                raise PyorchError(f"{name} is {given}, and must be a number of experts")
        try:
            pinned = frozenset(map(operator.index, self.pinned))
        except TypeError:
            pinned = frozenset([-1])
        if not all(0 <= expert < MAX_EXPERTS for expert in pinned):
            raise PyorchError(f"pinned is {self.pinned}, and must be numbers of experts")
        substitution = None if self.substitution is None else Substitution.parse(self.substitution)
        if self.prefetch is not None and Prefetch.parse(self.prefetch).predictor == AUTO:
            raise PyorchError('prefetch "auto" weighs the time of predictions for all layers together: name a '
                              "predictor for one layer")
        object.__setattr__(self, "pinned", pinned)
        object.__setattr__(self, "substitution", substitution if substitution and substitution.lossy else None)

    @property
    def on_device(self) -> tuple[int, int | None]:
        """Least and most experts of the layer on the device; None: no limit."""
        return self.min_on_device, self.max_on_device


class Layer:
    """A block with routed experts."""

    __slots__ = ("_engine", "_record", "_settings", "buddies", "il", "n_expert")  # reports a misspelled `settings`

    def __init__(self, record: ManagedModel, il: int, n_expert: int) -> None:
        self.il = il
        self.n_expert = n_expert
        self._engine = record.engine
        self._record = record
        self._settings = LayerSettings(substitution=record.plan.settings.substitution)
        self.buddies = record.plan.buddies

    def __repr__(self) -> str:
        return f"<pyorch.llama.layer.Layer {self.il}: {self.n_expert} experts, {self._settings}>"

    @property
    def residency(self) -> np.ndarray:
        """The present residency of experts, bool[n_expert]. With a device uint8: 1 in host memory, 2 on the device."""
        now = self._engine.residency(self.il)
        return now.resident if self._record.devices is None else np.where(now.on_device, np.uint8(2), now.resident)

    @property
    def settings(self) -> LayerSettings:
        """The settings of the layer."""
        return self._settings

    @settings.setter
    def settings(self, wanted: LayerSettings) -> None:
        """Applies all settings. If one is refused, applies none."""
        if not isinstance(wanted, LayerSettings):
            raise TypeError(f"the settings of a layer are a pyorch.LayerSettings, not {wanted!r}")
        before, engine = self._settings, self._engine
        added = sorted(wanted.pinned - before.pinned)
        with contextlib.ExitStack() as undo:
            engine.pin(self.il, added)
            undo.callback(engine.unpin, self.il, added)
            undo.callback(self._limit, before, wanted)
            self._limit(wanted, before)
            if wanted.substitution != before.substitution:
                undo.callback(apply_substitution, engine, self.il, before.substitution, self.buddies)
                ghosts = find_ghosts(wanted.substitution, self._record.plan.sidecars)
                apply_substitution(engine, self.il, wanted.substitution, self.buddies, ghosts)
            if wanted.prefetch != before.prefetch:
                prefetch = self._record.plan.prefetch if wanted.prefetch is None else Prefetch.parse(wanted.prefetch)
                apply_prefetch(prefetch, engine, self._record.plan.sidecars, self.il)
            undo.pop_all()
        engine.unpin(self.il, sorted(before.pinned - wanted.pinned))
        self._settings = wanted

    def _limit(self, wanted: LayerSettings, before: LayerSettings) -> None:
        """Sets the limits of residency, in host memory and on a device."""
        most = self.n_expert if wanted.max_experts is None else wanted.max_experts
        self._engine.set_layer_limits(self.il, wanted.min_experts, most)
        if wanted.on_device != before.on_device:
            most = self.n_expert if wanted.max_on_device is None else wanted.max_on_device
            self._engine.set_device_limits(self.il, wanted.min_on_device, most)

    def prefetch(self, experts: Iterable[int]) -> None:
        """Queues reads after all demand, in this order, and returns at once."""
        self._engine.prefetch(self.il, experts)

    def evict(self, experts: Iterable[int]) -> None:
        """Evicts resident experts that are neither pinned nor in use."""
        self._engine.evict(self.il, experts)

    def substitute(self, substitution: Substitution | None, buddies: Buddies | None) -> None:
        """Sets settings.substitution, and its buddy lists."""
        ghosts = find_ghosts(substitution, self._record.plan.sidecars)
        apply_substitution(self._engine, self.il, substitution, buddies, ghosts)
        self.buddies = buddies
        self._settings = dataclasses.replace(self._settings, substitution=substitution)

    def stats(self) -> Stats:
        """Returns the layer's statistics since loading or the last Model.reset_stats()."""
        return self._engine.stats(self.il)


class ResidencyView(Mapping[int, np.ndarray]):
    """A mapping from il to the present Layer.residency."""

    def __init__(self, layers: dict[int, Layer]) -> None:
        self._layers = layers

    def __getitem__(self, il: int) -> np.ndarray:
        return self._layers[il].residency

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
