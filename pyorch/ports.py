"""Ports for servers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the ports that the kernel gives to connections
_FIRST = 20000  # Ray's workers use lower ports
_TRIED = 20


@contextlib.contextmanager
def held(host: str, port: int = 0) -> Iterator[int]:
    """Yields a port to listen on, reserved while the block runs. A server may listen on it after the block.

    For the port 0 it takes a free one outside the range from which the kernel gives ports to connections. Otherwise a
    connection could take it before the server listens.

    Raises:
        OSError: It is not possible to listen on the host or the port.
    """
    with _bound(host, port, again=True) if port else _any_free(host) as probe:
        yield probe.getsockname()[1]


def free(host: str = "127.0.0.1") -> int:
    """Returns a port that is free now.

    Raises:
        OSError: It is not possible to listen on the host.
    """
    with held(host) as port:
        return port


def _any_free(host: str) -> socket.socket:
    for _ in range(_TRIED if _FREELY_CHOSEN else 0):
        with contextlib.suppress(OSError):
            return _bound(host, _FREELY_CHOSEN[int.from_bytes(os.urandom(4), "little") % len(_FREELY_CHOSEN)])
    return _bound(host, 0)


def _bound(host: str, port: int, again: bool = False) -> socket.socket:
    """Returns a bound socket. again: bind even if ended connections still hold the port, as llama-server does."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
        probe.bind(where)
    except BaseException:
        probe.close()
        raise
    return probe


def _freely_chosen() -> range:
    try:
        end = int(_GIVEN.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        end = 0  # not Linux
    return range(_FIRST, max(end, _FIRST))


_FREELY_CHOSEN = _freely_chosen()
