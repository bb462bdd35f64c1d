"""Decides whether another placement of the experts pays, and moves experts to it.

The rule is DanceMoE's eq. 4: a placement P' is adopted when C(P') + T_mig < C(P), all in seconds.

- C(P) is the expected remote time of an interval, summed over servers. If a server lacks an expert, each use costs two
  latencies of a link, the row's transfer in both directions, and the computation at the peer. The cheapest peer with
  the expert counts, or reading it from the own disk if that is cheaper. Several rows share a message with its latency,
  an expert's weights and a token's input; each row bears these costs divided by the mean number of sharing rows.
- T_mig is eq. 3: each expert's bytes that a server loads, over the link to the fastest server with it, or over its own
  disk if that is faster. Evicting an expert costs nothing.

A placement is an array `resident`, bool[n_servers, n_layers, n_expert]. `uses` are float64 of that shape: how often the
tokens of a server use an expert in the interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.cluster.costs import Costs
from pyorch.errors import PyorchError

DISK = -1  # instead of a peer

FADING = 0.5  # weight of the uses an interval ago


class RecentUses:
    """How often each server's tokens used each expert lately, for an interval."""

    def __init__(self, shape: tuple[int, int, int], interval: float) -> None:
        """Args: shape: n_servers, n_layers, n_expert. interval: seconds."""
        self.interval = interval
        self.uses, self.seconds = np.zeros(shape), 0.0  # observed uses and time; both fade

    def add(self, uses: np.ndarray, seconds: float) -> None:
        """Adds the uses of the last `seconds`, float64 of that shape. Earlier uses fade by that time."""
        faded = FADING ** (seconds / self.interval)
        self.uses = faded * self.uses + uses
        self.seconds = faded * self.seconds + seconds

    @property
    def expected(self) -> np.ndarray:
        """Returns the uses expected in an interval: float64[n_servers, n_layers, n_expert]."""
        return self.uses * (self.interval / self.seconds) if self.seconds else self.uses


@dataclass(frozen=True)
class Sharing:
    """The mean numbers of rows that share the costs of a request to a peer, each at least 1.

    Attributes:
        rows_per_message: Rows in a message.
        rows_per_expert: Rows of an expert in a message.
        rows_per_input: Experts of a peer for one token, with one transfer of the input.
    """

    rows_per_message: float = 1.0
    rows_per_expert: float = 1.0
    rows_per_input: float = 1.0


@dataclass(frozen=True)
class Decision:
    """Two placements compared, in seconds of an interval.

    Attributes:
        current: C(P).
        candidate: C(P').
        migration: T_mig.
        n_moves: The number of experts that servers would load.
        n_bytes: Their size.
    """

    current: float
    candidate: float
    migration: float
    n_moves: int
    n_bytes: int

    @property
    def adopt(self) -> bool:
        """Whether to adopt the candidate: DanceMoE's eq. 4."""
        return self.candidate + self.migration < self.current


def decide(
    resident: np.ndarray, candidate: np.ndarray, uses: np.ndarray, costs: Costs, sharing: Sharing = Sharing()
) -> Decision:
    """Compares a candidate with the present placement."""
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
    """Returns C(P) of each server: float64[n_servers], infinite if it cannot get an expert that it uses."""
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
    """Returns the seconds of a row at each peer: float64[n_servers, n_servers], from the asking server.

    They are infinite from a server to itself.
    """
    forth, back = 1 / costs.bytes_per_second, 1 / costs.bytes_per_second.T
    message = (costs.latency + costs.latency.T + costs.message_bytes * (forth + back)
               + costs.message[None, :]) / sharing.rows_per_message
    row = costs.request_bytes * forth / sharing.rows_per_input + costs.reply_bytes * back + costs.row[None, :]
    seconds = message + row + (costs.expert / sharing.rows_per_expert)[None, :]
    np.fill_diagonal(seconds, np.inf)
    return seconds


