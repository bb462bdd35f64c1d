"""Whether another placement of the experts pays, and how experts move to it.

The rule is DanceMoE's eq. 4: a placement P' is adopted when C(P') + T_mig < C(P), all in seconds.

- C(P) is the expected remote time of an interval, the sum over servers: each use of an expert that its server has not
  costs two latencies of the link, its row there and back at the link's bandwidth, and the computation at the peer. The
  cheapest peer that has the expert counts, or reading it from the own disk where that is cheaper. What several rows
  share (a message and its latency, the weights of an expert, the input of a token) counts for each by the mean number
  of rows that share it.
- T_mig is eq. 3: the bytes of each expert that a server takes in over the link to the fastest server that has it, or
  over the server's own disk where that is faster. Experts that only leave cost nothing.

A placement is an array `resident`, bool[n_servers, n_layers, n_expert]; `uses` are float64 of that shape: how often the
tokens of a server use an expert in the interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.cluster.costs import Costs
from pyorch.errors import PyorchError

DISK = -1  # in the place of a peer

FADING = 0.5  # what was used an interval ago counts so much


class RecentUses:
    """How often the tokens of each server use each expert in an interval, as it was lately."""

    def __init__(self, shape: tuple[int, int, int], interval: float) -> None:
        """shape: n_servers, n_layers, n_expert. interval: seconds."""
        self.interval = interval
        self.uses, self.seconds = np.zeros(shape), 0.0  # that were looked at; both fade

    def add(self, uses: np.ndarray, seconds: float) -> None:
        """What was used in the last so many seconds, float64 of that shape. What was known before is that much
        older."""
        faded = FADING ** (seconds / self.interval)
        self.uses = faded * self.uses + uses
        self.seconds = faded * self.seconds + seconds

    @property
    def expected(self) -> np.ndarray:
        """In an interval: float64[n_servers, n_layers, n_expert]."""
        return self.uses * (self.interval / self.seconds) if self.seconds else self.uses


@dataclass(frozen=True)
class Sharing:
    """Of what goes to peers, in the mean, 1 or more. rows_per_input: experts of a peer that compute with a token's
    input, which it gets once."""

    rows_per_message: float = 1.0
    rows_per_expert: float = 1.0
    rows_per_input: float = 1.0


@dataclass(frozen=True)
class Decision:
    """Seconds of the interval: current is C(P), candidate C(P'), migration T_mig. n_moves, n_bytes: of experts that
    servers would take in."""

    current: float
    candidate: float
    migration: float
    n_moves: int
    n_bytes: int

    @property
    def adopt(self) -> bool:
        """DanceMoE's eq. 4."""
        return self.candidate + self.migration < self.current


def decide(
    resident: np.ndarray, candidate: np.ndarray, uses: np.ndarray, costs: Costs, sharing: Sharing = Sharing()
) -> Decision:
    """Compares a candidate with the placement that is."""
    arriving = candidate & ~resident
    return Decision(
        float(remote_seconds(resident, uses, costs, sharing).sum()),
        float(remote_seconds(candidate, uses, costs, sharing).sum()),
        float(migration_seconds(resident, candidate, costs).sum()),
        int(arriving.sum()),
        int((arriving.sum(axis=(0, 2)) * costs.expert_bytes).sum()),
    )


def remote_seconds(
    resident: np.ndarray, uses: np.ndarray, costs: Costs, sharing: Sharing = Sharing()
) -> np.ndarray:
    """C(P) of each server: float64[n_servers], infinite where an expert is used that it cannot get."""
    asked = row_seconds(costs, sharing)
    read = costs.disk_seconds / sharing.rows_per_expert + (costs.expert / sharing.rows_per_expert + costs.row)[:, None]
    seconds = np.zeros(len(uses))
    nothing = np.zeros(len(costs.expert_bytes))
    for n in range(len(uses)):
        each = np.minimum(_cheapest(resident, asked[n], np.zeros(len(uses)), nothing), read[n][:, None])
        remote = ~resident[n] & (uses[n] > 0)
        seconds[n] = (uses[n][remote] * each[remote]).sum()
    return seconds


def row_seconds(costs: Costs, sharing: Sharing = Sharing()) -> np.ndarray:
    """One row asked of a peer: float64[n_servers, n_servers], from the one that asks; infinite of itself."""
    there, back = 1 / costs.bytes_per_second, 1 / costs.bytes_per_second.T
    message = (costs.latency + costs.latency.T + costs.message_bytes * (there + back)
               + costs.message[None, :]) / sharing.rows_per_message
    row = costs.request_bytes * there / sharing.rows_per_input + costs.reply_bytes * back + costs.row[None, :]
    seconds = message + row + (costs.expert / sharing.rows_per_expert)[None, :]
    np.fill_diagonal(seconds, np.inf)
    return seconds


def migration_seconds(resident: np.ndarray, candidate: np.ndarray, costs: Costs) -> np.ndarray:
    """T_mig of each server: float64[n_servers], infinite where it can get an expert from nowhere."""
    seconds = np.zeros(len(resident))
    for n, arriving in enumerate(candidate & ~resident):
        if arriving.any():
            each = _cheapest(resident, costs.latency[:, n], 1 / costs.bytes_per_second[:, n], costs.expert_bytes)
            seconds[n] = np.minimum(each, costs.disk_seconds[n][:, None])[arriving].sum()
    return seconds


def _cheapest(resident: np.ndarray, fixed: np.ndarray, per_byte: np.ndarray, n_bytes: np.ndarray) -> np.ndarray:
    """Least of fixed + per_byte * n_bytes over those that have an expert: float64[n_layers, n_expert].

    fixed, per_byte: [n_servers]; n_bytes: [n_layers]. Infinite where nobody has it. Servers that cost the same are
    looked at together: of hundreds most do.
    """
    kinds, kind_of = np.unique(np.stack([fixed, per_byte], axis=1), axis=0, return_inverse=True)
    cheapest = np.full(resident.shape[1:], np.inf)
    for kind, (seconds, each) in enumerate(kinds):
        if np.isfinite(seconds):
            held = resident[kind_of.ravel() == kind].any(axis=0)
            np.minimum(cheapest, (seconds + each * n_bytes)[:, None], out=cheapest, where=held)
    return cheapest


@dataclass(frozen=True)
class Load:
    """An expert that a server takes in. source: the server that has it, or DISK."""

    server: int
    layer: int
    expert: int
    source: int


class Migration:
    """From one placement to another, make before break: no expert that a server had is gone before it has a place.

    Each server takes in one expert after another, those used most first. For that it needs memory for one expert beyond
    the larger of its two shares. An expert leaves when its room is needed, those used least first, and only while
    another server has it or the new placement has it nowhere; the rest leave in the end.

    That ends, in whatever order loads finish. Suppose that every server with something left to take in had no room, and
    nothing that may leave. Its share of the new placement fits, so each of them holds more bytes that are to leave than
    bytes that are to come. Each expert to leave is then the only copy, and its new places are among these servers: so
    the bytes to come are at least those to leave. Both cannot be.

    Use: next_load(server) of every server; when a load is done, finish() it, and next_load() of that server and of
    those that finish() names.
    """

    def __init__(self, resident: np.ndarray, candidate: np.ndarray, uses: np.ndarray, costs: Costs) -> None:
        """resident is kept up to date in place. PyorchError where a server can get an expert from nowhere."""
        if not np.isfinite(migration_seconds(resident, candidate, costs)).all():
            raise PyorchError("the new placement has experts that are on no server and on no disk")
        self.resident, self.candidate = resident, candidate
        self._costs, self._uses = costs, uses
        self._wanted_somewhere = candidate.any(axis=0)
        self._copies = resident.sum(axis=0)
        self._read_by = np.zeros(resident.shape, np.int16)  # loads under way from that server
        self._n_readers = np.zeros(len(resident), np.int64)
        self._loading: dict[int, Load] = {}
        self._waiting: set[int] = set()
        size = costs.expert_bytes
        self._used_bytes = resident.sum(axis=2) @ size
        self._room_bytes = np.maximum(self._used_bytes, candidate.sum(axis=2) @ size) + size.max()
        self._to_load = [self._by_use(n, candidate[n] & ~resident[n]) for n in range(len(resident))]
        self._end()

    @property
    def done(self) -> bool:
        return not self._loading and not any(self._to_load)

    def next_load(self, server: int) -> Load | None:
        """What the server is to take in now; None where it has all, is at one already, or waits for room."""
        if not self._to_load[server] or server in self._loading:
            return None
        layer, expert = self._to_load[server][-1]
        if not self._make_room(server, self._costs.expert_bytes[layer]):
            self._waiting.add(server)
            return None
        self._waiting.discard(server)
        self._to_load[server].pop()
        load = Load(server, layer, expert, self._source(server, layer, expert))
        if load.source != DISK:
            self._read_by[load.source, layer, expert] += 1
            self._n_readers[load.source] += 1
        self._used_bytes[server] += self._costs.expert_bytes[layer]
        self._loading[server] = load
        return load

    def finish(self, load: Load) -> list[int]:
        """The expert is there. Returns the other servers that waited for that. In the end all that is to leave does."""
        server, layer, expert = load.server, load.layer, load.expert
        del self._loading[server]
        if load.source != DISK:
            self._read_by[load.source, layer, expert] -= 1
            self._n_readers[load.source] -= 1
        self.resident[server, layer, expert] = True
        self._copies[layer, expert] += 1
        self._end()
        return [n for n in sorted(self._waiting) if self._may_leave(n)[layer, expert]]

    def _end(self) -> None:
        if self.done:
            self.resident &= self.candidate

    def _by_use(self, server: int, chosen: np.ndarray) -> list[tuple[int, int]]:
        """Layer and expert of those chosen, bool[n_layers, n_expert]: the one used most is the last."""
        layers, experts = np.nonzero(chosen)
        order = np.argsort(self._uses[server, layers, experts], kind="stable")
        return list(zip(layers[order].tolist(), experts[order].tolist()))

    def _may_leave(self, server: int) -> np.ndarray:
        """bool[n_layers, n_expert]"""
        return (self.resident[server] & ~self.candidate[server] & (self._read_by[server] == 0)
                & ((self._copies > 1) | ~self._wanted_somewhere))

    def _make_room(self, server: int, n_bytes: float) -> bool:
        missing = self._used_bytes[server] + n_bytes - self._room_bytes[server]
        if missing <= 0:
            return True
        leaving = []
        for layer, expert in self._by_use(server, self._may_leave(server)):
            leaving.append((layer, expert))
            missing -= self._costs.expert_bytes[layer]
            if missing <= 0:
                break
        for layer, expert in leaving:
            self.resident[server, layer, expert] = False
            self._copies[layer, expert] -= 1
            self._used_bytes[server] -= self._costs.expert_bytes[layer]
        return missing <= 0

    def _source(self, server: int, layer: int, expert: int) -> int:
        """The fastest; of equals the one that fewest read from, then the next in the circle of servers."""
        costs = self._costs
        disk = costs.disk_seconds[server, layer]
        holders = np.flatnonzero(self.resident[:, layer, expert])
        if not len(holders):
            return DISK
        seconds = costs.latency[holders, server] + costs.expert_bytes[layer] / costs.bytes_per_second[holders, server]
        best = np.lexsort(((holders - server) % len(self.resident), self._n_readers[holders], seconds))[0]
        return int(holders[best]) if seconds[best] <= disk else DISK
