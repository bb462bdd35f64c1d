"""Buddy lists for the small model that nobody measured."""

from __future__ import annotations

import functools

import numpy as np

from pyorch.sidecars.buddies import Buddies, LayerBuddies

N_EXPERT, N_LAYERS, K_MAX = 64, 8, 8


@functools.cache
def random_buddies(seed: int, n_expert: int = N_EXPERT, k_max: int = K_MAX) -> Buddies:
    """Not to be changed: whoever asks for the same has the same."""
    rng = np.random.default_rng(seed)
    layers = {}
    for il in range(N_LAYERS):
        ids = np.full((n_expert, k_max), -1, np.int32)
        q = np.zeros((n_expert, k_max), np.float32)
        for e in range(n_expert):
            n = int(rng.integers(1, k_max + 1))
            ids[e, :n] = rng.permutation([j for j in range(n_expert) if j != e])[:n]
            q[e, :n] = -np.sort(-rng.dirichlet(np.ones(n)) * 0.9)
        percentiles = np.linspace(0, 1, 101, dtype=np.float32)
        layers[il] = LayerBuddies(il, ids, q, rng.integers(0, 100, n_expert), percentiles, percentiles)
    return Buddies(layers, dict.fromkeys(layers, 1.0), 1000)


def complete_buddies(k_max: int = K_MAX) -> Buddies:
    """Every expert has k_max of them."""
    rng = np.random.default_rng(1)
    layers = {}
    for il in range(N_LAYERS):
        ids = np.stack([rng.permutation(np.delete(np.arange(N_EXPERT), e))[:k_max] for e in range(N_EXPERT)])
        q = np.tile(np.linspace(0.2, 0.02, k_max), (N_EXPERT, 1))
        percentiles = np.linspace(0, 1, 101).astype(np.float32)
        layers[il] = LayerBuddies(
            il, ids.astype(np.int32), q.astype(np.float32), rng.integers(1, 1000, N_EXPERT), percentiles, percentiles,
        )
    return Buddies(layers, dict.fromkeys(layers, 1.0), 1000)


def buddies_with_far_ones_first(far: dict[int, np.ndarray]) -> Buddies:
    """All peers of each expert, those of far, bool[N_EXPERT], first: they are a bit more similar than the others."""
    layers = {}
    for il, of_layer in far.items():
        order = np.argsort(~of_layer, kind="stable")
        ids = np.stack([order[order != e] for e in range(N_EXPERT)]).astype(np.int32)
        percentiles = np.linspace(0, 1, 101).astype(np.float32)
        layers[il] = LayerBuddies(il, ids, np.where(of_layer[ids], 0.01, 0.008).astype(np.float32),
                                  np.ones(N_EXPERT, np.int64), percentiles, percentiles)
    return Buddies(layers, dict.fromkeys(layers, 1.0), 1000)
