"""The coefficients of costs.py, with their defaults: help shows them, which must not wait for numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
