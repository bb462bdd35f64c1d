"""A server in simulated time: a device, a port of its network and a disk, each of which does one thing at a time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pyorch.cluster.workload import Source

if TYPE_CHECKING:
    import simpy

# Of a port or disk, for experts that move. Two streams through one port get half of it each.
MIGRATION_SHARE = 0.5


@dataclass(frozen=True)
class Traffic:
    """The requests of a server: when they arrive, float64[n], ascending, and their experts. shift: seconds, from when
    on requests are those of `later`."""

    times: np.ndarray
    source: Source
    later: Source | None = None
    shift: float = math.inf


class Station:
    """A device, port or disk. Of jobs first come, first served, it is enough to know when the last of them ends."""

    __slots__ = ("free_at", "busy", "moving_until")

    def __init__(self) -> None:
        self.free_at = self.busy = 0.0
        self.moving_until = 0.0  # experts take their share until then

    def serve(self, now: float, seconds: float) -> float:
        """A job that comes now; returns when it ends."""
        if now < self.moving_until:
            seconds /= 1 - MIGRATION_SHARE
        self.free_at = (now if now > self.free_at else self.free_at) + seconds
        self.busy += seconds
        return self.free_at


@dataclass
class Request:
    server: int
    arrival: float
    experts: np.ndarray
    n_prompt: int
    n_done: int = 0
    begin: float = math.nan
    first: float = math.nan
    end: float = math.nan


@dataclass(slots=True)
class Answers:
    """Those that a layer waits for. known: when of all of them is known when they arrive; arrival: of the last one;
    end: when the port has taken them, or the device computed what was read."""

    n_missing: int
    known: simpy.Event
    arrival: float = 0.0
    end: float = 0.0


@dataclass
class Server:
    traffic: Traffic
    device: Station = field(default_factory=Station)
    port_out: Station = field(default_factory=Station)
    port_in: Station = field(default_factory=Station)
    disk: Station = field(default_factory=Station)
    answers: list[tuple[float, int, float, Answers]] = field(default_factory=list)  # under way: a heap, by arrival
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    woken: simpy.Event | None = None
