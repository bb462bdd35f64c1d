"""Problems of placement."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pyorch.cluster.placement.placement import Placement
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


@st.composite
def problems(draw, sizes: str) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    n_servers, n_layers, n_expert = (draw(st.integers(1, most)) for most in (4, 4, 9))
    frequencies = skewed(rng, (n_servers, n_layers, n_expert))
    frequencies[rng.random(frequencies.shape) < draw(st.sampled_from([0, 0.3, 1]))] = 0
    n_experts = rng.integers(1, n_expert + 1, n_layers) if draw(st.booleans()) else np.full(n_layers, n_expert)
    of_layers = np.full(n_layers, 5) if sizes == "equal" else rng.integers(1, 8, n_layers)
    share = draw(st.floats(0.2, 3.0))
    parts = rng.dirichlet(np.ones(n_servers * 3)).reshape(n_servers, 3)
    capacities = [(share * n_experts @ of_layers * part[: rng.integers(1, 4)]).astype(int) for part in parts]
    return problem_of(frequencies, [tuple(map(int, of)) for of in capacities], of_layers, n_experts)


def used_bytes(placement: Placement, problem: Problem) -> np.ndarray:
    """Counted expert by expert."""
    used = [[0] * len(devices) for devices in problem.capacities]
    for server, layer, expert in zip(*np.nonzero(placement.held)):
        assert expert < problem.n_experts[layer]
        used[server][placement.device[server, layer, expert]] += int(problem.sizes[layer])
    return np.concatenate(used)
