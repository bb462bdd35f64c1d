"""What a step of a cluster takes: seconds that are linear in layers, tokens, experts, rows and bytes.

A row is what one expert makes of one token. A server computes the dense part of a layer, then the experts that it has,
one job after another; peers are asked for the rest, in one message each. The coefficients lie in a JSON file, of the
whole server with all its devices (scripts/papers/dancemoe/README.md); only what differs from the defaults need stand
there. Links that are not named there are those of the cluster.toml.
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
    """Of one server, in seconds.

    step: of a step, outside the layers with experts. layer: of the dense part of a layer in a step; token: and of each
    token in it. expert: of each different expert of a layer in a step, or in a message; row: and of each row.
    message: to take a message from a peer and to answer it. disk_latency: of one read of an expert;
    disk_bytes_per_second: 0 where experts are not read from a disk.
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
    """Of a cluster, for computing with.

    step ... message, disk_latency, disk_bytes_per_second: float64[n_servers], as ServerCosts has them.
    latency, bytes_per_second: float64[n_servers, n_servers], from a server to a server; latency in seconds, one way.
    expert_bytes: float64[n_layers], of one expert of each layer. request_bytes: of a token's input, which a peer gets
    once for all its experts; reply_bytes: of a row; message_bytes: of a message beside these.
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
        """row_bytes: of a token's input, and of a row."""
        columns = {one.name: np.array([getattr(server, one.name) for server in servers], np.float64)
                   for one in fields(ServerCosts)}
        return cls(**columns, latency=np.asarray(latency, np.float64),
                   bytes_per_second=np.asarray(bytes_per_second, np.float64),
                   expert_bytes=np.asarray(expert_bytes, np.float64), request_bytes=row_bytes, reply_bytes=row_bytes)

    @property
    def disk_seconds(self) -> np.ndarray:
        """To read one expert: float64[n_servers, n_layers], infinite without a disk."""
        with np.errstate(divide="ignore"):
            return self.disk_latency[:, None] + self.expert_bytes / self.disk_bytes_per_second[:, None]


@dataclass(frozen=True)
class CostsFile:
    """What stands in such a file. servers: by name; links: (bytes per second, seconds one way) by two names. simulated:
    what only simulations know, by SIMULATED, as it stands there."""

    server: ServerCosts = ServerCosts()
    servers: Mapping[str, ServerCosts] = field(default_factory=dict)
    links: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    simulated: Mapping[str, Any] = field(default_factory=dict)

    def check_names(self, names: Sequence[str]) -> None:
        """PyorchError where the file has costs of a server that is not among these."""
        for name in [*self.servers, *(end for pair in self.links for end in pair)]:
            if name not in names:
                raise PyorchError(f'there are costs of a server "{name}": the cluster has {", ".join(names)}')

    def of(
        self, names: Sequence[str], latency: np.ndarray, bytes_per_second: np.ndarray, expert_bytes: np.ndarray,
        row_bytes: float,
    ) -> Costs:
        """For servers of these names, with links that are these where this file has no others, as Costs.of()."""
        latency, rate = latency.copy(), bytes_per_second.copy()
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if i != j and (one, other) in self.links:
                    rate[i, j], latency[i, j] = self.links[one, other]
        return Costs.of([self.servers.get(name, self.server) for name in names], latency, rate, expert_bytes, row_bytes)


def read_costs(path: str | os.PathLike[str]) -> CostsFile:
    """Raises FormatError, with the field, for a file that is none or has what cannot be."""
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
    """Writes it, whole or not at all. PyorchError where it cannot."""
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
        raise FormatError(f"{where} has not the fields from, to, bytes_per_second and latency")
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
