"""Distributions over the vocabulary."""

from __future__ import annotations

from pyorch.library.numerics import np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of one row of logits, float64[n_vocab]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
