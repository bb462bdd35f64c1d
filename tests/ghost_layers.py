"""Ghosts for the small model that nobody fitted."""

from __future__ import annotations

import functools

import numpy as np

from pyorch.sidecars.ghosts import Ghosts, LayerGhosts

N_EXPERT, N_LAYERS, N_EMBD = 64, 8, 128


@functools.cache
def random_ghosts(seed: int) -> Ghosts:
    """Some experts have none. Not to be changed: whoever asks for the same has the same."""
    rng = np.random.default_rng(seed)
    layers = {}
    for il in range(N_LAYERS):
        rank = rng.integers(-1, 4, N_EXPERT).astype(np.int32)
        n_rows = int(np.maximum(rank, 0).sum())
        # As a file of 16 bits holds them.
        mean, down, up = (rng.normal(0, 0.1, shape).astype(np.float16).astype(np.float32)
                          for shape in ((N_EXPERT, N_EMBD), (n_rows, N_EMBD), (n_rows, N_EMBD)))
        energy = rng.uniform(0.5, 2, N_EXPERT).astype(np.float32)
        layers[il] = LayerGhosts(rank, mean, down, up, energy * rng.uniform(0, 1, N_EXPERT).astype(np.float32), energy)
    return Ghosts(layers, 1000, 2)


def rows_of(layer: LayerGhosts, expert: int) -> slice:
    """Its rows in down and up."""
    begin = int(np.maximum(layer.rank[:expert], 0).sum())
    return slice(begin, begin + max(int(layer.rank[expert]), 0))


def outputs_of(layer: LayerGhosts, expert: int, inputs: np.ndarray) -> np.ndarray:
    """float32[n, n_out] of an expert's ghost for router inputs float32[n, n_in]. REQUIRES: rank[expert] >= 0"""
    rows = rows_of(layer, expert)
    return layer.mean[expert] + inputs @ layer.down[rows].T @ layer.up[rows]
