"""What a replay measures that a table shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measures:
    """hit_rate: uses of experts that found the expert resident. tpot_ms: from one token of a request to the next;
    stall_ms: of it, without a matrix to compute with; nan if nothing was decoded. bytes_per_token: read.

    useful, late, wasted: experts read ahead that were used and had arrived, were used but had not, were not used; and
    their bytes. predict_wall_ms: what the forecasts of a token really took, here.
    """

    n_tokens: int
    hit_rate: float
    tpot_ms: float
    tokens_per_second: float  # decoded, of all requests together
    stall_ms: float
    bytes_per_token: float
    useful: int
    late: int
    wasted: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    predict_wall_ms: float
