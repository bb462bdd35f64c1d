"""Statistics of routing decisions, on plain arrays of one layer.

experts: integer[n_tokens, k], the selected ids; probs: float[n_tokens, k], their probabilities in the same
order; router: float[n_tokens, n_expert], a whole distribution. token_weights, float[n_tokens], counts some
tokens less than others (BuddyMoE, section 3.3).
"""

from __future__ import annotations

import itertools

import numpy as np


def activation_counts(experts: np.ndarray, n_expert: int, token_weights: np.ndarray | None = None) -> np.ndarray:
    """How often each expert was selected, A(i) of BuddyMoE's eq. 4: float64[n_expert]."""
    weights = None if token_weights is None else np.repeat(token_weights, experts.shape[1])
    return np.bincount(experts.ravel(), weights, n_expert).astype(np.float64)


def coactivation(
    experts: np.ndarray, probs: np.ndarray, n_expert: int, token_weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """How often two experts were selected for the same token, M(i, j) of BuddyMoE's eq. 4.

    Args:
        probs: as they shall weigh; the paper takes them renormalized(), section 3.3.

    Returns:
        The count, and the sum of min(p_i, p_j): both symmetric float64[n_expert, n_expert], diagonal zero.
    """
    token_weights = np.ones(len(experts)) if token_weights is None else np.asarray(token_weights, np.float64)
    binary, weighted = np.zeros((2, n_expert * n_expert))
    ids = experts.astype(np.int64)
    for a, b in itertools.combinations(range(experts.shape[1]), 2):
        pairs = ids[:, a] * n_expert + ids[:, b]
        smaller = np.minimum(probs[:, a], probs[:, b])
        binary += np.bincount(pairs, token_weights, n_expert * n_expert)
        weighted += np.bincount(pairs, token_weights * smaller, n_expert * n_expert)
    square = (binary.reshape(n_expert, n_expert), weighted.reshape(n_expert, n_expert))
    return square[0] + square[0].T, square[1] + square[1].T


def renormalized(probs: np.ndarray) -> np.ndarray:
    """Probabilities of the selected experts that sum to 1: float64[n_tokens, k]."""
    probs = np.maximum(probs.astype(np.float64), np.finfo(np.float32).tiny)
    return probs / probs.sum(axis=1, keepdims=True)


def token_activating_entropy(probs: np.ndarray) -> np.ndarray:
    """TAE of BuddyMoE's eq. 1, float64[n_tokens] in [0, 1]: the entropy of the renormalized probabilities of
    the k selected experts, to the base k. 0 for k = 1, where there is nothing to be uncertain about."""
    p = renormalized(probs)
    if p.shape[1] == 1:
        return np.zeros(len(p))
    return np.clip(-(p * np.log(p)).sum(axis=1) / np.log(p.shape[1]), 0.0, 1.0)


def margin(probs: np.ndarray) -> np.ndarray:
    """p_max - p_2nd of the renormalized probabilities (BuddyMoE, section 3.1): float64[n_tokens]; 1 for k = 1."""
    p = renormalized(probs)
    if p.shape[1] == 1:
        return np.ones(len(p))
    two = np.partition(p, p.shape[1] - 2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0]
