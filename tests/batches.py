"""The batch shapes in which a model is compared with another, and what it answers to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

N_UBATCH = 16
CONTEXT = dict(n_ctx=512, n_batch=128, n_ubatch=N_UBATCH, n_seq_max=2)

# tokens and sequences of one llama_decode to float32[n_tokens, n_vocab]
Decode = Callable[[list[int], list[int]], np.ndarray]


def tokens(n: int, seed: int = 0) -> list[int]:
    """Ids that are no special tokens."""
    return np.random.default_rng(seed).integers(8, 376, n).tolist()


def one_token(decode: Decode) -> list[np.ndarray]:
    return [decode([token], [0]) for token in tokens(3)]


def seven_tokens(decode: Decode) -> list[np.ndarray]:
    return [decode(tokens(7), [0] * 7)]


def longer_than_a_ubatch(decode: Decode) -> list[np.ndarray]:
    n = 2 * N_UBATCH + 5
    return [decode(tokens(n), [0] * n), decode(tokens(1), [0])]


def two_sequences(decode: Decode) -> list[np.ndarray]:
    prompt = decode(tokens(20), [0, 1] * 10)
    return [prompt, *(decode(tokens(2, seed), [0, 1]) for seed in range(1, 4))]


SHAPES = (one_token, seven_tokens, longer_than_a_ubatch, two_sequences)


def digests(decode: Decode, clear: Callable[[], None]) -> dict[str, str]:
    """By shape: a hash of the bytes of all logits, which must say something."""
    result = {}
    for shape in SHAPES:
        clear()
        logits = shape(decode)
        assert all(np.isfinite(rows).all() and rows.std() > 0 for rows in logits), shape.__name__
        result[shape.__name__] = hashlib.sha256(b"".join(rows.tobytes() for rows in logits)).hexdigest()
    return result
