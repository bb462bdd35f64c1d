"""A cluster in simulated time: requests, batches, messages between servers, and experts that move.

Every server has a device, a port of its network, and a disk. Each does one thing at a time, first come, first served.
Requests of a server's users wait until one of its places is free. Those that have one run together, a step at a time:
a token of each that decodes, and tokens of prompts up to the limit of a step. In each layer of a step

1. the device computes the dense part; then the router has chosen;
2. rows for experts that the server has not leave in one message for each peer. Of the servers that have an expert the
   one is asked that is estimated to answer first, by its link and by what waits for its device; the expert is read from
   the own disk where that is estimated to be faster, or where nobody has it;
3. the device goes on with the experts that the server has. It computes for peers while its own step waits for answers;
4. when all answers are there, the next layer begins.

An event is a message, an expert read, or a layer: what a layer's experts take is summed up before. Every so often the
scheduler places the experts anew, for what was used lately; if that pays (pyorch.cluster.migration), experts move while
requests run, over a share of the ports and disks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyorch.cluster.costs import Costs
from pyorch.cluster.migration import DISK, Decision, Load, Migration, Sharing, decide
from pyorch.cluster.workload import Source
from pyorch.errors import PyorchError

try:
    import simpy
except ImportError:
    raise PyorchError('the simulator needs simpy: pip install "pyorch[cluster]"') from None

# Of a port or disk, for experts that move. Two streams through one port get half of it each.
MIGRATION_SHARE = 0.5

# What was used in the interval before counts half as much as what was used in the last one.
FADING = 0.5


@dataclass(frozen=True)
class Settings:
    """n_places: requests of a server that run together. n_step: tokens of a step, at most. interval: seconds between
    two looks of the scheduler. n_bins: of the time in which requests arrive, for what is reported over time."""

    n_places: int = 4
    n_step: int = 512
    interval: float = 300.0
    n_bins: int = 40


@dataclass(frozen=True)
class Traffic:
    """The requests of a server: when they arrive, float64[n], ascending, and their experts. shift: seconds, from when
    on requests are those of `later`."""

    times: np.ndarray
    source: Source
    later: Source | None = None
    shift: float = math.inf


@dataclass(frozen=True)
class Change:
    """What the scheduler decided at a time. finished: when the last expert had moved, nan while it has not."""

    time: float
    decision: Decision
    finished: float


@dataclass(frozen=True)
class Outcome:
    """Of a simulation, in seconds.

    server, arrival, begin, first, end: of each request, in order of arrival: when it got a place, its first token and
    its last. bins: float64[n_bins + 1], edges. local, uses: float64[n_servers, n_bins], rows that a server computed
    itself, and all, by when their step began; those after the last edge count in the last bin. busy:
    float64[n_servers], that a device computed. n_messages: asked of peers; n_bytes: there and back; n_read: experts
    read from disks, but for those that move. duration: until the last request ended.
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
    """Runs until all requests have ended.

    Args:
        resident: bool[n_servers, n_layers, n_expert], the placement in the beginning.
        duration: seconds in which requests arrive.
        replace: gives the placement for uses, float64 of that shape, in an interval; None: experts stay where they are.
        seed: of requests that are drawn. The same arguments give the same outcome.

    Raises PyorchError where an expert is needed that is on no server and on no disk.
    """
    return _Simulation(costs, resident.copy(), traffic, duration, settings, replace, seed).run()


class _Station:
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
class _Request:
    server: int
    arrival: float
    experts: np.ndarray
    n_prompt: int
    n_done: int = 0
    begin: float = math.nan
    first: float = math.nan
    end: float = math.nan


@dataclass(slots=True)
class _Layer:
    """Of a step. local: seconds of the device, for experts that it has. calls: of each peer asked, its number, seconds
    of its device, and of ports there and back. reads: seconds of the disk and then of the device, of each expert."""

    local: float
    calls: list[tuple[int, float, float, float]]
    reads: list[tuple[float, float]]


@dataclass(slots=True)
class _Answers:
    """Those that a layer waits for. known: when of all of them is known when they arrive; arrival: of the last one;
    end: when the port has taken them, or the device computed what was read."""

    n_missing: int
    known: simpy.Event
    arrival: float = 0.0
    end: float = 0.0


