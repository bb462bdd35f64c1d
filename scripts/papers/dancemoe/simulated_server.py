"""Simulates a server: a device, a network port and a disk, each with one job at a time.

Servers may share the cores of a machine; they then have no devices.
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

# The share of a port or disk that migration uses. Two streams through one port get half of it each.
MIGRATION_SHARE = 0.5


@dataclass(frozen=True)
class Traffic:
    """The requests of a server.

    Attributes:
        times: float64[n], arrival times in seconds, ascending.
        source: The experts of the requests.
        later: The requests from `shift` on.
        shift: Time of the change, in seconds.
    """

    times: np.ndarray
    source: Source
    later: Source | None = None
    shift: float = math.inf


class Station:
    """A device, port or disk. It serves jobs in order of arrival, so the end of its last job is its whole state.

    `slice` is the slice in seconds of a disk under a quota; 0 means no quota. After a pause such a disk reads a slice's
    bytes at once, waits for the end of the slice, and so on.
    """

    __slots__ = ("begun_at", "busy", "free_at", "moving_until", "slice")

    def __init__(self, slice: float = 0.0) -> None:
        self.slice = slice
        self.free_at = self.busy = self.begun_at = 0.0
        self.moving_until = 0.0  # migration takes its share until then

    def serve(self, now: float, seconds: float) -> float:
        """Serves a job that arrives now; returns the time of its end."""
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
    """The cores of a machine. All jobs that compute at the same time get equal shares, each at most one core.

    The scheduler of a kernel shares cores in the same way. A clock runs at the speed of each job. A job ends when the
    clock has advanced by the job's seconds.
    """

    def __init__(self, env: simpy.Environment, n: float) -> None:
        self._env, self._n = env, n
        self._clock, self._set_at = 0.0, 0.0
        self._jobs: list[tuple[float, int, simpy.Event]] = []  # a heap, by the clock's value at the end of the job
        self._order = itertools.count()
        self._alarm: simpy.Event | None = None  # the end of the next job; alarms set before it are void

    def compute(self, seconds: float) -> simpy.Event:
        """Starts a job of one thread now. The returned event happens at the job's end."""
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
            return  # a job arrived after this alarm was set
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
    """The answers that a layer waits for.

    Attributes:
        n_missing: Answers with an unknown arrival.
        known: The event at which all arrivals are known.
        arrival: The last arrival.
        end: When the port has received all answers, and the device has computed all experts read from the disk.
    """

    n_missing: int
    known: simpy.Event
    arrival: float = 0.0
    end: float = 0.0


@dataclass
class Server:
    """The state of a server.

    If the server shares the cores of a machine, `cores` are these cores. `asked` then holds the jobs of its thread for
    peers: seconds, and the arguments of the simulation's _answer(). `device` is then only an estimate for asking peers.
    """

    traffic: Traffic
    cores: Cores | None = None
    asked: deque[tuple[float, tuple]] = field(default_factory=deque)
    device: Station = field(default_factory=Station)
    port_out: Station = field(default_factory=Station)
    port_in: Station = field(default_factory=Station)
    disk: Station = field(default_factory=Station)
    answers: list[tuple[float, int, float, Answers]] = field(default_factory=list)  # on the way: a heap, by arrival
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    woken: simpy.Event | None = None
