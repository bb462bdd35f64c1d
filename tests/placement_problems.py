"""Problems of placement."""

from __future__ import annotations

import numpy as np

from pyorch.cluster.placement.problem import Problem


def problem_of(frequencies: np.ndarray, capacities, sizes=1, n_experts=None) -> Problem:
    """capacities: of each server, a number for one device, or of its devices."""
    n_servers, n_layers, _ = np.shape(frequencies)
    devices = tuple((of,) if isinstance(of, (int, np.integer)) else tuple(of) for of in capacities)
    return Problem(tuple(f"s{i}" for i in range(n_servers)), tuple(range(n_layers)), np.asarray(frequencies, float),
                   np.broadcast_to(sizes, n_layers), devices, n_experts)


def skewed(rng: np.random.Generator, shape: tuple[int, int, int], evenness: float = 0.3) -> np.ndarray:
    """Activations whose evenness differs between layers, as between servers who uses which expert."""
    alphas = evenness * rng.gamma(2.0, size=shape[:2])
    return np.stack([[rng.dirichlet(np.full(shape[2], alpha + 0.02)) for alpha in row] for row in alphas])