@dataclass
class _Server:
    traffic: Traffic
    device: _Station = field(default_factory=_Station)
    port_out: _Station = field(default_factory=_Station)
    port_in: _Station = field(default_factory=_Station)
    disk: _Station = field(default_factory=_Station)
    answers: list[tuple[float, int, float, _Answers]] = field(default_factory=list)  # under way: a heap, by arrival
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    woken: simpy.Event | None = None


class _Simulation:
    def __init__(
        self, costs: Costs, resident: np.ndarray, traffic: Sequence[Traffic], duration: float, settings: Settings,
        replace: Callable[[np.ndarray], np.ndarray] | None, seed: int,
    ) -> None:
        self._env = simpy.Environment()
        self._costs, self._settings, self._replace, self._seed = costs, settings, replace, seed
        n_servers, n_layers, n_expert = resident.shape
        self._n_layers, self._n_expert = n_layers, n_expert
        self._resident = resident
        self._held = resident.reshape(n_servers, -1)  # the same memory
        self._cells = n_expert * np.arange(n_layers)[:, None]
        self._servers = [_Server(each) for each in traffic]
        self._requests: list[_Request] = []
        self._n_left = sum(len(each.times) for each in traffic)
        self._all_ended = self._env.event()
        self._bin_seconds = duration / settings.n_bins
        self._local, self._all = np.zeros((2, n_servers, settings.n_bins))
        self._recent = np.zeros(self._held.shape)  # uses since the scheduler looked
        self._order = itertools.count()
        self._n_messages, self._n_bytes, self._n_read = 0, 0.0, 0
        self._n_called_rows = self._n_called_experts = self._n_called_inputs = 0
        self._latency, self._rate = costs.latency.tolist(), costs.bytes_per_second.tolist()
        there, back = 1 / costs.bytes_per_second, 1 / costs.bytes_per_second.T
        np.fill_diagonal(there, 0)
        np.fill_diagonal(back, 0)
        # Of a message from [one] to [other] and back: what it takes at least, and each row more.
        self._message_seconds = (costs.latency + costs.latency.T + costs.message + costs.expert
                                 + costs.message_bytes * (there + back))
        np.fill_diagonal(self._message_seconds, np.inf)
        self._there = there
        # Of equals the next in a circle, which begins elsewhere for each expert: so they are not all asked of one.
        self._turns = 1e-12 * (np.subtract.outer(np.arange(n_servers), np.arange(n_servers)) % n_servers)
        self._row_seconds = costs.request_bytes * there + costs.reply_bytes * back + costs.row
        self._read_seconds = np.repeat(costs.disk_seconds, n_expert, axis=1)
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
            busy=np.array([server.device.busy for server in self._servers]), n_messages=self._n_messages,
            n_bytes=self._n_bytes, n_read=self._n_read, duration=self._env.now, changes=tuple(self._changes),
        )

    # Requests

    def _arrive(self, n: int) -> Iterator[simpy.Event]:
        env, server = self._env, self._servers[n]
        traffic = server.traffic
        for i, time in enumerate(traffic.times.tolist()):
            yield env.timeout(max(0.0, time - env.now))
            source = traffic.later if traffic.later is not None and time >= traffic.shift else traffic.source
            experts, n_output = source.request(np.random.default_rng((self._seed, n, i)), i)
            request = _Request(n, time, experts, len(experts) - n_output)
            self._requests.append(request)
            server.waiting.append(request)
            if server.woken is not None:
                server.woken.succeed()
                server.woken = None

    def _serve(self, n: int) -> Iterator[simpy.Event]:
        env, server = self._env, self._servers[n]
        device, step_seconds = server.device, float(self._costs.step[n])
        while True:
            while server.waiting and len(server.running) < self._settings.n_places:
                server.running.append(server.waiting.popleft())
                server.running[-1].begin = env.now
            if not server.running:
                server.woken = env.event()
                yield server.woken
                continue
            parts = self._next_step(server)
            dense, layers = self._layers(n, [request.experts[begin:end] for request, begin, end in parts])
            for layer in layers:
                begin = max(env.now, device.free_at)
                end = device.serve(env.now, dense + layer.local)
                if layer.calls or layer.reads:
                    answers = _Answers(len(layer.calls) + len(layer.reads), env.event())
                    self._ask(n, begin + dense, layer, answers)
                    yield answers.known
                    if answers.arrival > env.now:
                        yield env.timeout(answers.arrival - env.now)
                    self._take_answers(server, max(env.now, answers.arrival))
                    end = max(end, answers.end)
                if end > env.now:
                    yield env.timeout(end - env.now)
            yield env.timeout(device.serve(env.now, step_seconds) - env.now)
            self._end_step(server, parts)

    def _next_step(self, server: _Server) -> list[tuple[_Request, int, int]]:
        """Requests with the first token of theirs that is computed, and the one behind the last."""
        left = self._settings.n_step
        parts = []
        for prompts in (False, True):
            for request in server.running:
                if (request.n_done < request.n_prompt) == prompts and left:
                    n = min(left, request.n_prompt - request.n_done) if prompts else 1
                    parts.append((request, request.n_done, request.n_done + n))
                    left -= n
        return parts

    def _end_step(self, server: _Server, parts: list[tuple[_Request, int, int]]) -> None:
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

    # Layers

    def _layers(self, n: int, experts: list[np.ndarray]) -> tuple[float, list[_Layer]]:
        """What a step takes: seconds of the dense part of a layer, and the rest of each. experts: [n_tokens, n_layers,
        k], in parts."""
        costs, n_layers = self._costs, self._n_layers
        chosen = experts[0] if len(experts) == 1 else np.concatenate(experts)
        cells = chosen + self._cells
        rows = np.bincount(cells.ravel(), minlength=self._held.shape[1])
        used = np.flatnonzero(rows)
        rows = rows[used]
        here = self._held[n, used]
        layer = used // self._n_expert
        seconds = costs.expert[n] + costs.row[n] * rows
        local = np.bincount(layer[here], seconds[here], n_layers).tolist()
        self._recent[n, used] += rows
        n_bin = min(int(self._env.now / self._bin_seconds), self._settings.n_bins - 1)
        self._local[n, n_bin] += rows[here].sum()
        self._all[n, n_bin] += rows.sum()
        dense = float(costs.layer[n] + costs.token[n] * len(chosen))
        away = np.flatnonzero(~here)
        layers = [_Layer(seconds, [], []) for seconds in local]
        if len(away):
            self._send_away(n, layers, cells, used[away], layer[away], rows[away])
        return dense, layers

    def _send_away(
        self, n: int, layers: list[_Layer], cells: np.ndarray, used: np.ndarray, layer: np.ndarray, rows: np.ndarray
    ) -> None:
        """Appends to calls and reads of the layers what they are for experts that the server has not.

        cells: [n_tokens, n_layers, k], experts of the tokens, counted over all layers. used: those of them that the
        server has not; layer, rows: of each.
        """
        costs, now = self._costs, self._env.now
        servers = self._servers
        n_servers = len(servers)
        waits = np.array([server.device.free_at for server in servers])
        waits = np.maximum(waits - now, 0) + self._message_seconds[n]
        estimates = self._turns.take((n + 1 + used) % n_servers, axis=1)
        estimates += waits[:, None]
        estimates += self._row_seconds[n][:, None] * rows
        estimates[np.logical_not(self._held.take(used, axis=1))] = np.inf
        peer = np.argmin(estimates, axis=0)
        asked = estimates[peer, np.arange(len(used))]
        own = costs.expert[n] + costs.row[n] * rows
        read = max(0.0, servers[n].disk.free_at - now) + self._read_seconds[n, used] + own
        from_disk = read < asked
        if not np.isfinite(np.minimum(read, asked)).all():
            raise PyorchError("an expert is needed that no server has, and no disk: give the servers more memory, or "
                              "a disk with --cost disk_bytes_per_second=1e9")
        for i in np.flatnonzero(from_disk).tolist():
            layers[layer[i]].reads.append((float(self._read_seconds[n, used[i]]), float(own[i])))
        self._n_read += int(from_disk.sum())
        used, layer, peer, rows = used[~from_disk], layer[~from_disk], peer[~from_disk], rows[~from_disk]
        if not len(layer):
            return
        message, message_of = np.unique(layer * n_servers + peer, return_inverse=True)
        n_rows = np.bincount(message_of, rows)
        n_experts = np.bincount(message_of)
        n_inputs = self._inputs(cells, used, peer, message)
        peer = message % n_servers
        seconds = costs.message[peer] + costs.expert[peer] * n_experts + costs.row[peer] * n_rows
        there = costs.message_bytes + costs.request_bytes * n_inputs
        back = costs.message_bytes + costs.reply_bytes * n_rows
        columns = (peer, seconds, there * self._there[n, peer], back * self._there[peer, n])
        for i, call in zip((message // n_servers).tolist(), zip(*(column.tolist() for column in columns))):
            layers[i].calls.append(call)
        self._n_messages += len(message)
        self._n_bytes += float(there.sum() + back.sum())
        self._n_called_rows += int(rows.sum())
        self._n_called_inputs += int(n_inputs.sum())
        self._n_called_experts += len(rows)

    def _inputs(self, cells: np.ndarray, used: np.ndarray, peer: np.ndarray, message: np.ndarray) -> np.ndarray:
        """Tokens whose input is in each message: once, however many of the peer's experts compute with it.

        used, peer: experts and who is asked for each. message: number of layer and peer of each, ascending.
        """
        n_servers, n_layers = len(self._servers), self._n_layers
        peer_of = np.full(self._held.shape[1], DISK)
        peer_of[used] = peer
        asked = peer_of[cells]
        token, layer, place = np.nonzero(asked != DISK)
        inputs = np.unique((token * n_layers + layer) * n_servers + asked[token, layer, place])
        return np.bincount(np.searchsorted(message, inputs % (n_layers * n_servers)), minlength=len(message))

    def _ask(self, n: int, ready: float, layer: _Layer, answers: _Answers) -> None:
        """Messages leave, and reads begin, when the router has chosen."""
        now, server = self._env.now, self._servers[n]
        for peer, seconds, there, back in layer.calls:
            arrival = server.port_out.serve(ready, there) + self._latency[n][peer]
            self._at(arrival - now, self._asked, (n, peer, seconds, there, back, answers))
        for seconds, computing in layer.reads:
            self._at(server.disk.serve(ready, seconds) - now, self._read, (n, computing, answers))

    def _asked(self, event: simpy.Event) -> None:
        """The last byte of a message is at the peer, if its port had nothing else to take."""
        n, peer, seconds, there, back, answers = event.value
        now, server = self._env.now, self._servers[peer]
        self._take_answers(server, now)
        # The port took these bytes as they came: at the earliest it can have begun when it was free.
        received = max(now, server.port_in.serve(now - there, there))
        sent = server.port_out.serve(server.device.serve(received, seconds), back)
        arrival = sent + self._latency[peer][n]
        heapq.heappush(self._servers[n].answers, (arrival, next(self._order), back, answers))
        answers.arrival = max(answers.arrival, arrival)
        self._one_less(answers)

    def _take_answers(self, server: _Server, until: float) -> None:
        """The port takes what has arrived, before anybody looks at the port: so all comes in order of arrival."""
        under_way = server.answers
        while under_way and under_way[0][0] <= until:
            arrival, _, seconds, answers = heapq.heappop(under_way)
            answers.end = max(answers.end, arrival, server.port_in.serve(arrival - seconds, seconds))

    def _read(self, event: simpy.Event) -> None:
        n, seconds, answers = event.value
        answers.end = max(answers.end, self._servers[n].device.serve(self._env.now, seconds))
        self._one_less(answers)

    def _one_less(self, answers: _Answers) -> None:
        answers.n_missing -= 1
        if not answers.n_missing:
            answers.known.succeed()

    def _at(self, delay: float, call: Callable[[simpy.Event], None], value: tuple) -> None:
        self._env.timeout(max(0.0, delay), value).callbacks.append(call)

    # Placement

    def _schedule(self) -> Iterator[simpy.Event]:
        env, interval = self._env, self._settings.interval
        uses, weight = np.zeros(self._resident.shape), 0.0
        while True:
            yield env.timeout(interval)
            uses = FADING * uses + self._recent.reshape(uses.shape)
            weight = FADING * weight + 1
            self._recent[:] = 0
            if self._migration is not None and not self._migration.done:
                continue
            expected = uses / weight
            candidate = self._replace(expected)
            decision = decide(self._resident, candidate, expected, self._costs, self._sharing)
            self._changes.append(Change(env.now, decision, math.nan))
            if decision.adopt:
                self._migration = Migration(self._resident, candidate, expected, self._costs)
                for n in range(len(self._servers)):
                    self._load_next(n)

    @property
    def _sharing(self) -> Sharing:
        rows = self._n_called_rows
        if not rows:
            return Sharing()
        return Sharing(rows / self._n_messages, rows / self._n_called_experts, rows / self._n_called_inputs)

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
