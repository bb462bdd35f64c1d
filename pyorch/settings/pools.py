"""The division of expert memory among the forms of a compressed pack (ZipMoE)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyorch.errors import PyorchError

# The order in which a layer's experts are read and recovered from a compressed pack: the order of the kernels, or
# ZipMoE's algorithm 1, by expert or with the paper's order of reads. In the order of pyorch_recovery.
KERNELS, *_ = RECOVERIES = ("kernels", "affinity", "exponents-first")

_TOLERANCE = 1e-6  # of the sum


def recovery(given: str) -> str:
    """Returns `given` if it is one of RECOVERIES."""
    if not isinstance(given, str):
        raise TypeError(given)
    return RECOVERIES[RECOVERIES.index(given)]


@dataclass(frozen=True)
class Pools:
    """Shares of the budget, with the sum 1 (ZipMoE, section 3.2: the pools F, C, S, E).

    Attributes:
        full: The share for decoded experts, which kernels can use.
        compressed: The share for compressed experts, which need decoding but no read.
        sm_only: The share for signs and mantissas; the exponents of these experts are read.
        e_only: The share for exponents; the signs and mantissas of these experts are read.
    """

    full: float = 1.0
    compressed: float = 0.0
    sm_only: float = 0.0
    e_only: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.shares):
            raise PyorchError(f"shares of pools must be from 0 to 1, and {self} has others")
        if not math.isclose(sum(self.shares), 1, abs_tol=_TOLERANCE):
            raise PyorchError(
                f"the sum of the shares of all pools must be 1, and that of {self} is {sum(self.shares):g}")

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The shares in the order of the library."""
        return self.full, self.compressed, self.sm_only, self.e_only

    @classmethod
    def parse(cls, text: str | Pools) -> Pools:
        """Parses the four shares F,C,S,E, such as "0.6,0.4,0,0"."""
        if isinstance(text, Pools):
            return text
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
        try:
            full, compressed, sm_only, e_only = map(float, text.split(","))
        except ValueError:
            raise PyorchError(f'pools "{text}" is not four shares F,C,S,E such as 0.6,0.4,0,0') from None
        return cls(full, compressed, sm_only, e_only)

    def __str__(self) -> str:
        """Returns text that parse() reads."""
        return ",".join(f"{share:g}" for share in self.shares)
