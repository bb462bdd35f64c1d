"""What DanceMoE's placement is worth beside the best one that there is."""

from __future__ import annotations

import numpy as np
import pytest
from placement_problems import problem_of, skewed
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from pyorch.cluster.placement.dance import place
from pyorch.cluster.placement.problem import Problem


def optimum(problem: Problem) -> float:
    """The least cost, eq. 2, of all placements with coverage and memory: by integer programming."""
    n_servers, n_layers, n_expert = problem.shape
    servers, n_devices = problem.device_server, len(problem.device_bytes)
    # x: whether a device holds an expert; each of its server's devices counts as local, once
    n = n_devices * n_layers * n_expert
    index = np.arange(n).reshape(n_devices, n_layers, n_expert)
    memory, coverage = lil_array((n_devices, n)), lil_array((n_layers * n_expert, n))
    once = lil_array((n_servers * n_layers * n_expert, n))
    for device, server in enumerate(servers):
        for layer in range(n_layers):
            for expert in range(n_expert):
                at = index[device, layer, expert]
                memory[device, at] = problem.sizes[layer]
                coverage[layer * n_expert + expert, at] = 1
                once[(server * n_layers + layer) * n_expert + expert, at] = 1
    solved = milp(
        -problem.frequencies[servers].ravel(), integrality=np.ones(n), bounds=Bounds(0, 1), constraints=[
            LinearConstraint(memory.tocsr(), ub=problem.device_bytes), LinearConstraint(coverage.tocsr(), lb=1),
            LinearConstraint(once.tocsr(), ub=1),
        ],
    )
    assert solved.success, solved.message
    return problem.frequencies.sum() + solved.fun


@pytest.mark.parametrize("users", ["of their own tasks", "alike", "of one expert in a layer"])
def test_what_is_local_is_within_1_minus_1_over_e_of_the_optimum(users: str) -> None:
    rng = np.random.default_rng(5)
    shares = []
    for several_sizes in (False, True) * 20:
        frequencies = skewed(rng, (3, 3, 8), rng.uniform(0.05, 2))
        if users == "alike":
            frequencies = 0.7 * frequencies[:1] + 0.3 * frequencies
        elif users == "of one expert in a layer":
            frequencies[:, 0] = 0.01 * rng.random((3, 8))
            frequencies[:, 0, rng.integers(8)] = 1
        sizes = rng.integers(2, 5, 3) if several_sizes else np.full(3, 4)
        memory = rng.uniform(1, 2.5) * 8 * sizes.sum() * np.array([1, 1, 2]) / 4 + 4
        problem = problem_of(frequencies, [int(n) for n in memory], sizes)
        local = frequencies.sum() - place(problem).cost(frequencies)
        shares.append(local / (frequencies.sum() - optimum(problem)))
    assert max(shares) <= 1 + 1e-9 and np.mean(shares) > 0.9
    assert min(shares) >= 1 - 1 / np.e
