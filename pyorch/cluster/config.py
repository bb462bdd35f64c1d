"""Reads cluster.toml: the servers of a cluster, their memory, and the network between them.

docs/reference/cluster.md lists all keys with their defaults. Relative paths start at the file's directory.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.cluster.tls import Tls
from pyorch.errors import FormatError, PyorchError
from pyorch.files import read_toml
from pyorch.settings.rows import ROW_TYPES
from pyorch.sizes import Amount

READS = ("faster", "last")

MAX_DEVICES = 4096  # in a cluster

# The limit of a device, so that the bytes of all devices fit into 64 bits.
MAX_BYTES = 1 << 50
MAX_SHARE = 100.0

SHORTEST_INTERVAL = 1.0  # seconds: a look costs each server some milliseconds


@dataclass(frozen=True)
class Link:
    """The link between two servers, alike in both directions. latency: seconds, one way."""

    bytes_per_second: float = 125e6
    latency: float = 0.2e-3


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes:
        name: Its name.
        memory: The memory for experts of each device.
        address: Its address.
        port: The port of the OpenAI endpoint, 0 for any free one.
        peer_port: The port for other servers, 0 for any free one.
        model: Its file of the model; None: the cluster's path.
        tls: Certificates for connections to other servers; None: plain TCP.
    """

    name: str
    memory: tuple[Amount, ...]
    address: str = "127.0.0.1"
    port: int = 0
    peer_port: int = 0
    model: Path | None = None
    tls: Tls | None = None

    @property
    def n_devices(self) -> int:
        return len(self.memory)

    def device_bytes(self, experts_bytes: int) -> tuple[int, ...]:
        """Returns the bytes for experts of each device. experts_bytes: the size of all experts of the model."""
        return tuple(amount.of(experts_bytes) for amount in self.memory)


@dataclass(frozen=True)
class Scheduler:
    """The scheduler's settings.

    Attributes:
        enabled: Whether the cluster has a scheduler.
        interval: Seconds between decisions.
        costs: The file that `pyorch cluster measure` wrote. None: links are as in the cluster.toml, other costs are the
            defaults of pyorch.cluster.costs.
    """

    enabled: bool = True
    interval: float = 300.0
    costs: Path | None = None


@dataclass(frozen=True)
class Endpoints:
    """The settings of users' endpoints.

    Attributes:
        keys: A file of API keys, one on each line; None: requests need no key.
        tls: Whether users connect with HTTPS, with the servers' certificates.
    """

    keys: Path | None = None
    tls: bool = False


