"""The time of a step's layers in a simulated cluster, and the servers that compute missing experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.cluster.costs import Costs
from pyorch.cluster.migration import DISK, Sharing
from pyorch.cluster.replicas import PACE, choose, in_turn
from pyorch.errors import PyorchError
from scripts.papers.dancemoe.simulated_server import Server


@dataclass(slots=True)
class Layer:
    """A layer of a step.

    Attributes:
        local: Seconds of the device, for experts of this server.
        calls: Of each asked peer, its number, seconds of its device and of ports there and back, and rows.
        reads: Seconds of the disk and then of the device, of each expert.
    """

    local: float
    calls: list[tuple[int, float, float, float, float]]
    reads: list[tuple[float, float]]


@dataclass(frozen=True)
class Part:
    """A request's part of a step.

    Attributes:
        experts: [n_tokens, n_layers, k].
        gives_output: The last token's output is needed. The outputs of other tokens never are, so the last layer
            computes no experts for them.
    """

    experts: np.ndarray
    gives_output: bool


class Layers:
    """The layers of all steps.

    Attributes:
        resident: bool[n_servers, n_layers, n_expert], which the caller changes.
        served: Rows that each server computed for peers.
        n_messages: Requests to peers.
        n_bytes: Bytes of requests and answers.
        n_read: Experts read from disks.
        recent: float64 of the shape of resident, uses since it was set to 0.
        paces: PACE[n_servers, n_servers], the waits of one server for another.
    """

    def __init__(self, costs: Costs, resident: np.ndarray, servers: Sequence[Server]) -> None:
        n_servers, n_layers, n_expert = resident.shape
        self._costs, self._servers = costs, servers
        self._n_layers, self._n_expert = n_layers, n_expert
        self._held = resident.reshape(n_servers, -1)  # a view: changes of resident are visible in it
        self._cells = n_expert * np.arange(n_layers)[:, None]
        self.recent = np.zeros(resident.shape)
        self._recent = self.recent.reshape(n_servers, -1)
        self.served = np.zeros(n_servers, np.int64)
        self.n_messages, self.n_bytes, self.n_read = 0, 0.0, 0
        self._n_rows = self._n_experts = self._n_inputs = 0  # sent so far
        there, back = 1 / costs.bytes_per_second, 1 / costs.bytes_per_second.T
        np.fill_diagonal(there, 0)
        np.fill_diagonal(back, 0)
        # [asking, answering]: the least time of a message and its answer, and the time of each row.
        self._message_seconds = (costs.latency + costs.latency.T + costs.message + costs.expert
                                 + costs.message_bytes * (there + back))
        np.fill_diagonal(self._message_seconds, np.inf)
        self._there = there
        self.paces = np.zeros((n_servers, n_servers), PACE)  # [asking, answering]
        self._row_seconds = costs.request_bytes * there + costs.reply_bytes * back + costs.row
        self._read_seconds = np.repeat(costs.disk_seconds, n_expert, axis=1)

    @property
    def sharing(self) -> Sharing:
        """Returns the sharing of all rows sent so far."""
        if not self._n_rows:
            return Sharing()
        return Sharing(*(self._n_rows / n for n in (self.n_messages, self._n_experts, self._n_inputs)))

    def of_step(self, n: int, now: float, parts: Sequence[Part]) -> tuple[float, list[Layer], int, int]:
        """Computes the times of a step of server n that begins now.

        Returns:
            Seconds of the dense part of a layer, the rest of each layer, the rows that the server computes itself, and
            all rows.

        Raises:
            PyorchError: No server has a needed expert, and there is no disk.
        """
        costs, n_layers, n_cells = self._costs, self._n_layers, self._held.shape[1]
        cells = np.concatenate([part.experts for part in parts]) + self._cells
        wanted = np.zeros(len(cells), bool)
        ends = np.cumsum([len(part.experts) for part in parts])
        wanted[[end - 1 for end, part in zip(ends, parts) if part.gives_output]] = True
        cells[~wanted, -1] = n_cells  # no expert
        rows = np.bincount(cells.ravel(), minlength=n_cells + 1)[:n_cells]
        used = np.flatnonzero(rows)
        rows = rows[used]
        here = self._held[n, used]
        layer = used // self._n_expert
        seconds = costs.expert[n] + costs.row[n] * rows
        local = np.bincount(layer[here], seconds[here], n_layers).tolist()
        self._recent[n, used] += rows
        dense = float(costs.layer[n] + costs.token[n] * len(cells))
        away = np.flatnonzero(~here)
        layers = [Layer(seconds, [], []) for seconds in local]
        if len(away):
            self._send_away(n, now, layers, cells, used[away], layer[away], rows[away])
        return dense, layers, int(rows[here].sum()), int(rows.sum())

    def _send_away(
        self, n: int, now: float, layers: list[Layer], cells: np.ndarray, used: np.ndarray, layer: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Appends the calls and reads for missing experts to the layers.

        Args:
            cells: [n_tokens, n_layers, k], experts of the tokens, counted over all layers.
            used: The missing experts.
            layer, rows: The layer and the rows of each missing expert.
        """
        costs, servers = self._costs, self._servers
        n_servers = len(servers)
        waits = np.array([server.device.free_at for server in servers])
        waits = np.maximum(waits - now, 0) + self._message_seconds[n]
        # Each layer is a ubatch of its own, with its own choice of servers.
        places = in_turn(self._held.take(used, axis=1), n, used)
        places = np.where(places >= 0, places + n_servers * layer[:, None], DISK).astype(np.int32)
        peer = choose(places, rows, np.tile(self.paces[n], self._n_layers))
        nobody = peer < 0
        peer %= n_servers
        asked = np.where(nobody, np.inf, waits[peer] + self._row_seconds[n, peer] * rows)
        own = costs.expert[n] + costs.row[n] * rows
        read = max(0.0, servers[n].disk.free_at - servers[n].disk.slice - now) + self._read_seconds[n, used] + own
        from_disk = read < asked
        if not np.isfinite(np.minimum(read, asked)).all():
            raise PyorchError("no server has a needed expert, and no disk: give the servers more memory, or "
                              "a disk with --cost disk_bytes_per_second=1e9")
        for i in np.flatnonzero(from_disk).tolist():
            layers[layer[i]].reads.append((float(self._read_seconds[n, used[i]]), float(own[i])))
        self.n_read += int(from_disk.sum())
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
        columns = (peer, seconds, there * self._there[n, peer], back * self._there[peer, n], n_rows)
        for i, call in zip((message // n_servers).tolist(), zip(*(column.tolist() for column in columns))):
            layers[i].calls.append(call)
        np.add.at(self.served, peer, n_rows.astype(np.int64))
        self.n_messages += len(message)
        self.n_bytes += float(there.sum() + back.sum())
        self._n_rows += int(rows.sum())
        self._n_inputs += int(n_inputs.sum())
        self._n_experts += len(rows)

    def _inputs(self, cells: np.ndarray, used: np.ndarray, peer: np.ndarray, message: np.ndarray) -> np.ndarray:
        """Counts the inputs in each message. A token has one input, for all of the peer's experts that use it.

        Args:
            cells: [n_tokens, n_layers, k], experts of the tokens, counted over all layers.
            used, peer: Experts, and the asked server of each.
            message: Layer and peer of each message, ascending.
        """
        n_servers, n_layers = len(self._servers), self._n_layers
        peer_of = np.full(self._held.shape[1] + 1, DISK)
        peer_of[used] = peer
        asked = peer_of[cells]
        token, layer, place = np.nonzero(asked != DISK)
        inputs = np.unique((token * n_layers + layer) * n_servers + asked[token, layer, place])
        return np.bincount(np.searchsorted(message, inputs % (n_layers * n_servers)), minlength=len(message))
