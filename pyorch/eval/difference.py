"""How much two measurements of the same things differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Of two averages over the same questions, or tokens. stderr: of the differences in pairs; nan for a single one."""

    mean: float
    stderr: float
