"""An engine's counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pyorch.library.bindings import ffi, numbers, string
from pyorch.sizes import format_bytes

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


def ratio(a: float, b: float) -> float:
    """Returns a / b; nan if b is 0."""
    return a / b if b else float("nan")


def is_of_layers(part: str) -> bool:
    """Returns whether the numbers of a part of a struct of pyorch.h exist for a single layer too."""
    return part.endswith("of each layer too")


class Counts:
    """The numbers of a C struct, which pyorch.h describes: a frozen dataclass of its fields."""

    def __init_subclass__(cls, struct: str) -> None:
        cls.__annotations__ = {number.name: int for number in numbers(struct)}
        dataclass(frozen=True)(cls)

    if TYPE_CHECKING:
        def __init__(self, **values: int) -> None: ...
        def __getattr__(self, name: str) -> int: ...


class Stats(Counts, struct="pyorch_stats"):
    """Counters since the start or the last reset, and gauges: the fields of pyorch_stats, described in pyorch.h.

    Of a single layer, only the fields that pyorch.h counts by layer.
    """

    @property
    def hit_rate(self) -> float:
        """Share of the uses of experts that found the expert resident. nan without uses."""
        return ratio(self.hits, self.hits + self.misses)

    @property
    def device_hit_rate(self) -> float:
        """Share of the uses of experts that found the expert in the device's memory. nan without uses."""
        return ratio(self.device_hits, self.device_hits + self.device_misses)

    @property
    def device_computed_share(self) -> float:
        """Share of the uses of experts that the device computed, not the processor. nan without uses."""
        return ratio(self.device_computed, self.device_hits + self.device_misses)

    @property
    def device_ahead_precision(self) -> float:
        """Share of the experts uploaded by forecasts that their layers used. nan without forecasts."""
        return ratio(self.device_ahead_hits, self.device_ahead)

    @property
    def in_memory(self) -> str:
        """A text about hits in host memory, which holds the experts that a device lacks."""
        rate = f"{self.hit_rate:.1%}" if self.hits + self.misses else "-"
        return f"hit rate {rate} of what the device lacks" if self.device_budget_bytes else f"hit rate {rate}"

    @property
    def on_device(self) -> str:
        """A text about the device's experts. "" without a device."""
        if not self.device_budget_bytes:
            return ""
        rate = f"{self.device_hit_rate:.1%}" if self.device_hits + self.device_misses else "-"
        ahead = f" ({self.device_ahead_hits} of {self.device_ahead} forecasts right)" if self.device_ahead else ""
        computed = f", {self.device_computed_share:.1%} computed there" if self.device_hits + self.device_misses else ""
        return (f"hit rate {rate}{ahead}{computed}, {format_bytes(self.device_bytes)} uploaded; "
                f"{format_bytes(self.device_used_bytes)} of its memory used")

    @property
    def unused_loads(self) -> int:
        """Experts that were prefetched and not used. Too small by prefetches from before counting began."""
        return max(0, self.prefetch_loads - self.prefetch_hits)

    @property
    def useful_share(self) -> float:
        """Share of the loaded experts that were not prefetched in vain. nan without loads."""
        return 1 - ratio(self.unused_loads, self.loads)


class SubstitutionStats(Counts, struct="pyorch_substitution_counts"):
    """Counts of substitution, in the ubatches that it may change: fields of pyorch_substitution_counts.

    A slot is one of the experts of a token in a layer. Tokens are counted once per layer. `on_their_way` counts changed
    slots whose experts were loading; these changes depend on timing.
    """

    @property
    def changed(self) -> int:
        """Slots that computed another result than the router's choice."""
        return self.substituted + self.dropped + self.ghosts

    def __str__(self) -> str:
        """Returns a sentence with all counts."""
        by_ghosts = f", {self.ghosts} computed by ghosts" if self.ghosts else ""
        late = f", {self.on_their_way} of them while their experts were being read" if self.on_their_way else ""
        return f"{self.substituted} expert slots substituted, {self.dropped} dropped{by_ghosts}{late}"


class SpeculationStats(Counts, struct="pyorch_speculation_counts"):
    """Counts of layers that executed a forecast in place of their router's choice. Tokens count once per layer."""


@dataclass(frozen=True)
class Residency:
    """Flags of the experts of a layer, each bool[n_expert]."""

    resident: np.ndarray
    loading: np.ndarray
    pinned: np.ndarray
    in_use: np.ndarray
    on_device: np.ndarray


@dataclass(frozen=True)
class Snapshot:
    """All layers at one moment, in the order of il.

    Attributes:
        flags: uint8[n_layers, n_expert] of PYORCH_RESIDENT 1, PYORCH_LOADING 2, PYORCH_PINNED 4, PYORCH_IN_USE 8 and
            PYORCH_ON_DEVICE 16. Rows of layers with fewer experts end with zeros.
        uses: uint64[n_layers, n_expert], how often each expert was used. Filled up with zeros too.
        layers: Statistics by layer.
        stats: Statistics of all layers.
    """

    flags: np.ndarray
    uses: np.ndarray
    layers: list[Stats]
    stats: Stats


class RemoteStats(Counts, struct="pyorch_remote_counts"):
    """Counts of other servers' computing for this one since its engine was made: fields of pyorch_remote_counts."""


@dataclass(frozen=True)
class Served:
    """Counts of computing for other servers since the engine listens: fields of pyorch_served.

    Attributes:
        slots: Rows times experts.
        error: Why a connection was last refused. "": none was.
        buffer_bytes: Memory in addition to the budget, for computing, requests and answers.
    """

    connections: int
    refused: int
    requests: int
    failed: int
    slots: int
    compute_ns: int
    error: str
    buffer_bytes: int


@dataclass(frozen=True)
class Peer:
    """Another server, as seen from this one: fields of pyorch_peer_info.

    Attributes:
        same_kernels: Its results are the same, bit for bit.
        error: Why it was last lost, or failed. "": never.
    """

    joined: bool
    same_kernels: bool
    requests: int
    failed: int
    slots: int
    bytes_sent: int
    bytes_received: int
    times_lost: int
    error: str


def read(cls: type[T], raw) -> T:
    """Makes a dataclass of the C struct's fields of the same names: numbers, and text in arrays of char."""

    def value(name: str, kind: Any) -> Any:
        found = getattr(raw, name)
        return string(found) if isinstance(found, ffi.CData) else bool(found) if kind == "bool" else found

    return cls(**{field.name: value(field.name, field.type) for field in fields(cls)})  # type: ignore[arg-type]
