"""The part of an engine that computes with other servers: it listens, joins those that do, and sends them rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.library.bindings import array, check, default, ffi, lib, new, string
from pyorch.library.numerics import np
from pyorch.runtime.handle import EngineHandle
from pyorch.runtime.statistics import Counts, read

LOOPBACK = "127.0.0.1"
HERE = -1  # in a placement: this server computes the expert


@dataclass(frozen=True)
class Served:
    """What was computed for others since the engine listens. The names are those of pyorch_served.

    slots: rows times experts. error: why somebody was refused last, "" if nobody was. buffer_bytes: of memory in which
    it is computed, beside the budget.
    """

    connections: int
    refused: int
    requests: int
    failed: int
    slots: int
    compute_ns: int
    error: str
    buffer_bytes: int


@dataclass(frozen=True)
class Peer:
    """Another server, as this one sees it. The names are those of pyorch_peer_info.

    same_kernels: what it computes is the same, bit for bit. error: why it was lost or failed last, "" if never.
    """

    joined: bool
    same_kernels: bool
    requests: int
    failed: int
    slots: int
    bytes_sent: int
    bytes_received: int
    times_lost: int
    error: str


class RemoteStats(Counts, struct="pyorch_remote_counts"):
    """Counters since the engine was made."""


class RemoteCalls(EngineHandle):
    """Who computes for whom. Numbers and tokens travel as they are: for a network that nobody else listens to, or for a
    tunnel."""

    def listen(
        self, token: str, model: str, address: str = LOOPBACK, port: int = 0, n_threads: int = 1
    ) -> int:
        """Computes experts for other servers from now on.

        Args:
            token: what they must know. model: the fingerprint that theirs must have
                (pyorch.sidecars.container.fingerprint).
            port: 0: a free one. n_threads: that compute for others.

        Returns:
            The port. A layer is computed once a context of the model was made.
        """
        texts = _texts(address=address, token=token, model=model)
        config = default("pyorch_listen_config", port=port, n_threads=n_threads, **texts)
        out = ffi.new("int32_t *")
        check(lib.pyorch_listen(self.handle, config, out))
        return out[0]

    def stop_listening(self) -> None:
        """Ends all connections of others."""
        check(lib.pyorch_stop_listening(self.handle))

    def served(self) -> Served:
        """PyorchError if it does not listen."""
        raw = new("pyorch_served")
        check(lib.pyorch_get_served(self.handle, raw))
        return _read(Served, raw)

    def connect(self, address: str, port: int, token: str, model: str, timeout: float = 2.0) -> int:
        """Joins a server that listens; whenever it is lost, it is joined again.

        Args:
            timeout: seconds. A server that is silent for so long is lost.

        Returns:
            Its number, for set_placement(). PyorchError with the reason where it cannot be joined now.
        """
        texts = _texts(address=address, token=token, model=model)
        config = default("pyorch_peer_config", port=port, timeout_ms=round(timeout * 1000), **texts)
        out = ffi.new("int32_t *")
        status = lib.pyorch_connect(self.handle, config, out)
        if status != lib.PYORCH_OK:
            raise PyorchError(string(lib.pyorch_last_error()))
        return out[0]

    def disconnect(self, peer: int) -> None:
        """What it had a place for is computed here from now on."""
        check(lib.pyorch_disconnect(self.handle, peer))

    def peer(self, peer: int) -> Peer:
        """What is known of a server, by the number that connect() gave it. PyorchError if there is none."""
        raw = new("pyorch_peer_info")
        check(lib.pyorch_get_peer(self.handle, peer, raw))
        return _read(Peer, raw)

    def set_placement(self, il: int, peers: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> None:
        """Who can compute each expert of a layer: numbers of connect(), or HERE.

        Args:
            peers: int[n_expert] or int[n_expert, n_places]. HERE ends a list, and where it is empty, this server
            computes.
                Of several that are there, the one is asked that has least to do in the ubatch. An expert that is
                resident here is computed here.

        At any time: a ubatch under way keeps to what it began with.
        """
        ids = np.ascontiguousarray(peers, np.int32)
        if ids.ndim not in (1, 2):
            raise PyorchError(f"a placement has a row for each expert, not the shape {list(ids.shape)}")
        n_places = 1 if ids.ndim == 1 else ids.shape[1]
        check(lib.pyorch_set_placement(self.handle, il, array("int32_t[]", ids), len(ids), n_places))

    def allow_reads(self, allowed: bool) -> None:
        """Whether an expert that another server has is read from the own disk where that is estimated to be faster.

        Until this is called, it is read only when no server is there that has it. The results are the same.
        """
        check(lib.pyorch_allow_reads(self.handle, allowed))

    def remote_stats(self) -> RemoteStats:
        """What other servers computed for this one since the engine was made."""
        raw = new("pyorch_remote_counts")
        check(lib.pyorch_get_remote_counts(self.handle, raw))
        return read(RemoteStats, raw)


def _texts(**texts: str) -> dict[str, object]:
    """char arrays, which must live as long as the struct that points to them is used."""
    encoded = {}
    for name, text in texts.items():
        if "\0" in text:
            raise PyorchError(f"a {name} cannot have a zero in it")
        encoded[name] = ffi.new("char[]", text.encode())
    return encoded


def _read(cls, raw):
    values = {name: getattr(raw, name) for name in cls.__dataclass_fields__}
    values["error"] = string(raw.error)
    for name in ("joined", "same_kernels"):
        if name in values:
            values[name] = bool(values[name])
    return cls(**values)
