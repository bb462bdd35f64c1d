"""What a step of a cluster takes: seconds that are linear in layers, tokens, experts, rows and bytes.

A row is what one expert makes of one token. A server computes the dense part of a layer, then the experts that it has,
one job after another; peers are asked for the rest, in one message each. The coefficients lie in a JSON file, of the
whole server with all its devices (docs/cluster.md); only what differs from the defaults need stand there. Links that
are not named there are those of the cluster.toml.
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
MOST_OF_EXPERT = 1e10  # bytes


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
class Sizes:
    """In bytes. expert: of one expert, or of one of each layer; request: of a token's input, which a peer gets once for
    all its experts; reply: of a row; message: of a message beside these. None: as the model has it; or_of() fills that
    in."""

    expert: float | tuple[float, ...] | None = None
    request: float | None = None
    reply: float | None = None
    message: float = 64.0

    def or_of(self, expert: float | tuple[float, ...], n_embd: int) -> Sizes:
        """What is None, of a model: a row is float32[n_embd]."""
        row = 4.0 * n_embd
        return replace(self, **{name: value for name, value in (("expert", expert), ("request", row), ("reply", row))
                                if getattr(self, name) is None})


@dataclass(frozen=True)
class Costs:
    """Of a cluster, for computing with.

    step ... message, disk_latency, disk_bytes_per_second: float64[n_servers], as ServerCosts has them.
    latency, bytes_per_second: float64[n_servers, n_servers], from a server to a server; latency in seconds, one way.
    expert_bytes: float64[n_layers]. request_bytes, reply_bytes, message_bytes: as Sizes has them.
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
    message_bytes: float

    @classmethod
    def of(
        cls, servers: Sequence[ServerCosts], sizes: Sizes, n_layers: int, latency: np.ndarray,
        bytes_per_second: np.ndarray,
    ) -> Costs:
        """sizes: without None. PyorchError where they are of another number of layers, or no expert has such."""
        expert = np.atleast_1d(np.asarray(sizes.expert, np.float64))
        if len(expert) not in (1, n_layers):
            raise PyorchError(f"expert_bytes are of {len(expert)} layers: there are {n_layers}")
        if not (expert.min() >= 1 and expert.max() <= MOST_OF_EXPERT):
            raise PyorchError(f"expert_bytes are from {expert.min():g} to {expert.max():g}: an expert has 1 byte at "
                              f"least, and {MOST_OF_EXPERT:g} at most")
        columns = {one.name: np.array([getattr(server, one.name) for server in servers], np.float64)
                   for one in fields(ServerCosts)}
        return cls(
            **columns, latency=np.asarray(latency, np.float64),
            bytes_per_second=np.asarray(bytes_per_second, np.float64),
            expert_bytes=np.broadcast_to(expert, n_layers).copy(), request_bytes=float(sizes.request),
            reply_bytes=float(sizes.reply), message_bytes=float(sizes.message),
        )

    @property
    def disk_seconds(self) -> np.ndarray:
        """To read one expert: float64[n_servers, n_layers], infinite without a disk."""
        with np.errstate(divide="ignore"):
            return self.disk_latency[:, None] + self.expert_bytes / self.disk_bytes_per_second[:, None]


@dataclass(frozen=True)
class CostsFile:
    """What stands in such a file. servers: by name; links: (bytes per second, seconds one way) by two names. machines:
    as they stand there."""

    server: ServerCosts = ServerCosts()
    servers: Mapping[str, ServerCosts] = field(default_factory=dict)
    sizes: Sizes = Sizes()
    links: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    machines: tuple[Any, ...] = ()

    def check_names(self, names: Sequence[str]) -> None:
        """PyorchError where the file has costs of a server that is not among these."""
        for name in [*self.servers, *(end for pair in self.links for end in pair)]:
            if name not in names:
                raise PyorchError(f'there are costs of a server "{name}": the cluster has {", ".join(names)}')

    def of(
        self, names: Sequence[str], n_layers: int, latency: np.ndarray, bytes_per_second: np.ndarray, sizes: Sizes
    ) -> Costs:
        """For servers of these names, with links that are these where this file has no others. sizes: without None.

        latency, bytes_per_second: float64[n_servers, n_servers], from a server to a server.
        """
        latency, rate = latency.copy(), bytes_per_second.copy()
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if i != j and (one, other) in self.links:
                    rate[i, j], latency[i, j] = self.links[one, other]
        return Costs.of([self.servers.get(name, self.server) for name in names], sizes, n_layers, latency, rate)


def read_costs(path: str | os.PathLike[str]) -> CostsFile:
    """Raises FormatError, with the field, for a file that is none or has what cannot be."""
    value = json_file.read_any(path, KIND, VERSION, command="cluster measure")
    known = {"kind", "version", "server", "servers", "links", "machines",
             *(f"{one.name}_bytes" for one in fields(Sizes))}
    for name in sorted(value.keys() - known):
        raise FormatError(f'{path}: "{name}" is not known')
    server = _server(value.get("server", {}), ServerCosts(), f"{path}: server")
    servers = {name: _server(given, server, f"{path}: server {name}")
               for name, given in _object(value.get("servers", {}), f"{path}: servers").items()}
    sizes = {one.name: value[f"{one.name}_bytes"] for one in fields(Sizes) if f"{one.name}_bytes" in value}
    for name, size in sizes.items():
        several = name == "expert" and isinstance(size, list) and size
        for one in size if several else [size]:
            _number(one, f"{path}: {name}_bytes")
        sizes[name] = tuple(map(float, size)) if several else float(size)
    links = dict(_link(link, f"{path}: links[{i}]")
                 for i, link in enumerate(_list(value.get("links", []), f"{path}: links")))
    machines = tuple(_list(value.get("machines", []), f"{path}: machines"))
    return CostsFile(server, servers, Sizes(**sizes), links, machines)


def write_costs(path: str | os.PathLike[str], costs: CostsFile) -> None:
    """Writes it, whole or not at all. PyorchError where it cannot."""
    sizes = {f"{name}_bytes": size for name, size in asdict(costs.sizes).items() if size is not None}
    links = [{"from": one, "to": other, "bytes_per_second": rate, "latency": latency}
             for (one, other), (rate, latency) in costs.links.items()]
    value = {"kind": KIND, "version": VERSION, **sizes, "server": asdict(costs.server),
             "servers": {name: asdict(server) for name, server in costs.servers.items()}, "links": links,
             "machines": costs.machines}
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
