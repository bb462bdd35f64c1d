"""Pictures of the evaluation of prefetching."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from scripts.papers.finemoe.replays import ON_DEMAND, Evaluation, Pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "none": "black", "previous-token": "tab:brown", "layer-all": "tab:grey", "next-router": "tab:blue",
    "quasi-hidden": "tab:green", "hybrid": "tab:purple", "expert-map": "tab:red",
    "activation-matrix": "tab:orange", "oracle": "tab:pink",
}
_LINES = {"lru": "-", "lfu": "--", "finemoe": "-.", "belady": ":"}


def draw(evaluation: Evaluation, directory: Path) -> list[Path]:
    """Writes PNG files into a directory; returns their paths.

    recall: by layer and by rank. similarity: hit rate by similarity. budgets: hit rate and TPOT of each pair. sweeps:
    distance, store capacity, batch. stream: ended requests over time. contexts: measured, if --measure was given.

    Raises:
        PyorchError: matplotlib is missing, or a file cannot be written.
    """
    made: dict[str, pictures.Picture] = {
        "recall": _recall, "similarity": _similarity, "budgets": _budgets, "sweeps": _sweeps,
        "stream": _stream,
    }
    if evaluation.contexts:
        made["contexts"] = _contexts
    drawn = {name: partial(picture, evaluation=evaluation) for name, picture in made.items()}
    return pictures.save(drawn, directory, pictures.PAGE_DPI)


def _recall(figure_class: type[Figure], evaluation: Evaluation) -> Figure:
    figure = figure_class(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for row in evaluation.recalls:
        colour = _COLOURS[row.predictor]
        left.plot(row.layers, row.by_layer, marker=".", color=colour, label=f"{row.predictor} {row.mean:.2f}")
        by_rank = np.array(row.by_rank)
        known = ~np.isnan(by_rank).any(axis=1)
        if known.any():
            right.plot(np.arange(by_rank.shape[1]) + 1, by_rank[known].mean(axis=0), marker=".", color=colour)
    left.set_xlabel("layer")
    left.set_ylabel("recall@k, one layer ahead")
    left.set_ylim(0, 1)
    right.set_xlabel("rank of the predicted expert")
    right.set_ylabel("share that was used")
    figure.legend(loc="outside right center", fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure


def _similarity(figure_class: type[Figure], evaluation: Evaluation) -> Figure:
    figure = figure_class(figsize=(3.2 * len(evaluation.similarities), 3), layout="constrained")
    for axis, row in zip(figure.subplots(1, len(evaluation.similarities), sharey=True), evaluation.similarities):
        edges = np.array(row.scores)
        axis.plot((edges[1:] + edges[:-1]) / 2, row.hit_rates, marker=".", color="tab:red")
        density = axis.twinx()
        density.stairs(row.counts, edges, color="black", alpha=0.15, fill=True)
        density.set_yticks([])
        axis.set_title(f"{row.kind}, r = {row.pearson:.2f}", fontsize=9)
        axis.set_xlabel("cosine")
        axis.grid(alpha=0.3)
    figure.supylabel("experts in common; grey: pairs", fontsize=9)
    return figure


def _budgets(figure_class: type[Figure], evaluation: Evaluation) -> Figure:
    figure = figure_class(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    pairs = dict.fromkeys(row.pair for row in evaluation.budgets)
    at = np.arange(len(evaluation.conditions.budgets))
    on_demand = np.array([row.tpot_ms for row in evaluation.budgets if row.pair == ON_DEMAND])
    for pair in pairs:
        rows = [row for row in evaluation.budgets if row.pair == pair]
        _line(left, pair, at, [row.hit_rate for row in rows])
        _line(right, pair, at, np.array([row.tpot_ms for row in rows]) / on_demand)
    for axis in (left, right):
        axis.set_xticks(at, evaluation.conditions.budgets)
        axis.set_xlabel("budget")
        axis.grid(alpha=0.3)
    left.set_ylabel("hit rate")
    right.set_ylabel("replayed time per token, on demand = 1")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


def _sweeps(figure_class: type[Figure], evaluation: Evaluation) -> Figure:
    figure = figure_class(figsize=(11, 3.4), layout="constrained")
    distance, capacity, batch = figure.subplots(1, 3)
    for pair in dict.fromkeys(row.played.pair for row in evaluation.distances):
        rows = [row for row in evaluation.distances if row.played.pair == pair]
        _line(distance, pair, [row.played.distance for row in rows], [row.recall for row in rows])
    distance.set_xlabel("prefetch distance")
    distance.set_ylabel("recall@k")
    distance.set_xticks(sorted({row.played.distance for row in evaluation.distances}))
    sizes = [row.n_maps for row in evaluation.capacities]
    for name, colour in (("semantic", "tab:cyan"), ("trajectory", "tab:red")):
        capacity.plot(
            sizes, [getattr(row, name) for row in evaluation.capacities], marker=".", color=colour, label=name
        )
    capacity.plot(
        sizes, [row.played.hit_rate for row in evaluation.capacities], marker=".", color="black", label="hit rate"
    )
    capacity.set_xscale("log")
    capacity.set_xlabel("iterations in the map store")
    capacity.set_ylabel("best cosine; hit rate")
    capacity.legend(fontsize=7)
    for pair in dict.fromkeys(row.pair for row in evaluation.batches):
        rows = [row for row in evaluation.batches if row.pair == pair]
        _line(batch, pair, [row.batch for row in rows], [row.tpot_ms for row in rows])
    batch.set_xlabel("requests decoded together")
    batch.set_ylabel("replayed ms from token to token")
    batch.set_xticks(sorted({row.batch for row in evaluation.batches}))
    for axis in (distance, capacity, batch):
        axis.grid(alpha=0.3)
    figure.legend(*batch.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


def _stream(figure_class: type[Figure], evaluation: Evaluation) -> Figure:
    figure = figure_class(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    for row in evaluation.streamed:
        _line(axis, row.pair, row.latencies, (np.arange(len(row.latencies)) + 1) / len(row.latencies))
    axis.set_xlabel("replayed seconds from a request's coming to its end")
    axis.set_ylabel("share of requests")
    axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


def _contexts(figure_class: type[Figure], evaluation: Evaluation) -> Figure:
    figure = figure_class(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    settings = list(dict.fromkeys(row.prefetch for row in evaluation.contexts))
    lengths = list(dict.fromkeys(row.n_context for row in evaluation.contexts))
    width = 0.8 / len(settings)
    for i, setting in enumerate(settings):
        rows = [row for row in evaluation.contexts if row.prefetch == setting]
        at = np.arange(len(lengths)) + (i - (len(settings) - 1) / 2) * width
        colour = _COLOURS.get(setting, "tab:green")
        compute = np.array([row.compute_ms for row in rows])
        axis.bar(at, compute, width * 0.9, color=colour, alpha=0.45, label=f"{setting}: computing")
        stall = [row.stall_ms for row in rows]
        axis.bar(at, stall, width * 0.9, bottom=compute, color=colour, label=f"{setting}: waiting")
    bounds = [next(row.bound_ms for row in evaluation.contexts if row.n_context == n) for n in lengths]
    axis.plot(np.arange(len(lengths)), bounds, "_", color="tab:red", markersize=30, label="bound")
    axis.set_xticks(np.arange(len(lengths)), map(str, lengths))
    axis.set_xlabel("tokens of context")
    axis.set_ylabel("measured ms/token")
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def _line(axis, pair: Pair, x, y) -> None:
    axis.plot(x, y, _LINES[pair.policy], marker=".", color=_COLOURS[pair.predictor], label=pair.name, linewidth=1.2)
