"""What a server of a cluster computes for the others, and they for it: a placement, made true by connections."""

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
    """What one server and its peers compute for each other. May be used by several threads.

    An expert that this server holds by the placement is computed here, another one by one of those servers that hold
    it and were met. What nobody holds who is there, this server reads from its own disk.

    Args:
        engine: whose model has a context. name: of this server in placements.
        token: of the cluster. model: fingerprint of the model (pyorch.sidecars.container.fingerprint).
        tls: spoken to all others; None: plain TCP. PyorchError where a certificate cannot be used. close() ends the
            process that speaks it; so does the end of this one.
        rows: what numbers travel as, see Engine.connect().
    """

    def __init__(
        self, engine: Engine, name: str, token: str, model: str, tls: Tls | None = None, rows: str = "f32"
    ) -> None:
        self._engine, self._name, self._token, self._model, self._rows = engine, name, token, model, rows
        self.tunnel = None if tls is None else Tunnel(tls)
        self._met: dict[str, _Met] = {}
        self.placement: Placement | None = None  # that is followed
        self._changing = threading.Lock()

    def listen(self, address: str = LOOPBACK, port: int = 0, n_threads: int = 1) -> int:
        """Computes for others from now on; returns the port. n_threads: that compute for them."""
        if self.tunnel is None:
            return self._engine.listen(self._token, self._model, address, port, n_threads)
        return self.tunnel.listen(address, port, self._engine.listen(self._token, self._model, LOOPBACK, 0, n_threads))

    def close(self) -> None:
        """Speaks TLS to nobody any more."""
        if self.tunnel is not None:
            self.tunnel.close()

    def meet(self, name: str, address: str, port: int, timeout: float = 2.0) -> None:
        """Another server is there, from now on or at another place. PyorchError where it cannot be joined.

        One that goes and comes back at the same place is joined again without this, unless it was cut off.
        timeout: seconds. Whoever is silent for so long is lost.
        """
        with self._changing:
            before = self._met.get(name)
            if before is not None and (before.address, before.port) == (address, port) and (
                self._engine.peer(before.number).joined
            ):
                return
        number = self._connect(address, port, timeout)  # which takes long where nobody answers
        with self._changing:
            before = self._met.get(name)
            self._met[name] = _Met(address, port, number)
            self._place()
            if before is not None:
                self._engine.disconnect(before.number)

    def follow(self, placement: Placement) -> None:
        """What the placement says is true from now on; at any time, and no request fails by it.

        PyorchError for one that does not fit this server or its model.
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
        """The placement that is followed, but for these experts. PyorchError where none is followed."""
        with self._changing:
            if self.placement is None:
                raise PyorchError("no placement is followed that could be changed")
            self.placement = self.placement.changed(moves)
            self._place({move.layer for move in moves})

    def met(self) -> dict[str, bool]:
        """The other servers by name, and whether each is joined now."""
        with self._changing:
            return {name: self._engine.peer(met.number).joined for name, met in self._met.items()}

    def peers(self) -> list[Peer]:
        """What is known of those that were met."""
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
        """layers: indices; None: all."""
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
