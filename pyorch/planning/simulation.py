"""What a division of memory gives on recorded routing: experts move between pools by their ranks, as at run time."""

from __future__ import annotations

import numpy as np

from pyorch.planning.makespan import MISSED, POOLS
from pyorch.planning.ranks import HALF_LIFE

# Ranks so near behind the last of a pool count as in it, as a share of its size (the tolerance margin delta of ZipMoE,
# section 3.4), as at run time (native/src/residency/pools.cpp).
TOLERANCE = 0.05

_COMPRESSED, _SM, _E = map(POOLS.index, "CSE")


def simulate(
    experts: np.ndarray, n_expert: int, capacities: np.ndarray, half_life: float = HALF_LIFE, n_warm: int = 0
) -> np.ndarray:
    """Plays recorded routing: int64[n_tokens, n_layers, 5], a token's experts that were in each of POOLS and in none.

    An expert that was used is whole then, so it may stay in any form: its rank among the frequencies of its layer,
    which fade with a half-life in tokens, says in which. It is that before the use, as at run time: with it, whoever
    was used last would outrank his equals. Of a pool that is too full the one used least often leaves; what leaves the
    compressed ones stays as the part for which there is a pool, if there is one.

    Args:
        experts: integer[n_tokens, n_layers, n_used], in the order in which they were needed.
        capacities: integer[n_layers, 4], experts in each of POOLS.
        n_warm: tokens in the beginning that do not count.
    """
    n_tokens, n_layers, n_used = experts.shape
    experts = experts.astype(np.int64)
    rows = np.arange(n_layers)[:, None]
    thresholds = np.where(capacities > 0, np.cumsum(capacities, axis=1) + np.round(TOLERANCE * capacities), 0)
    pool = np.full((n_layers, n_expert), MISSED)
    frequency = np.zeros((n_layers, n_expert))
    growth, use = 2.0 ** (1 / half_life), 1.0
    hits = np.zeros((n_tokens, n_layers, MISSED + 1), np.int64)
    for t, chosen in enumerate(experts):
        np.add.at(hits[t], (rows, pool[rows, chosen]), 1)
        rank = (frequency[:, None, :] > frequency[rows, chosen][:, :, None]).sum(axis=2)
        frequency[rows, chosen] += use
        use *= growth
        if use > 1e100:
            frequency, use = frequency / use, 1.0
        fits = rank[:, :, None] < thresholds[:, None, :]
        pool[rows, chosen] = np.where(fits.any(axis=2), fits.argmax(axis=2), MISSED)
        for p in range(len(POOLS)):
            _evict(pool, frequency, capacities, p)
    return hits[n_warm:]


def _evict(pool: np.ndarray, frequency: np.ndarray, capacities: np.ndarray, p: int) -> None:
    """Until no pool p has more than its capacity; in place."""
    while len(over := np.flatnonzero((pool == p).sum(axis=1) > capacities[:, p])):
        victims = np.where(pool[over] == p, frequency[over], np.inf).argmin(axis=1)
        parts = capacities[over][:, [_SM, _E]] > 0
        left = np.where(parts.any(axis=1), np.where(parts[:, 0], _SM, _E), MISSED)
        pool[over, victims] = left if p == _COMPRESSED else MISSED
