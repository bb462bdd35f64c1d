"""The connections of a server to its peers, and the placement of experts on them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.cluster.placement.placement import Move, Placement
from pyorch.cluster.replicas import in_turn
from pyorch.cluster.tls import Tls
from pyorch.cluster.tunnel import Tunnel
from pyorch.errors import PyorchError
from pyorch.runtime.engine import HERE, LOOPBACK, Engine
from pyorch.runtime.statistics import Peer


@dataclass(frozen=True)
class _Met:
    address: str
    port: int
    number: int  # in the engine


class Peers:
    """The connections of one server to its peers. May be used by several threads.

    The placement says which servers hold an expert. If this server holds it, it computes it here; otherwise one of the
    met servers that hold it computes it. If none of them answers, this server reads the expert from its own disk.

    close() ends the process that speaks TLS; so does the end of this process.
    """

    def __init__(
        self, engine: Engine, name: str, token: str, model: str, tls: Tls | None = None, rows: str = "f32"
    ) -> None:
        """Args:
            engine: The engine, with a context of its model.
            name: This server's name in placements.
            token: The cluster's secret.
            model: The model's fingerprint (pyorch.sidecars.container.fingerprint).
            tls: Certificates for connections to all others; None: plain TCP.
            rows: The type of numbers in messages, see Engine.connect().

        Raises:
            PyorchError: A certificate cannot be used.
        """
        self._engine, self._name, self._token, self._model, self._rows = engine, name, token, model, rows
        self.tunnel = None if tls is None else Tunnel(tls)
        self._met: dict[str, _Met] = {}
        self.placement: Placement | None = None  # the present one
        self._changing = threading.Lock()

    def listen(self, address: str = LOOPBACK, port: int = 0, n_threads: int = 1) -> int:
        """Starts to compute for others, on `n_threads` threads. Returns the port."""
        if self.tunnel is None:
            return self._engine.listen(self._token, self._model, address, port, n_threads)
        return self.tunnel.listen(address, port, self._engine.listen(self._token, self._model, LOOPBACK, 0, n_threads))

    def close(self) -> None:
        """Ends TLS connections to all servers."""
        if self.tunnel is not None:
            self.tunnel.close()

    def meet(self, name: str, address: str, port: int, timeout: float = 2.0) -> None:
        """Connects to another server, which has started or has a new address.

        If a server returns at the same address, it is reconnected without a call, unless its link was cut off.

        Args:
            name: The server's name.
            address: Its address.
            port: Its port.
            timeout: Seconds of silence after which the connection is lost.

        Raises:
            PyorchError: The server cannot be reached, or refuses.
        """
        with self._changing:
            before = self._met.get(name)
            if before is not None and (before.address, before.port) == (address, port) and (
                self._engine.peer(before.number).joined
            ):
                return
        number = self._connect(address, port, timeout)  # takes long if the server does not answer
        with self._changing:
            before = self._met.get(name)
            self._met[name] = _Met(address, port, number)
            self._place()
            if before is not None:
                self._engine.disconnect(before.number)

    def follow(self, placement: Placement) -> None:
        """Follows a placement from now on. It may be called at any time; no request fails because of it.

        Raises:
            PyorchError: The placement does not fit this server or its model.
        """
        layers = dict(zip(placement.layers, placement.n_experts, strict=True))
        if self._name not in placement.servers:
            raise PyorchError(f"the placement is for {', '.join(placement.servers)}, this server is {self._name}")
        if layers != self._engine.n_expert:
            raise PyorchError(f"the placement is for {len(layers)} layers of another model than this server's "
                              f"{len(self._engine.n_expert)}")
        with self._changing:
            self.placement = placement
            self._place()

    def move(self, moves: Sequence[Move]) -> None:
        """Changes the present placement by these moves.

        Raises:
            PyorchError: There is no placement.
        """
        with self._changing:
            if self.placement is None:
                raise PyorchError("there is no placement to change")
            self.placement = self.placement.changed(moves)
            self._place({move.layer for move in moves})

    def met(self) -> dict[str, bool]:
        """Returns for each met server, by name, whether it is connected now."""
        with self._changing:
            return {name: self._engine.peer(met.number).joined for name, met in self._met.items()}

    def peers(self) -> list[Peer]:
        """Returns the engine's data about the met servers."""
        with self._changing:
            return [self._engine.peer(met.number) for met in self._met.values()]

    def _connect(self, address: str, port: int, timeout: float) -> int:
        if self.tunnel is None:
            return self._engine.connect(address, port, self._token, self._model, timeout, self._rows)
        before = self.tunnel.n_errors
        try:
            inner = self.tunnel.port_to(address, port)
            return self._engine.connect(LOOPBACK, inner, self._token, self._model, timeout, self._rows)
        except PyorchError as error:
            why = self.tunnel.error_after(before) or str(error)
            raise PyorchError(f"server {address}:{port} cannot be joined by TLS: {why}") from None

    def _place(self, layers: Collection[int] | None = None) -> None:
        """Tells the engine which servers hold experts. layers: indices; None: all."""
        placement = self.placement
        if placement is None:
            return
        numbers = np.array([self._met[name].number if name in self._met else HERE for name in placement.servers])
        own = placement.servers.index(self._name)
        for layer in range(len(placement.layers)) if layers is None else sorted(layers):
            il, n_expert = placement.layers[layer], placement.n_experts[layer]
            held = placement.held[:, layer, :n_expert]
            places = in_turn(held & ~held[own] & (numbers != HERE)[:, None], own, np.arange(n_expert) + layer)
            self._engine.set_placement(il, np.where(places >= 0, numbers[places], HERE))
