"""What an engine counts, and what it has at the moment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pyorch.library.bindings import ffi, numbers, string
from pyorch.sizes import format_bytes

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


def ratio(a: float, b: float) -> float:
    """nan where there is nothing to divide by."""
    return a / b if b else float("nan")


def is_of_layers(part: str) -> bool:
    """Whether the numbers of a part of a struct of pyorch.h are those of a single layer too."""
    return part.endswith("of each layer too")


class Counts:
    """The numbers of a C struct, of which the header says what they are: frozen dataclasses of its fields."""

    def __init_subclass__(cls, struct: str) -> None:
        cls.__annotations__ = {number.name: int for number in numbers(struct)}
        dataclass(frozen=True)(cls)

    if TYPE_CHECKING:
        def __init__(self, **values: int) -> None: ...
        def __getattr__(self, name: str) -> int: ...


class Stats(Counts, struct="pyorch_stats"):
    """Counters since the start or the last reset, and gauges. Of a single layer, what the header counts of layers."""

    @property
    def hit_rate(self) -> float:
        """Share of the uses of experts that found the expert resident; nan without any."""
        return ratio(self.hits, self.hits + self.misses)

    @property
    def device_hit_rate(self) -> float:
        """Share of the uses of experts that found the expert in the memory of the device; nan without any."""
        return ratio(self.device_hits, self.device_hits + self.device_misses)

    @property
    def device_computed_share(self) -> float:
        """Share of the uses of experts that the device computed, the processor the others; nan without any."""
        return ratio(self.device_computed, self.device_hits + self.device_misses)

    @property
    def device_ahead_precision(self) -> float:
        """Share of the experts that forecasts ordered to the device that their layers used; nan without any."""
        return ratio(self.device_ahead_hits, self.device_ahead)

    @property
    def in_memory(self) -> str:
        """For people, how often experts were found in host memory, which is asked for what a device does not have."""
        rate = f"{self.hit_rate:.1%}" if self.hits + self.misses else "-"
        return f"hit rate {rate} of what the device lacks" if self.device_budget_bytes else f"hit rate {rate}"

    @property
    def on_device(self) -> str:
        """For people, what the device has and did; "" without one."""
        if not self.device_budget_bytes:
            return ""
        rate = f"{self.device_hit_rate:.1%}" if self.device_hits + self.device_misses else "-"
        ahead = f" ({self.device_ahead_hits} of {self.device_ahead} forecasts right)" if self.device_ahead else ""
        computed = f", {self.device_computed_share:.1%} computed there" if self.device_hits + self.device_misses else ""
        return (f"hit rate {rate}{ahead}{computed}, {format_bytes(self.device_bytes)} uploaded; "
                f"{format_bytes(self.device_used_bytes)} of its memory used")

    @property
    def unused_loads(self) -> int:
        """Experts that were read ahead and not used. What was read before counting began makes it too small."""
        return max(0, self.prefetch_loads - self.prefetch_hits)

    @property
    def useful_share(self) -> float:
        """Of the experts read, those that were not read ahead in vain; nan without any."""
        return 1 - ratio(self.unused_loads, self.loads)


class SubstitutionStats(Counts, struct="pyorch_substitution_counts"):
    """What substitution did in the ubatches that it may touch.

    A slot is one of the experts of a token in a layer; tokens are counted once for each layer. on_their_way: changed
    slots whose experts were being read, so that it depends on the time that things take which slots were changed.
    """

    @property
    def changed(self) -> int:
        """Slots in which something else was computed than the router chose."""
        return self.substituted + self.dropped + self.ghosts

    def __str__(self) -> str:
        """For people."""
        by_ghosts = f", {self.ghosts} computed by ghosts" if self.ghosts else ""
        late = f", {self.on_their_way} of them while their experts were being read" if self.on_their_way else ""
        return f"{self.substituted} expert slots substituted, {self.dropped} dropped{by_ghosts}{late}"


class SpeculationStats(Counts, struct="pyorch_speculation_counts"):
    """What layers executed in place of their routers' choice. tokens: counted once for each layer."""


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
    """All layers at one moment. Layers are in the order of il.

    flags: uint8[n_layers, n_expert] of PYORCH_RESIDENT 1, PYORCH_LOADING 2, PYORCH_PINNED 4, PYORCH_IN_USE 8 and
    PYORCH_ON_DEVICE 16. uses: uint64[n_layers, n_expert], how often each expert was used. Rows of layers with fewer
    experts end with zeros.
    """

    flags: np.ndarray
    uses: np.ndarray
    layers: list[Stats]
    stats: Stats


class RemoteStats(Counts, struct="pyorch_remote_counts"):
    """What other servers computed for this one, since its engine was made."""


@dataclass(frozen=True)
class Served:
    """What was computed for others since the engine listens. The names are those of pyorch_served.

    slots: rows times experts. error: why somebody was refused last, "" if nobody was. buffer_bytes: of memory beside
    the budget, in which it is computed, and for requests and answers.
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
    """Another server, as this one sees it. The names are those of pyorch_peer_info.

    same_kernels: what it computes is the same, bit for bit. error: why it was lost or failed last, "" if never.
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
    """A dataclass whose fields are those of a C struct: numbers, and text in arrays of char."""

    def value(name: str, kind: Any) -> Any:
        found = getattr(raw, name)
        return string(found) if isinstance(found, ffi.CData) else bool(found) if kind == "bool" else found

    return cls(**{field.name: value(field.name, field.type) for field in fields(cls)})  # type: ignore[arg-type]