@dataclass(frozen=True)
class Cluster:
    """The content of a cluster.toml.

    Attributes:
        path: The file.
        servers: The servers.
        model: The model's file, unless a server has another path.
        network: The usual link.
        links: Other links, by two names in alphabetical order.
        scheduler: The scheduler's settings.
        plain: The user allows unencrypted connections between machines.
        reads: Servers read experts of others if that is faster than a request.
        rows: The type of numbers in messages.
        endpoints: The settings of users' endpoints.
    """

    path: Path
    servers: tuple[Server, ...]
    model: Path | None = None
    network: Link = Link()
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    scheduler: Scheduler = Scheduler()
    plain: bool = False
    reads: bool = True
    rows: str = "f32"
    endpoints: Endpoints = Endpoints()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(server.name for server in self.servers)

    def index(self, name: str) -> int:
        """Returns the index of a server.

        Raises:
            PyorchError: No server has that name.
        """
        if name not in self.names:
            raise PyorchError(f'{self.path} has no server "{name}": it has {", ".join(self.names)}')
        return self.names.index(name)

    def link(self, one: str, other: str) -> Link:
        """Returns the link between two servers."""
        return self.links.get(_pair(one, other), self.network)

    @property
    def bandwidths(self) -> np.ndarray:
        """Bytes per second between two servers, float64[n, n]; infinite within a server."""
        return np.array([[np.inf if a == b else self.link(a, b).bytes_per_second for b in self.names]
                         for a in self.names])

    @property
    def latencies(self) -> np.ndarray:
        """Seconds one way between two servers, float64[n, n]; zero within a server."""
        return np.array([[0.0 if a == b else self.link(a, b).latency for b in self.names] for a in self.names])

    @property
    def required_model(self) -> Path:
        """The model.

        Raises:
            PyorchError: The file names none.
        """
        if self.model is None:
            raise PyorchError(f'{self.path} names no model: a line such as model = "olmoe.gguf" at its top does')
        return self.model

    def model_of(self, server: Server) -> Path:
        """Returns a server's file of the model.

        Raises:
            PyorchError: The cluster.toml names none.
        """
        return server.model or self.required_model

    @property
    def open_to_anybody(self) -> tuple[str, ...]:
        """The servers that other machines reach without an API key."""
        return () if self.endpoints.keys is not None else tuple(
            server.name for server in self.servers if not _is_loopback(server.address))

    def check_privacy(self) -> None:
        """Checks that servers of several machines use TLS, unless the user allows plain connections.

        Raises:
            PyorchError: They would use plain connections.
        """
        for server in self.servers:
            if server.tls is None and not self.plain and not _is_loopback(server.address):
                raise PyorchError(
                    f"{self.path}: server {server.name} is at {server.address}, and the servers' traffic, with the "
                    "cluster's token, could be read on the way: name certificates under [tls], or say `plain = true` "
                    "under [network] if the network is private"
                )


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Reads a cluster.toml.

    Raises:
        FormatError: A key is missing or wrong; the message names the place in the file.
    """
    path = Path(path)
    top = _Table(read_toml(path), str(path))
    model = top.take("model", str, None)
    read = top.take("read", str, READS[0])
    if read not in READS:
        raise FormatError(f'{path}: read is {_show(read)}, not {" or ".join(map(_show, READS))}')
    table = _Table(top.take("network", dict, {}), f"{path}: [network]")
    plain = table.take("plain", bool, False)
    rows = table.take("rows", str, ROW_TYPES[0])
    if rows not in ROW_TYPES:
        raise FormatError(f'{table.where}: rows is {_show(rows)}, not {" or ".join(map(_show, ROW_TYPES))}')
    network = _link(table, Link())
    files = _tls_files(top.take("tls", dict, {}), f"{path}: [tls]", path.parent)
    servers = tuple(_server(value, f"{path}: [[server]] {i + 1}", path.parent, files)
                    for i, value in enumerate(top.take("server", list)))
    _check(servers, path)
    links = _links(top.take("link", list, []), network, servers, path)
    endpoints = _endpoints(_Table(top.take("endpoints", dict, {}), f"{path}: [endpoints]"), path.parent)
    if endpoints.tls and servers[0].tls is None:
        raise FormatError(f"{path}: [endpoints] says tls = true, without certificates: name them under [tls]")
    scheduler = _scheduler(_Table(top.take("scheduler", dict, {}), f"{path}: [scheduler]"), path.parent)
    top.finish()
    return Cluster(path, servers, None if model is None else path.parent / model, network, links, scheduler,
                   plain=plain, reads=read == READS[0], rows=rows, endpoints=endpoints)


class _Table:
    """A table of the file. take() removes one key after another; finish() refuses the remaining ones."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise FormatError(f"{where} is {_show(values)}, not a table")
        self._left, self.where = dict(values), where
        self._known: list[str] = []

    def take(self, key: str, kinds: type | tuple[type, ...], *default: Any) -> Any:
        """Returns the value of a key, or the default if there is one."""
        self._known.append(key)
        if key not in self._left:
            if not default:
                misspelt = difflib.get_close_matches(key, self._left, 1)
                instead = f', and "{misspelt[0]}" is not known' if misspelt else ""
                raise FormatError(f"{self.where}: {key} is missing{instead}")
            return default[0]
        value = self._left.pop(key)
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value) not in kinds:
            raise FormatError(f"{self.where}: {key} is {_show(value)}, not {' or '.join(_KINDS[k] for k in kinds)}")
        return value

    def take_whole(self, key: str, low: int, high: int, default: int) -> int:
        """Returns a whole number within bounds."""
        value = self.take(key, int, default)
        if not low <= value <= high:
            raise FormatError(f"{self.where}: {key} is {_show(value)}, not a whole number from {low} to {high}")
        return value

    def finish(self) -> None:
        for key in self._left:
            close = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise FormatError(f'{self.where}: "{key}" is not known: {hint}{", ".join(self._known)} are')


_KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "a table", bool: "true or false"}


def _server(value: Any, where: str, directory: Path, tls: Mapping[str, Path]) -> Server:
    table = _Table(value, where)
    name = table.take("name", str)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise FormatError(f"{where}: name {_show(name)} is not made of letters, digits, dots, dashes and underscores")
    address = table.take("address", str, Server.address)
    if not re.fullmatch(r"[A-Za-z0-9.:_-]+", address):
        raise FormatError(f"{where}: address {_show(address)} is neither an address nor a host's name")
    model = table.take("model", str, None)
    server = Server(name, _memory(table), address, table.take_whole("port", 0, 65535, Server.port),
                    table.take_whole("peer_port", 0, 65535, Server.peer_port),
                    None if model is None else directory / model,
                    _tls(dict(tls) | _tls_files(table.take("tls", dict, {}), f"{where}: tls", directory), where))
    table.finish()
    return server


def _tls_files(value: Any, where: str, directory: Path) -> dict[str, Path]:
    table = _Table(value, where)
    names = {one.name: table.take(one.name, str, None) for one in fields(Tls)}
    table.finish()
    return {name: (directory / text).absolute() for name, text in names.items() if text is not None}


def _tls(files: Mapping[str, Path], where: str) -> Tls | None:
    for one in fields(Tls):
        if files and one.name not in files:
            needed = ", ".join(one.name for one in fields(Tls))
            raise FormatError(f"{where}: tls names no {one.name}: it needs {needed}")
    return Tls(**files) if files else None


