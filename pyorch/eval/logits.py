"""What logits say of tokens, and of each other."""

from __future__ import annotations

import numpy as np

from pyorch.llama.context import log_softmax


def log_probabilities(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of the token that follows each row, float64[n]. logits: [n, n_vocab], tokens: int[n]."""
    # A row at a time: float64 of all rows would be large.
    return np.array([log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)], np.float64)


def kl_divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Of each row's distribution from the reference's, in nats, float64[n]. Both are [n, n_vocab]."""
    result = np.empty(len(reference), np.float64)
    for i, (p, q) in enumerate(zip(reference, logits, strict=True)):
        p, q = log_softmax(p), log_softmax(q)
        result[i] = (np.exp(p) * (p - q)).sum()
    return result


def top1_agreements(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Whether the most probable token is the same, bool[n]."""
    return reference.argmax(-1) == logits.argmax(-1)