def migration_seconds(resident: np.ndarray, candidate: np.ndarray, costs: Costs) -> np.ndarray:
    """Returns T_mig of each server: float64[n_servers], infinite if no source has an expert."""
    seconds = np.zeros(len(resident))
    for n, arriving in enumerate(candidate & ~resident):
        if arriving.any():
            each = _cheapest(resident, costs.latency[:, n], 1 / costs.bytes_per_second[:, n], costs.expert_bytes)
            seconds[n] = np.minimum(each, costs.disk_seconds[n][:, None])[arriving].sum()
    return seconds


def _cheapest(resident: np.ndarray, fixed: np.ndarray, per_byte: np.ndarray, n_bytes: np.ndarray) -> np.ndarray:
    """Returns the least fixed + per_byte * n_bytes of all servers with an expert: float64[n_layers, n_expert].

    Servers with equal costs are processed together: of hundreds, most are equal.

    Args:
        resident: bool[n_servers, n_layers, n_expert].
        fixed: [n_servers].
        per_byte: [n_servers].
        n_bytes: [n_layers].

    Returns:
        The costs, infinite if no server has the expert.
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
    """An expert that a server loads. source: a server with the expert, or DISK."""

    server: int
    layer: int
    expert: int
    source: int


class Migration:
    """Moves experts from one placement to another. A server never loses an expert before the expert has another place.

    Each server loads one expert after another, the most used first. It needs memory for one expert more than the larger
    of its two shares. It evicts an expert when it needs the room, the least used first. It may evict an expert only if
    another server has it, or if no server has it in the new placement. The others are evicted at the end.

    This ends, in any order of loads. Suppose that all servers with experts left to load had no room and
    nothing that they may evict. A server's share of the new placement fits, so each of these servers holds more bytes
    to evict than bytes to load. Each expert to evict is then the only copy, and its new places are among these servers.
    So the bytes to load are at least the bytes to evict, which is a contradiction.

    Use: call next_load() for every server. When a load is done, call finish() with it. Then call next_load() for that
    server and for the servers that finish() returned.
    """

    def __init__(self, resident: np.ndarray, candidate: np.ndarray, uses: np.ndarray, costs: Costs) -> None:
        """Args: resident: updated in place.

        Raises:
            PyorchError: A server can get an expert from no source.
        """
        if not np.isfinite(migration_seconds(resident, candidate, costs)).all():
            raise PyorchError("the new placement has experts that are on no server and on no disk")
        self.resident, self.candidate = resident, candidate
        self._costs, self._uses = costs, uses
        self._wanted_somewhere = candidate.any(axis=0)
        self._copies = resident.sum(axis=0)
        self._read_by = np.zeros(resident.shape, np.int16)  # running loads from that server
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
        """Returns the server's next load; None if it has all, is loading, or waits for room."""
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
        """Marks a load as done. Returns the other servers that waited for it. The last call evicts the rest."""
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
        """Returns layer and expert of the chosen ones, bool[n_layers, n_expert], in ascending order of use."""
        layers, experts = np.nonzero(chosen)
        order = np.argsort(self._uses[server, layers, experts], kind="stable")
        return list(zip(layers[order].tolist(), experts[order].tolist()))

    def _may_leave(self, server: int) -> np.ndarray:
        """Returns the experts that the server may evict, bool[n_layers, n_expert]."""
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
        """Returns the fastest source; of equal ones, by fewest loads, then the next in the circle of servers."""
        costs = self._costs
        disk = costs.disk_seconds[server, layer]
        holders = np.flatnonzero(self.resident[:, layer, expert])
        if not len(holders):
            return DISK
        seconds = costs.latency[holders, server] + costs.expert_bytes[layer] / costs.bytes_per_second[holders, server]
        best = np.lexsort(((holders - server) % len(self.resident), self._n_readers[holders], seconds))[0]
        return int(holders[best]) if seconds[best] <= disk else DISK