def _memory(table: _Table) -> tuple[Amount, ...]:
    """Reads the memory of each device."""
    value = table.take("memory", (str, int, list))
    if isinstance(value, list):
        n = table.take_whole("devices", 1, MAX_DEVICES, max(1, len(value)))
        if n != len(value):
            raise FormatError(f"{table.where}: memory names {len(value)} devices, where there are {n}")
        return tuple(_amount(part, table) for part in value)
    n = table.take_whole("devices", 1, MAX_DEVICES, 1)
    whole = _amount(value, table)
    if n == 1:
        return (whole,)
    if whole.n_bytes is not None:
        return (Amount(whole.n_bytes // n),) * n
    return (Amount(share=whole.share / n),) * n


def _amount(value: Any, table: _Table) -> Amount:
    try:
        amount = Amount.parse(value)
    except ValueError:
        amount = None
    if amount is None or (amount.n_bytes or 0) < 0:
        raise FormatError(f'{table.where}: memory {_show(value)} is neither a size such as "2GiB" nor a share of all '
                          f'experts such as "40%"')
    if (amount.n_bytes or 0) > MAX_BYTES or (amount.share or 0) > MAX_SHARE:
        raise FormatError(f"{table.where}: memory {_show(value)} is more than 1 PiB, or 100 times all experts")
    return amount


def _link(table: _Table, default: Link) -> Link:
    bandwidth, latency = table.take("bandwidth", str, None), table.take("latency", str, None)
    link = Link(
        default.bytes_per_second if bandwidth is None else _rate(bandwidth, table.where),
        default.latency if latency is None else _seconds(latency, f"{table.where}: latency", like="1ms"),
    )
    table.finish()
    return link


def _links(values: list, network: Link, servers: tuple[Server, ...], path: Path) -> dict[tuple[str, str], Link]:
    names = [server.name for server in servers]
    links: dict[tuple[str, str], Link] = {}
    for i, value in enumerate(values):
        table = _Table(value, f"{path}: [[link]] {i + 1}")
        ends = table.take("between", list)
        if len(ends) != 2 or any(end not in names for end in ends) or ends[0] == ends[1]:
            raise FormatError(f"{table.where}: between is {_show(ends)}, not two of the servers {', '.join(names)}")
        if (pair := _pair(*ends)) in links:
            raise FormatError(f"{table.where}: there is another link between {' and '.join(pair)}")
        links[pair] = _link(table, network)
    return links


def _scheduler(table: _Table, directory: Path) -> Scheduler:
    interval = table.take("interval", str, None)
    seconds = Scheduler.interval if interval is None else _seconds(interval, f"{table.where}: interval", like="5min")
    if seconds < SHORTEST_INTERVAL:
        raise FormatError(f"{table.where}: interval {_show(interval)} is below {SHORTEST_INTERVAL:g} s")
    costs = table.take("costs", str, None)
    scheduler = Scheduler(table.take("enabled", bool, True), seconds, None if costs is None else directory / costs)
    table.finish()
    return scheduler


def _endpoints(table: _Table, directory: Path) -> Endpoints:
    keys, tls = table.take("keys", str, None), table.take("tls", bool, False)
    table.finish()
    if tls and keys is None:
        raise FormatError(f"{table.where}: tls = true needs keys, a file of API keys: without keys, programs on a "
                          "server's own machine may change its settings, and behind TLS every client looks like one")
    return Endpoints(None if keys is None else (directory / keys).absolute(), tls)


def _check(servers: tuple[Server, ...], path: Path) -> None:
    if not servers:
        raise FormatError(f"{path} has no server: each has a table [[server]]")
    if sum(server.n_devices for server in servers) > MAX_DEVICES:
        raise FormatError(f"{path} has more than {MAX_DEVICES} devices")
    if (without := [server.name for server in servers if server.tls is None]) and len(without) < len(servers):
        raise FormatError(f"{path}: server {without[0]} has no tls, and others have: name its certificate, or that of "
                          "all under [tls]")
    names, endpoints = set(), set()
    for server in servers:
        if server.name in names:
            raise FormatError(f'{path}: two servers have the name "{server.name}"')
        names.add(server.name)
        for port in (server.port, server.peer_port):
            if port and (server.address, port) in endpoints:
                raise FormatError(f"{path}: port {port} of {server.address} is named twice")
            endpoints.add((server.address, port))


def _is_loopback(host: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
           "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _rate(text: str, where: str) -> float:
    """Returns bytes per second."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kKMGT]i?|)(bit|b|B)(?:/s|ps)\s*", text, re.ASCII)
    rate = 0.0 if match is None else float(match[1]) * _SCALES[match[2]] / (1 if match[3] == "B" else 8)
    if not 0 < rate < 1e18:
        raise FormatError(f'{where}: bandwidth {_show(text)} is not one such as "500Mbit/s" or "60MB/s"')
    return rate


def _seconds(text: str, where: str, like: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(us|ms|s|min|h)\s*", text, re.ASCII)
    seconds = float("inf") if match is None else float(match[1]) * _SECONDS[match[2]]
    if not seconds < 1e6:
        raise FormatError(f'{where} {_show(text)} is not one such as "{like}"')
    return seconds


def _show(value: Any) -> str:
    """Formats a value of the file in one line."""
    try:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    except ValueError:  # a whole number with too many digits for Python
        return f"of more than {sys.get_int_max_str_digits()} digits"
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= 60 else f"{text[:57]}..."
