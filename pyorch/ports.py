"""Ports that servers will listen on."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of which connections are given one
_FIRST = 20000  # Ray gives its workers those below
_TRIED = 20


@contextlib.contextmanager
def held(host: str, port: int = 0) -> Iterator[int]:
    """A port that can be listened on and that nobody else gets while the block runs: for 0 one that is free.

    That is one which nobody is given without asking for it: any connection could have taken another before a server
    listens there, which it may do only when the block is left.

    Raises:
        OSError: the host or the port cannot be listened on.
    """
    with _bound(host, port, again=True) if port else _any_free(host) as probe:
        yield probe.getsockname()[1]


def free(host: str = "127.0.0.1") -> int:
    """One that is free now. OSError where the host cannot be listened on."""
    with held(host) as port:
        return port


def _any_free(host: str) -> socket.socket:
    for _ in range(_TRIED if _FREELY_CHOSEN else 0):
        with contextlib.suppress(OSError):
            return _bound(host, _FREELY_CHOSEN[int.from_bytes(os.urandom(4), "little") % len(_FREELY_CHOSEN)])
    return _bound(host, 0)


def _bound(host: str, port: int, again: bool = False) -> socket.socket:
    """again: also where connections that ended a while ago still have the port, as llama-server listens."""
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
