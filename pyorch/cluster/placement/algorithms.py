"""All algorithms by name, and what each placement must keep: memory and coverage."""

from __future__ import annotations

import numpy as np

from pyorch.cluster.placement.baselines import eplb, redundance, smartmoe, uniform
from pyorch.cluster.placement.dance import dance
from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.errors import BudgetError, PyorchError
from pyorch.sizes import format_bytes

ALGORITHMS = {
    "dance": dance, "uniform": uniform, "redundance": redundance, "smartmoe": smartmoe, "eplb": eplb,
}


def place(problem: Problem, algorithm: str = "dance", partial: bool = False, seed: int = 0) -> Placement:
    """A placement that keeps the memory of every device, in which some server holds each expert.

    Args:
        algorithm: a key of ALGORITHMS. seed: of those that draw.
        partial: where memory does not hold all experts, place as many as it holds. Then none of a layer lies on two
            servers while another one of it lies on none; such experts are read from disk.

    Raises PyorchError for an algorithm that is not known; BudgetError where some expert has no place and partial is
    False.
    """
    if algorithm not in ALGORITHMS:
        raise PyorchError(f'algorithm "{algorithm}" is not known: use {", ".join(ALGORITHMS)}')
    device = ALGORITHMS[algorithm](problem, np.random.default_rng(seed))
    n_experts = tuple(problem.n_experts.tolist())
    placement = Placement(problem.servers, problem.layers, n_experts, device, algorithm)
    if (n := placement.n_uncovered) and not partial:
        raise BudgetError(
            f"{n} of {sum(n_experts)} experts have no place: the servers have memory for "
            f"{format_bytes(int(problem.device_bytes.sum()))} of experts, and all of them need "
            f"{format_bytes(problem.experts_bytes)}, each device in whole experts"
        )
    return placement
