"""Simulates a cluster: requests, batches, messages between servers, and migration of experts.

Every server has a device, a network port and a disk. Each does one job at a time, in order of arrival. Servers
that share the cores of a machine have no device. Such a server has one thread for its own users and another thread for
its peers; all threads that compute at the same time get equal shares of the cores.

A request waits until its server has a free place. The requests in places run together, step by step. A step computes
one token of each decoding request, and prompt tokens up to the step's limit. In each layer of a step:

1. The device computes the dense part. After it the router's choice is known.
2. For experts that the server does not hold, one message with all rows leaves for each peer. If several servers hold
   an expert, the simulation asks the server with the earliest expected answer, chosen as in a running cluster. It reads
   the expert from the server's own disk if that is estimated to be faster, or if no server holds the expert.
3. The device computes the experts that the server holds. While the step waits for answers, the device computes for
   peers.
4. When all answers have arrived, the next layer begins. As in llama.cpp, the last layer computes experts only for
   tokens with a wanted output: decoded tokens, and the last token of a prompt.

The events of the simulation are messages, expert reads and layers: the times of a layer's experts are added up
beforehand. At a fixed interval the scheduler computes a new placement from recent uses. If it pays
(pyorch.cluster.migration), experts move while requests run, and use a share of the ports and disks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.cluster.costs import Costs
from pyorch.cluster.migration import DISK, Decision, Load, Migration, RecentUses, decide
from pyorch.cluster.replicas import note_answer
from pyorch.errors import PyorchError
from scripts.papers.dancemoe.simulated_costs import Machine
from scripts.papers.dancemoe.simulated_layers import Layer, Layers, Part
from scripts.papers.dancemoe.simulated_server import MIGRATION_SHARE, Answers, Cores, Request, Server, Station, Traffic

try:
    import simpy
except ImportError:
    raise PyorchError('the simulator needs simpy: pip install "pyorch[papers]"') from None


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation.

    Attributes:
        n_places: Requests of a server that run together.
        n_step: The most tokens of a step.
        interval: Seconds between two checks of the scheduler.
        n_bins: Number of bins for results over time. They divide the time in which requests arrive.
        machines: Machines, with numbers of servers. A server on no machine has its own device.
        disk_slice: Slice of a disk's quota in seconds; see Station.
    """

    n_places: int = 4
    n_step: int = 512
    interval: float = 300.0
    n_bins: int = 40
    machines: tuple[Machine, ...] = ()
    disk_slice: float = 0.0


