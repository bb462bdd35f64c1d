"""Checks the machine of each server of a cluster, before any server starts."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pyorch import ports
from pyorch.cluster.config import Cluster, Server
from pyorch.cluster.placement.placement import Placement, refuse_lacking
from pyorch.cluster.tls import check_keys
from pyorch.errors import PyorchError
from pyorch.sidecars import packs
from pyorch.sidecars.container import fingerprint
from pyorch.sizes import format_bytes

PORTS_TRIED = 3


@dataclass(frozen=True)
class Examined:
    """The facts about a server's machine. has_share: whether the model has only a share of the experts."""

    fingerprint: str
    port: int
    peer_port: int
    budget_bytes: int
    has_share: bool


def here(cluster: Cluster, placement: Placement | None) -> dict[str, Examined]:
    """Checks servers that run on this machine.

    Returns:
        The facts, by server.

    Raises:
        PyorchError: A server cannot run, or two of them need the same port.
    """
    return _examined(cluster, lambda server: _examine(model_of(cluster, server), server, keys_of(cluster), placement))


def there(
    ray: ModuleType, cluster: Cluster, nodes: Mapping[str, str], placement: Placement | None
) -> dict[str, Examined]:
    """Checks servers on their Ray nodes, as nodes_of() returns them.

    Returns:
        The facts, by server.

    Raises:
        PyorchError: A server cannot run, or two of them need the same port.
    """
    return _examined(cluster, lambda server: _examine_there(ray, cluster, server, nodes[server.name], placement))


def check_ubatch(found: Mapping[str, Examined], settings: Mapping[str, Any], flags: Sequence[str]) -> None:
    """Checks that no server with a share computes more tokens at once than the others accept.

    Raises:
        PyorchError: The ubatch is too large.
    """
    shares = [name for name, one in found.items() if one.has_share]
    if not shares:
        return
    from pyorch.llama.context_plan import MAX_SHARE_UBATCH  # loads llama.cpp, which is slow
    from pyorch.serve.llama_server import UBATCH, Flags

    n_ubatch = Flags([*flags, *(("-ub", settings["n_ubatch"]) if settings.get("n_ubatch") else ())]).number(UBATCH, 512)
    if n_ubatch > MAX_SHARE_UBATCH:
        raise PyorchError(f"server {shares[0]}: it has a share of the experts, and other servers take no more than "
                          f"{MAX_SHARE_UBATCH} rows for one of them: a ubatch of {n_ubatch} tokens is too wide")


def nodes_of(ray: ModuleType, cluster: Cluster) -> dict[str, str]:
    """Returns the address of each server's Ray node."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.util.get_node_ip_address()
    nodes = {}
    for server in cluster.servers:
        wanted = _addresses(server.address)
        is_here = any(address.startswith("127.") or address == "::1" for address in wanted)
        fitting = [
            node["NodeManagerAddress"] for node in alive
            if node["NodeManagerAddress"] in wanted or node["NodeManagerHostname"] == server.address
            or (is_here and node["NodeManagerAddress"] == here)
        ]
        if not fitting:
            addresses = ", ".join(sorted(node["NodeManagerAddress"] for node in alive))
            raise PyorchError(f"server {server.name} has the address {server.address}, where the Ray cluster has no "
                              f"node: it has {addresses}")
        nodes[server.name] = fitting[0]
    return nodes


def keys_of(cluster: Cluster) -> str | None:
    return None if cluster.endpoints.keys is None else str(cluster.endpoints.keys)


def model_of(cluster: Cluster, server: Server) -> str:
    return str(cluster.model_of(server).resolve())


def _examine(
    model: str, server: Server, keys: str | None = None, placement: Placement | None = None
) -> Examined | str:
    """Checks if a server could run here, with a file of API keys and a plan. Returns the facts or the reason."""
    try:
        if keys is not None:
            check_keys(keys)
        if server.tls is not None:
            server.tls.check(server.address)
        with packs.open_model(model, share=placement is not None) as model_map:
            info, share = model_map.info, packs.share_of(model_map)
            refuse_lacking(share, placement, server.name)
            budget = sum(server.device_bytes(info.slots_bytes))
            if model_map.layers and budget < info.floor_bytes:
                return (f"its memory of {format_bytes(budget)} is below the model's least memory, "
                        f"{format_bytes(info.floor_bytes, round_up=True)} (twice the experts of a token, and one)")
            found = _free_ports(server.address, server.port, server.peer_port)
            return Examined(fingerprint(model_map), *found, budget, share is not None)
    except PyorchError as error:
        return str(error)


def _examined(cluster: Cluster, examine: Callable[[Server], Examined | str]) -> dict[str, Examined]:
    """Checks each server.

    Raises:
        PyorchError: A server cannot run, or two of them need the same port.
    """
    found: dict[str, Examined] = {}
    taken: dict[tuple[str, int], str] = {}
    for server in cluster.servers:
        for _ in range(PORTS_TRIED):  # two servers sometimes get the same free port
            one = examine(server)
            if isinstance(one, str):
                raise PyorchError(f"server {server.name}: {one}")
            where = {(address, port) for address in _addresses(server.address) for port in (one.port, one.peer_port)}
            clashes = sorted(taken.keys() & where)
            if not clashes:
                break
        else:
            raise PyorchError(f"server {server.name} and server {taken[clashes[0]]} are both to listen at port "
                              f"{clashes[0][1]} of {clashes[0][0]}")
        found[server.name] = one
        taken |= dict.fromkeys(where, server.name)
    _check_same(cluster, found)
    return found


def _examine_there(
    ray: ModuleType, cluster: Cluster, server: Server, node: str, placement: Placement | None
) -> Examined | str:
    """Checks a server on its machine."""
    remote = ray.remote(_examine).options(num_cpus=0, max_retries=0, resources={f"node:{node}": 0.001})
    try:
        return ray.get(remote.remote(model_of(cluster, server), server, keys_of(cluster), placement))
    except ray.exceptions.RayError as error:
        last_line = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))][-1]
        raise PyorchError(f"server {server.name}: pyorch does not run on {node}: {last_line}") from None


def _check_same(cluster: Cluster, found: Mapping[str, Examined]) -> None:
    """Checks that all servers have the same model.

    Raises:
        PyorchError: Two servers have different models.
    """
    first, *others = cluster.names
    for name in others:
        if found[name].fingerprint != found[first].fingerprint:
            raise PyorchError(f"server {name} has another model than server {first}: its fingerprint is "
                              f"{found[name].fingerprint[:12]}, that of {first} {found[first].fingerprint[:12]}")


def _addresses(host: str) -> set[str]:
    """Returns the addresses of a host's name."""
    with contextlib.suppress(OSError):
        return {host, *(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))}
    return {host}


def _free_ports(host: str, *wanted: int) -> list[int]:
    """Returns the ports, with a free port for each 0.

    Raises:
        PyorchError: A port cannot be used.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        try:
            for port in wanted:
                found.append(stack.enter_context(ports.held(host, port)))
        except OSError as error:
            what = "; name another one in cluster.toml, or 0 for any" if error.errno == errno.EADDRINUSE else (
                "; a server on another machine needs a Ray cluster with that machine in it (--address)")
            raise PyorchError(f"cannot listen on {host} port {port}: {error.strerror or error}{what}") from None
    return found
