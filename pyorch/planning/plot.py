"""A picture of a plan: who is in which pool, and what that costs at other budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.planning.makespan import POOLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("full", "compressed", "signs and mantissas", "exponents")


def draw(
    inclusion: np.ndarray, capacities: np.ndarray, budgets: Sequence[float], costs: Mapping[str, Sequence[float]],
    directory: Path,
) -> Path:
    """Writes plan.png into a directory, which is made if need be; returns its path.

    Args:
        inclusion: float64[n_layers, n_expert], by rank. capacities: [n_layers, 4], of the plan.
        budgets: as shares of all experts; costs: milliseconds that a token waits at each of them, by what is done.

    Raises PyorchError without matplotlib, or where nothing can be written.
    """
    picture = partial(_plan, inclusion=inclusion, capacities=capacities, budgets=budgets, costs=costs)
    return pictures.save({"plan": picture}, directory)[0]


def _plan(
    figure_class: type[Figure], inclusion: np.ndarray, capacities: np.ndarray, budgets: Sequence[float],
    costs: Mapping[str, Sequence[float]],
) -> Figure:
    figure = figure_class(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    mean = inclusion.mean(axis=0)
    left.bar(np.arange(len(mean)) + 1, mean, width=1.0, color="0.75", label="in no pool")
    end = 0
    for pool, held in enumerate(capacities.mean(axis=0)):
        begin, end = end, min(end + round(held), len(mean))
        if end > begin:
            left.bar(np.arange(begin, end) + 1, mean[begin:end], width=1.0, color=f"C{pool}",
                     label=f"{POOLS[pool]}: {NAMES[pool]}")
    left.set_xlabel("rank of an expert, most used first")
    left.set_ylabel("probability that a token needs it")
    left.legend(fontsize=8)
    for name, values in costs.items():
        right.plot(100 * np.asarray(budgets), values, marker=".", label=name, linewidth=2 if name == "plan" else 1)
    right.set_xlabel("budget, % of the experts")
    right.set_ylabel("expected wait of a token, ms")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    return figure
