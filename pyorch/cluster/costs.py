"""The costs of a cluster's steps: seconds that are linear in layers, tokens, experts, rows and bytes.

A row is the output of one expert for one token. A server computes the dense part of a layer, then its own experts, one
job after another. It requests the other experts' rows from peers, with one message to each. The coefficients are those
of a whole server with all its devices (scripts/papers/dancemoe/README.md). They are in a JSON file, which needs only
the values that differ from the defaults. Links that are missing there are those in the cluster.toml.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.files import write_text
from pyorch.sidecars import json_file

KIND, VERSION = "pyorch file of costs", 1
MOST = 1e15  # seconds or bytes
SIMULATED = ("expert_bytes", "request_bytes", "reply_bytes", "message_bytes", "machines")


@dataclass(frozen=True)
class ServerCosts:
    """The costs of one server, in seconds.

    Attributes:
        step: A step, without the layers with experts.
        layer: The dense part of a layer in a step.
        token: Each token in that part.
        expert: Each different expert of a layer in a step or a message.
        row: Each row of an expert.
        message: Receiving and answering a peer's message.
        disk_latency: One read of an expert.
        disk_bytes_per_second: The disk's bandwidth, 0 if experts are not read from a disk.
    """

    step: float = 1e-3
    layer: float = 4e-4
    token: float = 5e-5
    expert: float = 1e-4
    row: float = 2e-5
    message: float = 1e-4
    disk_latency: float = 2e-4
    disk_bytes_per_second: float = 1e9


@dataclass(frozen=True)
class Costs:
    """The costs of a cluster, as arrays.

    Attributes:
        step, layer, token, expert, row, message, disk_latency, disk_bytes_per_second: float64[n_servers], as in
            ServerCosts.
        latency: Seconds one way from a server to a server, float64[n_servers, n_servers].
        bytes_per_second: The bandwidth, of the same shape.
        expert_bytes: The size of one expert of each layer, float64[n_layers].
        request_bytes: A token's input, which a peer receives once for all its experts.
        reply_bytes: A row.
        message_bytes: The overhead of a message.
    """

    step: np.ndarray
    layer: np.ndarray
    token: np.ndarray
    expert: np.ndarray
    row: np.ndarray
    message: np.ndarray
    disk_latency: np.ndarray
    disk_bytes_per_second: np.ndarray
    latency: np.ndarray
    bytes_per_second: np.ndarray
    expert_bytes: np.ndarray
    request_bytes: float
    reply_bytes: float
    message_bytes: float = 64.0

    @classmethod
    def of(
        cls, servers: Sequence[ServerCosts], latency: np.ndarray, bytes_per_second: np.ndarray,
        expert_bytes: np.ndarray, row_bytes: float,
    ) -> Costs:
        """Combines the costs of servers. row_bytes: the size of a token's input, and of a row."""
        columns = {one.name: np.array([getattr(server, one.name) for server in servers], np.float64)
                   for one in fields(ServerCosts)}
        return cls(**columns, latency=np.asarray(latency, np.float64),
                   bytes_per_second=np.asarray(bytes_per_second, np.float64),
                   expert_bytes=np.asarray(expert_bytes, np.float64), request_bytes=row_bytes, reply_bytes=row_bytes)

    @property
    def disk_seconds(self) -> np.ndarray:
        """Seconds to read one expert: float64[n_servers, n_layers], infinite without a disk."""
        with np.errstate(divide="ignore"):
            return self.disk_latency[:, None] + self.expert_bytes / self.disk_bytes_per_second[:, None]


@dataclass(frozen=True)
class CostsFile:
    """The content of a file of costs.

    Attributes:
        server: The default for all servers.
        servers: Costs by the server's name.
        links: Bytes per second and seconds one way, by two names.
        simulated: Values for simulations only, by the names in SIMULATED.
    """

    server: ServerCosts = ServerCosts()
    servers: Mapping[str, ServerCosts] = field(default_factory=dict)
    links: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    simulated: Mapping[str, Any] = field(default_factory=dict)

    def check_names(self, names: Sequence[str]) -> None:
        """Checks that all servers in the file are among these.

        Raises:
            PyorchError: The file has another server.
        """
        for name in [*self.servers, *(end for pair in self.links for end in pair)]:
            if name not in names:
                raise PyorchError(f'there are costs of a server "{name}": the cluster has {", ".join(names)}')

    def of(
        self, names: Sequence[str], latency: np.ndarray, bytes_per_second: np.ndarray, expert_bytes: np.ndarray,
        row_bytes: float,
    ) -> Costs:
        """Returns the costs of these servers. The file's links replace `latency` and `bytes_per_second`."""
        latency, rate = latency.copy(), bytes_per_second.copy()
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if i != j and (one, other) in self.links:
                    rate[i, j], latency[i, j] = self.links[one, other]
        return Costs.of([self.servers.get(name, self.server) for name in names], latency, rate, expert_bytes, row_bytes)


def read_costs(path: str | os.PathLike[str]) -> CostsFile:
    """Reads a file of costs.

    Raises:
        FormatError: The file is damaged or no file of costs; the message names the field.
    """
    value = json_file.read_any(path, KIND, VERSION, command="cluster measure")
    for name in sorted(value.keys() - {"kind", "version", "server", "servers", "links", *SIMULATED}):
        raise FormatError(f'{path}: "{name}" is not known')
    server = _server(value.get("server", {}), ServerCosts(), f"{path}: server")
    servers = {name: _server(given, server, f"{path}: server {name}")
               for name, given in _object(value.get("servers", {}), f"{path}: servers").items()}
    links = dict(_link(link, f"{path}: links[{i}]")
                 for i, link in enumerate(_list(value.get("links", []), f"{path}: links")))
    return CostsFile(server, servers, links, {name: value[name] for name in SIMULATED if name in value})


def write_costs(path: str | os.PathLike[str], costs: CostsFile) -> None:
    """Writes the file atomically.

    Raises:
        PyorchError: It cannot be written.
    """
    links = [{"from": one, "to": other, "bytes_per_second": rate, "latency": latency}
             for (one, other), (rate, latency) in costs.links.items()]
    value = {"kind": KIND, "version": VERSION, **costs.simulated, "server": asdict(costs.server),
             "servers": {name: asdict(server) for name, server in costs.servers.items()}, "links": links}
    write_text(path, json.dumps(value, indent=1) + "\n")


def _server(value: Any, default: ServerCosts, where: str) -> ServerCosts:
    known = {one.name for one in fields(ServerCosts)}
    for name, number in _object(value, where).items():
        if name not in known:
            raise FormatError(f'{where}: "{name}" is no cost: {", ".join(sorted(known))} are')
        _number(number, f"{where}: {name}")
    return replace(default, **{name: float(number) for name, number in value.items()})


def _link(value: Any, where: str) -> tuple[tuple[str, str], tuple[float, float]]:
    if set(_object(value, where)) != {"from", "to", "bytes_per_second", "latency"}:
        raise FormatError(f"{where} must have exactly the fields from, to, bytes_per_second and latency")
    rate, latency = (_number(value[name], f"{where}: {name}") for name in ("bytes_per_second", "latency"))
    if rate == 0:
        raise FormatError(f"{where}: bytes_per_second is 0")
    return (str(value["from"]), str(value["to"])), (rate, latency)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where} are no list")
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is no object")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST:
        raise FormatError(f"{where} is {repr(value)[:60]}, not a number from 0 to {MOST:g}")
    return float(value)
