"""The routers of layers: how they select experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pyorch.errors import PyorchError
from pyorch.library.bindings import array, ffi, given
from pyorch.library.choices import gatings
from pyorch.library.numerics import np

_ARRAYS = ("gate", "bias", "selection_bias", "norm")


@dataclass(frozen=True)
class Router:
    """The computation with which a layer selects its experts. Arrays are float32, or None.

    Attributes:
        gate: [n_expert, n_embd].
        bias: [n_expert], added to the logits.
        selection_bias: [n_expert], added to the probabilities for the selection only.
        norm: [n_embd], of the RMS normalization that makes the input.
        eps: Of the normalization.
        gating: Makes probabilities of logits, one of pyorch.library.choices.gatings(). "softmax-selected": the weights
            are a softmax of the selected logits.
        n_used: Experts of a token.
        n_groups: Groups of experts.
        n_groups_used: Select only from this many groups, whose two best experts have the highest sums.
        normalized: Weights are divided by their sum.
        scale: Multiplies the weights at the end.
    """

    gate: np.ndarray
    bias: np.ndarray | None
    selection_bias: np.ndarray | None
    norm: np.ndarray | None
    eps: float
    gating: str
    n_used: int
    n_groups: int = 1
    n_groups_used: int = 1
    normalized: bool = False
    scale: float = 1.0

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that are not None, by name."""
        return {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}

    def choice(self) -> dict[str, object]:
        """Returns the fields without the arrays, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _ARRAYS}


def to_struct(router: Router):
    """Makes a pyorch_router *.

    Raises:
        PyorchError: An array has another shape, or the gating function is unknown.
    """
    n_expert, n_embd = router.gate.shape
    for name, width in (("bias", n_expert), ("selection_bias", n_expert), ("norm", n_embd)):
        values = getattr(router, name)
        if values is not None and values.shape != (width,):
            raise PyorchError(f"the {name} of a router with {n_expert} experts and {n_embd} inputs has the shape "
                              f"{values.shape}, not ({width},)")
    choice = router.choice() | {"gating": gatings().choose(router.gating).value}
    arrays = {name: array("float", values) for name, values in router.arrays().items()}
    return given("pyorch_router", n_expert=n_expert, n_embd=n_embd, **choice, **arrays)


def from_struct(raw) -> Router:
    """Makes a copy of a pyorch_router."""

    def copied(pointer, *shape: int) -> np.ndarray | None:
        if not pointer:
            return None
        return np.frombuffer(ffi.buffer(pointer, 4 * math.prod(shape)), np.float32).reshape(shape).copy()

    n_expert, n_embd = raw.n_expert, raw.n_embd
    return Router(
        gate=copied(raw.gate, n_expert, n_embd), bias=copied(raw.bias, n_expert),
        selection_bias=copied(raw.selection_bias, n_expert), norm=copied(raw.norm, n_embd), eps=raw.eps,
        gating=gatings().named(raw.gating), n_used=raw.n_used, n_groups=raw.n_groups, n_groups_used=raw.n_groups_used,
        normalized=bool(raw.normalized), scale=raw.scale,
    )