@dataclass(frozen=True)
class Change:
    """A decision of the scheduler. `finished` is the time when the last expert had moved, nan before that."""

    time: float
    decision: Decision
    finished: float


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation. Times are in seconds.

    Attributes:
        server, arrival: Of each request, in order of arrival.
        begin: When each request got a place.
        first, end: When each request had its first and its last token.
        bins: float64[n_bins + 1], edges of the bins.
        local: float64[n_servers, n_bins], rows that a server computed itself. A row belongs to the bin in which its
            step began; rows after the last edge belong to the last bin.
        uses: All rows, in the same shape.
        busy: float64[n_servers], computing time of each device. Without a device: the time with one core per thread.
        served: int64[n_servers], rows for peers.
        n_messages: Requests to peers.
        n_bytes: Bytes of the requests and of their answers.
        n_read: Experts read from disks, without migration.
        duration: When the last request ended.
        changes: Decisions of the scheduler.
    """

    server: np.ndarray
    arrival: np.ndarray
    begin: np.ndarray
    first: np.ndarray
    end: np.ndarray
    bins: np.ndarray
    local: np.ndarray
    uses: np.ndarray
    busy: np.ndarray
    served: np.ndarray
    n_messages: int
    n_bytes: float
    n_read: int
    duration: float
    changes: tuple[Change, ...]

    @property
    def latency(self) -> np.ndarray:
        return self.end - self.arrival

    @property
    def local_ratio(self) -> float:
        total = self.uses.sum()
        return float(self.local.sum() / total) if total else math.nan


def simulate(
    costs: Costs, resident: np.ndarray, traffic: Sequence[Traffic], duration: float, settings: Settings = Settings(),
    replace: Callable[[np.ndarray], np.ndarray] | None = None, seed: int = 0,
) -> Outcome:
    """Simulates until all requests have ended.

    Args:
        costs: Costs of computing, messages and reads.
        resident: bool[n_servers, n_layers, n_expert], the first placement.
        traffic: The requests of each server.
        duration: Seconds in which requests arrive.
        settings: Settings of the simulation.
        replace: Returns a new placement for the uses of an interval, float64 in the shape of resident. None: experts
            never move.
        seed: Seed of drawn requests. The same arguments give the same result.

    Raises:
        PyorchError: A needed expert is on no server and on no disk.
    """
    return _Simulation(costs, resident.copy(), traffic, duration, settings, replace, seed).run()


class _Simulation:
    def __init__(
        self, costs: Costs, resident: np.ndarray, traffic: Sequence[Traffic], duration: float, settings: Settings,
        replace: Callable[[np.ndarray], np.ndarray] | None, seed: int,
    ) -> None:
        self._env = simpy.Environment()
        self._costs, self._settings, self._replace, self._seed = costs, settings, replace, seed
        n_servers = len(resident)
        self._resident = resident
        self._servers = [Server(each, disk=Station(settings.disk_slice)) for each in traffic]
        for machine in settings.machines:
            cores = Cores(self._env, machine.cores)
            for n in machine.servers:
                self._servers[n].cores = cores
        self._layers = Layers(costs, resident, self._servers)
        self._requests: list[Request] = []
        self._n_left = sum(len(each.times) for each in traffic)
        self._all_ended = self._env.event()
        self._bin_seconds = duration / settings.n_bins
        self._local, self._all = np.zeros((2, n_servers, settings.n_bins))
        self._order = itertools.count()
        self._latency, self._rate = costs.latency.tolist(), costs.bytes_per_second.tolist()
        self._changes: list[Change] = []
        self._migration: Migration | None = None

    def run(self) -> Outcome:
        for n in range(len(self._servers)):
            self._env.process(self._arrive(n))
            self._env.process(self._serve(n))
        if self._replace is not None:
            self._env.process(self._schedule())
        if self._n_left:
            self._env.run(self._all_ended)
        requests = sorted(self._requests, key=lambda request: (request.arrival, request.server))
        times = {name: np.array([getattr(request, name) for request in requests], np.float64)
                 for name in ("arrival", "begin", "first", "end")}
        n_bins = self._settings.n_bins
        return Outcome(
            server=np.array([request.server for request in requests], np.int64), **times,
            bins=self._bin_seconds * np.arange(n_bins + 1), local=self._local, uses=self._all,
            busy=np.array([server.device.busy for server in self._servers]),
            served=self._layers.served, n_messages=self._layers.n_messages,
            n_bytes=self._layers.n_bytes, n_read=self._layers.n_read, duration=self._env.now,
            changes=tuple(self._changes),
        )

    # Requests

    def _arrive(self, n: int) -> Iterator[simpy.Event]:
        env, server = self._env, self._servers[n]
        traffic = server.traffic
        for i, time in enumerate(traffic.times.tolist()):
            yield env.timeout(max(0.0, time - env.now))
            source = traffic.later if traffic.later is not None and time >= traffic.shift else traffic.source
            experts, n_output = source.request(np.random.default_rng((self._seed, n, i)), i)
            request = Request(n, time, experts, len(experts) - n_output)
            self._requests.append(request)
            server.waiting.append(request)
            if server.woken is not None:
                server.woken.succeed()
                server.woken = None

    def _serve(self, n: int) -> Iterator[simpy.Event]:
        env, server = self._env, self._servers[n]
        step_seconds = float(self._costs.step[n])
        while True:
            while server.waiting and len(server.running) < self._settings.n_places:
                server.running.append(server.waiting.popleft())
                server.running[-1].begin = env.now
            if not server.running:
                server.woken = env.event()
                yield server.woken
                continue
            parts = self._next_step(server)
            dense, layers, n_local, n_all = self._layers.of_step(n, env.now, [
                Part(request.experts[begin:end], end >= request.n_prompt) for request, begin, end in parts])
            n_bin = min(int(env.now / self._bin_seconds), self._settings.n_bins - 1)
            self._local[n, n_bin] += n_local
            self._all[n, n_bin] += n_all
            for layer in layers:
                yield from self._compute_layer(n, dense, layer)
            yield self._compute(server, step_seconds)
            self._end_step(server, parts)

    def _compute_layer(self, n: int, dense: float, layer: Layer) -> Iterator[simpy.Event]:
        env, server = self._env, self._servers[n]
        answers = Answers(len(layer.calls) + len(layer.reads), env.event()) if layer.calls or layer.reads else None
        if server.cores is None:
            chosen = max(env.now, server.device.free_at) + dense
            end = server.device.serve(env.now, dense + layer.local)
            self._ask(n, chosen, layer, answers)
        else:
            yield self._compute(server, dense)
            self._ask(n, env.now, layer, answers)
            yield self._compute(server, layer.local)
            end = env.now
        if answers is not None:
            yield answers.known
            if answers.arrival > env.now:
                yield env.timeout(answers.arrival - env.now)
            self._take_answers(server, max(env.now, answers.arrival))
            end = max(end, answers.end)
        if end > env.now:
            yield env.timeout(end - env.now)

    def _compute(self, server: Server, seconds: float) -> simpy.Event:
        """Starts a job for the server's own users now."""
        now = self._env.now
        if server.cores is None:
            return self._env.timeout(server.device.serve(now, seconds) - now)
        server.device.busy += seconds
        return server.cores.compute(seconds)

    def _next_step(self, server: Server) -> list[tuple[Request, int, int]]:
        """Returns the requests of the next step, each with its first token and the end of its tokens."""
        left = self._settings.n_step
        parts = []
        for prompts in (False, True):
            for request in server.running:
                if (request.n_done < request.n_prompt) == prompts and left:
                    n = min(left, request.n_prompt - request.n_done) if prompts else 1
                    parts.append((request, request.n_done, request.n_done + n))
                    left -= n
        return parts

    def _end_step(self, server: Server, parts: list[tuple[Request, int, int]]) -> None:
        now = self._env.now
        for request, _, end in parts:
            request.n_done = end
            if end == request.n_prompt:
                request.first = now
            if end == len(request.experts):
                request.end = now
                server.running.remove(request)
                self._n_left -= 1
        if not self._n_left and not self._all_ended.triggered:
            self._all_ended.succeed()

    # Messages

    def _ask(self, n: int, ready: float, layer: Layer, answers: Answers | None) -> None:
        """Sends the messages and starts the reads of a layer, once the router has chosen."""
        now, server = self._env.now, self._servers[n]
        for peer, seconds, there, back, rows in layer.calls:
            arrival = server.port_out.serve(ready, there) + self._latency[n][peer]
            self._at(arrival - now, self._asked, (n, peer, seconds, there, back, (ready, rows), answers))
        for seconds, computing in layer.reads:
            self._at(server.disk.serve(ready, seconds) - now, self._read, (n, computing, answers))

    def _asked(self, event: simpy.Event) -> None:
        """Handles a message whose last byte reaches the peer now, or would reach it if the port were free."""
        n, peer, seconds, there, back, question, answers = event.value
        now, server = self._env.now, self._servers[peer]
        self._take_answers(server, now)
        # The port received these bytes while they arrived, but it began no earlier than it was free.
        received = max(now, server.port_in.serve(now - there, there))
        computed = server.device.serve(received, seconds)
        if server.cores is None:
            self._answer(n, peer, computed, back, question, answers)
        else:  # the end of the computation depends on later jobs
            self._at(received - now, self._ask_thread, (server, seconds, (n, peer, back, question, answers)))

    def _ask_thread(self, event: simpy.Event) -> None:
        """Adds a job to the server's thread for peers."""
        server, *job = event.value
        server.asked.append(job)
        if len(server.asked) == 1:
            self._next_job(server)

    def _next_job(self, server: Server) -> None:
        def computed(_: simpy.Event) -> None:
            _, (n, peer, back, question, answers) = server.asked.popleft()
            self._answer(n, peer, self._env.now, back, question, answers)
            if server.asked:
                self._next_job(server)

        server.cores.compute(server.asked[0][0]).callbacks.append(computed)

    def _answer(
        self, n: int, peer: int, computed: float, back: float, question: tuple[float, float], answers: Answers
    ) -> None:
        """Sends the peer's answer once it is computed. `question`: when it was asked, and the number of rows."""
        sent = self._servers[peer].port_out.serve(computed, back)
        arrival = sent + self._latency[peer][n]
        heapq.heappush(self._servers[n].answers, (arrival, next(self._order), back, answers))
        answers.arrival = max(answers.arrival, arrival)
        note_answer(self._layers.paces[n], peer, question[1], arrival - question[0])
        self._one_less(answers)

    def _take_answers(self, server: Server, until: float) -> None:
        """Lets the port receive the answers that arrived until then, in order of arrival.

        Call it before any use of the port, because the port serves in order of arrival.
        """
        under_way = server.answers
        while under_way and under_way[0][0] <= until:
            arrival, _, seconds, answers = heapq.heappop(under_way)
            answers.end = max(answers.end, arrival, server.port_in.serve(arrival - seconds, seconds))

    def _read(self, event: simpy.Event) -> None:
        n, seconds, answers = event.value
        server = self._servers[n]
        if server.cores is None:
            answers.end = max(answers.end, server.device.serve(self._env.now, seconds))
            self._one_less(answers)
        else:
            self._compute(server, seconds).callbacks.append(lambda _: self._one_less(answers))

    def _one_less(self, answers: Answers) -> None:
        answers.n_missing -= 1
        if not answers.n_missing:
            answers.known.succeed()

    def _at(self, delay: float, call: Callable[[simpy.Event], None], value: tuple) -> None:
        self._env.timeout(max(0.0, delay), value).callbacks.append(call)

    # Placement

    def _schedule(self) -> Iterator[simpy.Event]:
        env, interval = self._env, self._settings.interval
        recent = RecentUses(self._resident.shape, interval)
        while True:
            yield env.timeout(interval)
            recent.add(self._layers.recent, interval)
            self._layers.recent[:] = 0
            if self._migration is not None and not self._migration.done:
                continue
            expected = recent.expected
            candidate = self._replace(expected)
            decision = decide(self._resident, candidate, expected, self._costs, self._layers.sharing)
            self._changes.append(Change(env.now, decision, math.nan))
            if decision.adopt:
                self._migration = Migration(self._resident, candidate, expected, self._costs)
                for n in range(len(self._servers)):
                    self._load_next(n)

    def _load_next(self, n: int) -> None:
        load = self._migration.next_load(n)
        if load is None:
            return
        now, costs = self._env.now, self._costs
        if load.source == DISK:
            stations, seconds = [self._servers[n].disk], float(costs.disk_seconds[n, load.layer])
        else:
            stations = [self._servers[load.source].port_out, self._servers[n].port_in]
            seconds = self._latency[load.source][n] + costs.expert_bytes[load.layer] / self._rate[load.source][n]
        begin = max(now, *(station.moving_until for station in stations))
        end = begin + seconds / MIGRATION_SHARE
        for station in stations:
            station.moving_until = end
        self._at(end - now, self._loaded, (load,))

    def _loaded(self, event: simpy.Event) -> None:
        load: Load = event.value[0]
        waiting = self._migration.finish(load)
        for n in (load.server, *waiting):
            self._load_next(n)
        if self._migration.done:
            last = self._changes[-1]
            self._changes[-1] = Change(last.time, last.decision, self._env.now)
