"""Made-up routings, of one kind of temporal structure each, and what the best fixed choice of experts hits."""

from __future__ import annotations

import numpy as np


def _choose(random: np.random.Generator, popularity: np.ndarray, n_used: int) -> np.ndarray:
    """[n_layers, n_used] different experts of each layer, drawn by popularity [n_layers, n_expert]."""
    keys = np.log(popularity) + random.gumbel(size=popularity.shape)
    return np.argsort(-keys, axis=1)[:, :n_used]


def _zipf(random: np.random.Generator, n_layers: int, n_expert: int, steepness: float) -> np.ndarray:
    popularity = np.arange(1, n_expert + 1.0) ** -steepness
    return np.stack([random.permutation(popularity) for _ in range(n_layers)])


def uniform(random: np.random.Generator, n_tokens: int, n_layers: int, n_expert: int, n_used: int) -> np.ndarray:
    """uint16[n_tokens, n_layers, n_used]: nothing tells one expert from another."""
    even = np.ones((n_layers, n_expert))
    return np.stack([_choose(random, even, n_used) for _ in range(n_tokens)]).astype(np.uint16)


def popular(random: np.random.Generator, n_tokens: int, n_layers: int, n_expert: int, n_used: int) -> np.ndarray:
    """Some experts are used more often than others, always; when they were used last says nothing."""
    popularity = _zipf(random, n_layers, n_expert, 1.0)
    return np.stack([_choose(random, popularity, n_used) for _ in range(n_tokens)]).astype(np.uint16)


def recent(random: np.random.Generator, n_tokens: int, n_layers: int, n_expert: int, n_used: int) -> np.ndarray:
    """What was used in the last tokens is used again, all experts in the long run equally often."""
    popularity = np.ones((n_layers, n_expert))
    tokens = []
    for _ in range(n_tokens):
        tokens.append(_choose(random, popularity, n_used))
        popularity = 1 + 0.6 * (popularity - 1)
        np.put_along_axis(popularity, tokens[-1], 40.0, axis=1)
    return np.stack(tokens).astype(np.uint16)


def drifting(random: np.random.Generator, n_tokens: int, n_layers: int, n_expert: int, n_used: int) -> np.ndarray:
    """Topics of 100 to 200 tokens, each with popular experts of its own."""
    tokens: list[np.ndarray] = []
    while len(tokens) < n_tokens:
        popularity = _zipf(random, n_layers, n_expert, 1.5)
        tokens += [_choose(random, popularity, n_used) for _ in range(random.integers(100, 200))]
    return np.stack(tokens[:n_tokens]).astype(np.uint16)


def cyclic(random: np.random.Generator, n_tokens: int, n_layers: int, n_expert: int, n_used: int) -> np.ndarray:
    """Each token is mostly followed by the same next one: all are used equally often, and what is used next was used
    longest ago."""
    length = 48 // n_used
    cycle = np.stack([random.permutation(n_expert)[: length * n_used] for _ in range(n_layers)])
    at, tokens = 0, []
    for _ in range(n_tokens):
        at = (at + 1) % length if random.random() < 0.95 else int(random.integers(length))
        tokens.append(cycle[:, at * n_used : (at + 1) * n_used])
    return np.stack(tokens).astype(np.uint16)


def static_hit_rate(before: np.ndarray, after: np.ndarray, n_expert: int, capacity: int) -> float:
    """Of a cache that holds, all the time, the experts that were used most before. Both [n_tokens, n_layers,
    n_used]."""
    earlier, later = (
        np.concatenate([np.bincount(layer.ravel(), minlength=n_expert) for layer in used.transpose(1, 0, 2)])
        for used in (before, after)
    )
    return float(later[np.argsort(-earlier)[:capacity]].sum() / later.sum())
