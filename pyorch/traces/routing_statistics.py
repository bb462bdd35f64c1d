"""Statistics of routing decisions, on plain arrays of one layer.

experts: integer[n_tokens, k], the selected ids; probs: float[n_tokens, k], their probabilities in the same
order; router: float[n_tokens, n_expert], a whole distribution.
"""

from __future__ import annotations

import itertools

import numpy as np


def activation_counts(experts: np.ndarray, n_expert: int) -> np.ndarray:
    """Counts how often each expert was selected, A(i) of BuddyMoE's eq. 4: float64[n_expert]."""
    return np.bincount(experts.ravel(), minlength=n_expert).astype(np.float64)


def coactivation(
    experts: np.ndarray, n_expert: int, probs: np.ndarray | None = None, token_weights: np.ndarray | None = None
) -> np.ndarray:
    """Counts how often two experts were selected for the same token, M(i, j) of BuddyMoE's eq. 4.

    Args:
        probs: A token counts as the smaller probability of the two experts (section 3.3). None: it counts as 1.
        token_weights: float64[n_tokens], the weight of each token. None: all are 1.

    Returns:
        A symmetric float64[n_expert, n_expert], whose diagonal is zero.
    """
    pairs = np.zeros(n_expert * n_expert)
    ids = experts.astype(np.int64)
    for a, b in itertools.combinations(range(experts.shape[1]), 2):
        weights = token_weights
        if probs is not None:
            smaller = np.minimum(probs[:, a], probs[:, b])
            weights = smaller if weights is None else smaller * weights
        pairs += np.bincount(ids[:, a] * n_expert + ids[:, b], weights, n_expert * n_expert)
    square = pairs.reshape(n_expert, n_expert)
    return square + square.T


def renormalized(probs: np.ndarray) -> np.ndarray:
    """Scales the probabilities of the selected experts to a sum of 1: float64[n_tokens, k]."""
    probs = np.maximum(probs.astype(np.float64), np.finfo(np.float32).tiny)
    return probs / probs.sum(axis=1, keepdims=True)


def token_activating_entropy(probs: np.ndarray) -> np.ndarray:
    """Computes TAE of BuddyMoE's eq. 1, float64[n_tokens] in [0, 1].

    It is the entropy, to the base k, of the renormalized probabilities of the k selected experts; 0 if k = 1.
    """
    p = renormalized(probs)
    if p.shape[1] == 1:
        return np.zeros(len(p))
    return np.clip(-(p * np.log(p)).sum(axis=1) / np.log(p.shape[1]), 0.0, 1.0)


def margin(probs: np.ndarray) -> np.ndarray:
    """Computes p_max - p_2nd of the renormalized probabilities (BuddyMoE, section 3.1): float64[n_tokens].

    1 if k = 1.
    """
    p = renormalized(probs)
    if p.shape[1] == 1:
        return np.ones(len(p))
    two = np.partition(p, p.shape[1] - 2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0]
