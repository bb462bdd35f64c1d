"""Pictures of the evaluation of compressed experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from scripts.papers.zipmoe.caching import COMPRESSED, FULL, PLAN, WITHOUT, Played, shown_policy
from scripts.papers.zipmoe.measure import MMAP, SEVERAL, SYSTEMS, WITHOUT_LRU, Measured
from scripts.papers.zipmoe.report import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    WITHOUT: "tab:blue", FULL: "tab:green", COMPRESSED: "tab:orange", PLAN: "tab:red", WITHOUT_LRU: "tab:cyan",
    MMAP: "black",
}


def draw(evaluation: Evaluation, directory: Path) -> list[Path]:
    """Writes caching.png, latency.png and throughput.png, if they have data, into a directory; returns their paths.

    Raises:
        PyorchError: matplotlib is missing, or a file cannot be written.
    """
    made = {}
    if evaluation.caching:
        made["caching"] = partial(_caching, rows=evaluation.caching)
    if evaluation.measured:
        made["latency"] = partial(_latency, rows=[row for row in evaluation.measured if row.batch == 1])
    several = {row.limit for row in evaluation.measured if row.batch > 1}
    if several:
        rows = [row for row in evaluation.measured if row.limit in several and row.system in SEVERAL]
        made["throughput"] = partial(_throughput, rows=rows)
    return pictures.save(made, directory, pictures.PAGE_DPI)


def _caching(figure_class: type[Figure], rows: Sequence[Played]) -> Figure:
    """Draws eviction policies with whole experts on the left, and forms with one policy on the right."""
    figure = figure_class(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    budgets = list(dict.fromkeys(row.budget for row in rows))
    policies = tuple(dict.fromkeys(row.policy for row in rows))
    shown = shown_policy(policies)

    def line(axis, kept: str, policy: str, label: str, **look) -> None:
        at = {row.budget: row.wait_ms for row in rows if (row.kept, row.policy) == (kept, policy)}
        axis.plot(range(len(budgets)), [at.get(budget, np.nan) for budget in budgets], marker=".", label=label, **look)

    for i, policy in enumerate(policies):
        line(left, FULL, policy, f"{FULL}, {policy}", color=f"C{i}", linestyle=":" if policy == "belady" else "-")
    line(left, PLAN, shown, f"{PLAN}, {shown}", color="black", linewidth=2)
    for kept in (WITHOUT, FULL, COMPRESSED, PLAN):
        line(right, kept, shown, f"{kept}, {shown}", color=_COLOURS[kept], linewidth=2 if kept == PLAN else 1.2)
    for axis in (left, right):
        axis.set_xticks(range(len(budgets)), budgets)
        axis.set_xlabel("budget, of the experts")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    left.set_ylabel("replayed wait of a token, ms")
    return figure


def _latency(figure_class: type[Figure], rows: Sequence[Measured]) -> Figure:
    figure = figure_class(figsize=(10, 3.8), layout="constrained")
    first, each = figure.subplots(1, 2)
    limits = list(dict.fromkeys(row.limit for row in rows))
    for system in SYSTEMS:
        of_system = {row.limit: row for row in rows if row.system == system}
        for axis, value in ((first, "ttft_s"), (each, "tpot_ms")):
            values = [getattr(of_system[limit], value) if limit in of_system else np.nan for limit in limits]
            axis.plot(range(len(limits)), values, marker=".", color=_COLOURS[system], label=system)
    for axis, label in ((first, "s to the first token"), (each, "ms from token to token")):
        axis.set_xticks(range(len(limits)), limits)
        axis.set_xlabel("memory, of the model's file")
        axis.set_ylabel(label)
        axis.set_yscale("log")
        axis.grid(alpha=0.3, which="both")
    figure.legend(*each.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def _throughput(figure_class: type[Figure], rows: Sequence[Measured]) -> Figure:
    figure = figure_class(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    batches = sorted({row.batch for row in rows})
    systems = [system for system in SEVERAL if any(row.system == system for row in rows)]
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        rate = {row.batch: row.tokens_per_second for row in rows if row.system == system}
        at = np.arange(len(batches)) + (i - (len(systems) - 1) / 2) * width
        axis.bar(at, [rate.get(batch, np.nan) for batch in batches], width * 0.9, color=_COLOURS[system], label=system)
    axis.set_xticks(range(len(batches)), map(str, batches))
    axis.set_xlabel(f"sequences decoded at once, memory {rows[0].limit}")
    axis.set_ylabel("tokens/s")
    axis.grid(alpha=0.3, axis="y")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure
