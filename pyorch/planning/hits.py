"""How many of a token's experts are in each pool, where pools hold experts by rank."""

from __future__ import annotations

import numpy as np

from pyorch.planning.makespan import MISSED
from pyorch.planning.ranks import take_one


def interval_counts(q: np.ndarray, n_used: int) -> np.ndarray:
    """How many experts independent draws take of each interval of ranks, up to n_used (Algorithm 2, of one layer).

    Args:
        q: float64[n_expert], selection probabilities by rank.

    Returns:
        float64[n_expert + 1, n_expert + 1, n_used + 1]: at [i, j, h] the probability of h of the ranks i to j - 1.
        Where j < i it is 0.
    """
    n_expert = len(q)
    counts = np.zeros((n_expert + 1, n_expert + 1, n_used + 1))
    counts[np.arange(n_expert + 1), np.arange(n_expert + 1), 0] = 1
    for j in range(n_expert):
        take_one(counts[: j + 1, j], q[j], counts[: j + 1, j + 1])
    return counts


def pattern_probabilities(counts: np.ndarray, ends: np.ndarray, patterns: np.ndarray) -> np.ndarray:
    """Pr(pattern | n_used experts in all), float64[n_splits, n_patterns] (section 3.4).

    Args:
        counts: of interval_counts().
        ends: integer[n_splits, 4], the rank behind the last one of each pool; pools lie one behind the other.
        patterns: of hit_patterns().
    """
    n_expert, n_used = counts.shape[1] - 1, counts.shape[2] - 1
    begins = np.concatenate([np.zeros((len(ends), 1), ends.dtype), ends], axis=1)
    ends = np.concatenate([ends, np.full((len(ends), 1), n_expert)], axis=1)
    joint = None
    for pool in range(MISSED + 1):
        if not patterns[:, pool].any():
            continue  # its interval is empty
        of_pool = counts[begins[:, pool], ends[:, pool]][:, patterns[:, pool]]
        joint = of_pool if joint is None else joint * of_pool
    return joint / counts[0, n_expert, n_used]


def mean_hits(inclusion: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Mean numbers of a token's experts in each pool and in none, float64[..., n_layers, 5].

    Args:
        inclusion: float64[n_layers, n_expert], by rank.
        ends: integer[..., n_layers, 4], as above.
    """
    up_to = np.concatenate([np.zeros((len(inclusion), 1)), np.cumsum(inclusion, axis=1)], axis=1)
    at = up_to[np.arange(len(inclusion))[:, None], ends]
    first, last = np.zeros((*ends.shape[:-1], 1)), np.broadcast_to(up_to[:, -1:], (*ends.shape[:-1], 1))
    return np.diff(np.concatenate([first, at, last], axis=-1), axis=-1)
