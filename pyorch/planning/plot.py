"""A picture of a plan: who is in which pool, and what that costs at other budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pyorch.errors import PyorchError
from pyorch.planning.makespan import POOLS

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
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PyorchError('plots need matplotlib: pip install "pyorch[plot]"') from None
    figure = Figure(figsize=(10, 3.8), layout="constrained")
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
    path = directory / "plan.png"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise PyorchError(f"{directory} cannot be written: {error.strerror}") from None
    return path
