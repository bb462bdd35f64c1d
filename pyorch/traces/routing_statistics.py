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


def renormalized(probs: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Probabilities of the selected experts that sum to 1: float64[n_tokens, k].

    With a temperature T, softmax(z / T) restricted to them (BuddyMoE, section 3.1), z being the logarithm of
    a softmax's probabilities up to a constant.
    """
    probs = np.maximum(probs.astype(np.float64), np.finfo(np.float32).tiny)
    if temperature != 1.0:
        probs = (probs / probs.max(axis=1, keepdims=True)) ** (1 / temperature)
    return probs / probs.sum(axis=1, keepdims=True)


def token_activating_entropy(probs: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """TAE of BuddyMoE's eq. 1, float64[n_tokens] in [0, 1]: the entropy of the renormalized probabilities of
    the k selected experts, to the base k. 0 for k = 1, where there is nothing to be uncertain about."""
    p = renormalized(probs, temperature)
    if p.shape[1] == 1:
        return np.zeros(len(p))
    return np.clip(-(p * np.log(p)).sum(axis=1) / np.log(p.shape[1]), 0.0, 1.0)


def margin(probs: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """p_max - p_2nd of the renormalized probabilities (BuddyMoE, section 3.1): float64[n_tokens]; 1 for k = 1."""
    p = renormalized(probs, temperature)
    if p.shape[1] == 1:
        return np.ones(len(p))
    two = np.partition(p, p.shape[1] - 2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0]


def routing_entropy(router: np.ndarray) -> np.ndarray:
    """Entropy of each row's distribution to the base of its length: float64[n_tokens], 1 where it is even."""
    return token_activating_entropy(router)


def gini(counts: np.ndarray) -> float:
    """Gini coefficient: 0 where all experts are used alike, near 1 where one has everything; nan without uses."""
    counts = np.sort(np.asarray(counts, np.float64))
    n, total = len(counts), counts.sum()
    if total == 0:
        return float("nan")
    return float((2 * np.arange(1, n + 1) - n - 1) @ counts / (n * total))


class LruDistances:
    """How deep in a layer's LRU stack the selected experts lay: one pass for all cache sizes.

    A cache of C experts holds the C that were used last, those of one token in the order of their slots. A
    selected expert is a hit if it was there before the token came; then all of the token's experts move to
    the top. So an expert at depth d is a hit in every cache of more than d experts.
    """

    def __init__(self, n_expert: int) -> None:
        # [d]: uses at depth d; [n_expert]: first uses, which no cache holds
        self.counts = np.zeros(n_expert + 1, np.int64)
        self._last_use = np.full(n_expert, -1, np.int64)
        self._n_tokens = 0

    def add(self, experts: np.ndarray) -> None:
        """The next tokens of the layer, integer[n_tokens, k], ids of a token distinct."""
        n_expert = len(self._last_use)
        rows = max(1, (1 << 22) // (n_expert * experts.shape[1]))  # bounds the comparison below to 4 MiB
        for start in range(0, len(experts), rows):
            self._add(experts[start : start + rows].astype(np.int64), n_expert)

    def _add(self, experts: np.ndarray, n_expert: int) -> None:
        n, k = experts.shape
        # [t, e]: when e was last used before token t; every use has a time of its own
        last = np.full((n + 1, n_expert), -1, np.int64)
        last[0] = self._last_use
        times = (self._n_tokens + np.arange(n))[:, None] * k + np.arange(k)
        np.put_along_axis(last[1:], experts, times, axis=1)
        np.maximum.accumulate(last, axis=0, out=last)
        own = np.take_along_axis(last[:-1], experts, axis=1)
        depth = (last[:-1, None, :] > own[:, :, None]).sum(axis=2)
        depth[own < 0] = n_expert
        self.counts += np.bincount(depth.ravel(), minlength=n_expert + 1)
        self._last_use = last[-1]
        self._n_tokens += n

    def hit_rates(self) -> np.ndarray:
        """float64[n_expert + 1]: the share of uses that a cache of 0, 1, ... n_expert experts would have hit."""
        total = max(1, self.counts.sum())
        return np.concatenate([[0], np.cumsum(self.counts[:-1])]) / total
