"""A server in simulated time: a device, a port of its network and a disk, each of which does one thing at a time.

Servers may share the cores of one machine in place of a device each.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from scripts.papers.dancemoe.workload import Source

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
    """A device, port or disk. Of jobs first come, first served, it is enough to know when the last of them ends.

    slice: of a disk under a quota: after a pause it does at once what the quota allows in so many seconds, then waits
    for their end, and so on; 0: it has none.
    """

    __slots__ = ("begun_at", "busy", "free_at", "moving_until", "slice")

    def __init__(self, slice: float = 0.0) -> None:
        self.slice = slice
        self.free_at = self.busy = self.begun_at = 0.0
        self.moving_until = 0.0  # experts take their share until then

    def serve(self, now: float, seconds: float) -> float:
        """A job that comes now; returns when it ends."""
        if now < self.moving_until:
            seconds /= 1 - MIGRATION_SHARE
        if now >= self.free_at:
            self.begun_at = self.free_at = now
        self.free_at += seconds
        self.busy += seconds
        if self.slice:
            return max(now, self.begun_at + math.floor((self.free_at - self.begun_at) / self.slice) * self.slice)
        return self.free_at


class Cores:
    """Of a machine: all jobs that its servers compute at a time get alike much of them, each one core at most.

    So does the scheduler of a kernel. A clock goes as fast as each job gets on; a job ends when it shows what it showed
    in the beginning and the job's seconds more.
    """

    def __init__(self, env: simpy.Environment, n: float) -> None:
        self._env, self._n = env, n
        self._clock, self._set_at = 0.0, 0.0
        self._jobs: list[tuple[float, int, simpy.Event]] = []  # a heap, by when the clock has to show what
        self._order = itertools.count()
        self._alarm: simpy.Event | None = None  # the one that counts: when the first of them ends

    def compute(self, seconds: float) -> simpy.Event:
        """A job of one thread that comes now; it has ended when that happens."""
        self._set()
        done = self._env.event()
        heapq.heappush(self._jobs, (self._clock + seconds, next(self._order), done))
        self._set_alarm()
        return done

    @property
    def _speed(self) -> float:
        return min(1.0, self._n / len(self._jobs))

    def _set(self) -> None:
        if self._jobs:
            self._clock += (self._env.now - self._set_at) * self._speed
        self._set_at = self._env.now

    def _set_alarm(self) -> None:
        self._alarm = self._env.timeout(max(0.0, self._jobs[0][0] - self._clock) / self._speed)
        self._alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return  # more jobs came after it was set
        self._set()
        self._clock = max(self._clock, self._jobs[0][0])
        while self._jobs and self._jobs[0][0] <= self._clock:
            heapq.heappop(self._jobs)[2].succeed()
        if self._jobs:
            self._set_alarm()


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
    """cores: of its machine, if it shares them with others. Then asked is what its thread for other servers has to
    compute: seconds, and what _answer() of the simulation takes; and device is only an estimate for who asks.
    """

    traffic: Traffic
    cores: Cores | None = None
    asked: deque[tuple[float, tuple]] = field(default_factory=deque)
    device: Station = field(default_factory=Station)
    port_out: Station = field(default_factory=Station)
    port_in: Station = field(default_factory=Station)
    disk: Station = field(default_factory=Station)
    answers: list[tuple[float, int, float, Answers]] = field(default_factory=list)  # under way: a heap, by arrival
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    woken: simpy.Event | None = None
