"""Draws a plan: the experts of each pool, and the waits at other budgets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.cli.options import add_model
from pyorch.planning.makespan import POOLS
from pyorch.sidecars import packs
from pyorch.sidecars.memory_plan import Reserve, default_path, new_planner, read_plan
from scripts.papers import program

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGETS = tuple(n / 20 for n in range(2, 21))  # as shares of all experts
NAMES = ("full", "compressed", "signs and mantissas", "exponents")


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of("scripts.papers.zipmoe.plot_plan", "draw who is in which pool of a plan, and its cost",
                               "olmoe.gguf -o plots")
    add_model(parser, "with a compressed pack beside it")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="of pyorch plan (default: next to the model)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="write the picture here")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    pictures.check(args.output)
    with packs.open_model(args.model) as model_map:
        packs.require_compressed(model_map)
        plan = read_plan(args.plan or default_path(args.model), model_map)
        planner = new_planner(model_map, plan.rows, plan.machine, plan.batch)
        reserve, info = Reserve.of(model_map), model_map.info
        costs: dict[str, list[float]] = {}
        budgets = [share for share in BUDGETS if int(share * info.slots_bytes) >= info.floor_bytes]
        for share in budgets:
            at = int(share * info.slots_bytes)
            reserved = reserve.bytes(at)
            found = planner.plan(at, plan.pools, plan.step, reserved)
            splits = {"plan": found.best, "full only": planner.cost((1, 0, 0, 0), at - reserved),
                      "compressed only": planner.cost((0, 1, 0, 0), at - reserved),
                      "signs and mantissas only": planner.cost((0, 0, 1, 0), at - reserved)}
            if "E" in plan.pools:
                splits["exponents only"] = planner.cost((0, 0, 0, 1), at - reserved)
            if found.plain is not None:
                splits["without a pack"] = found.plain
            for name, split in splits.items():
                costs.setdefault(name, []).append(1000 * split.makespan)
        planned = planner.cost(plan.shares, plan.budget - reserve.bytes(plan.budget))
    print(draw(planner.inclusion, planned.capacities, budgets, costs, args.output))
    return 0


def draw(
    inclusion: np.ndarray, capacities: np.ndarray, budgets: Sequence[float], costs: Mapping[str, Sequence[float]],
    directory: Path,
) -> Path:
    """Writes plan.png into a directory, which is made if needed; returns its path.

    Args:
        inclusion: float64[n_layers, n_expert], by rank.
        capacities: [n_layers, 4], of the plan.
        budgets: As shares of all experts.
        costs: Milliseconds that a token waits at each budget, by strategy.
        directory: For the picture.

    Raises:
        PyorchError: matplotlib is missing, or the file cannot be written.
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


if __name__ == "__main__":
    sys.exit(main())
