"""Uses of experts in a trace, certainty of routers, and hits of caches: BuddyMoE's figures 6, 7 and 9."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.cli.options import print_json
from pyorch.cli.tables import Table, show
from pyorch.sizes import counted
from pyorch.traces.file import Trace
from scripts.papers import program
from scripts.papers.buddymoe.statistics import LayerArrays, TraceStatistics, analyze

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 4


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.buddymoe.trace_stats",
        "show how experts are used, how certain routers are, and what caches would hit", "olmoe.trace --plot plots")
    parser.add_argument("trace", type=Path, metavar="FILE.trace", help="a trace that pyorch profile recorded")
    parser.add_argument("--phase", choices=("all", "prefill", "decode"), default="all",
                        help="count only the tokens of this phase (default: all)")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw pictures into this directory")
    parser.add_argument("--json", action="store_true", help="print the statistics as one JSON object")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        pictures.check(args.plot)
    statistics, arrays = analyze(Trace(args.trace), args.phase)
    drawn = [] if args.plot is None else draw(statistics, arrays, args.plot)
    if args.json:
        print_json(statistics)
    else:
        show([*_parts(statistics), *map(str, drawn)])
    return 0


def _parts(statistics: TraceStatistics) -> list[str | Table]:
    sample = f", router inputs of {statistics.n_inputs}" if statistics.n_inputs else ""
    selected = "" if statistics.router == "full" else " of the selected experts' probabilities"
    p10, p20, p50 = (statistics.percentiles.index(p) for p in (10, 20, 50))
    rows = [
        (str(layer.il), f"{layer.busiest:.2f}", f"{layer.idlest:.2f}", str(layer.unused), f"{layer.gini:.2f}",
         f"{layer.strongest_peer:.1%}", f"{layer.tae_mean:.3f}", f"{layer.tae_percentiles[p10]:.3f}",
         f"{layer.tae_percentiles[p20]:.3f}", f"{layer.tae_percentiles[p50]:.3f}", f"{layer.entropy:.3f}",
         f"{layer.margin_percentiles[p50]:.3f}")
        for layer in statistics.layers
    ]
    return [
        f"{statistics.path}: {statistics.n_tokens} tokens (prefill {statistics.n_prefill}, decode "
        f"{statistics.n_decode}) of {counted(statistics.n_requests, 'request')}{sample}",
        f"{statistics.arch}: {len(statistics.layers)} layers of {statistics.n_expert} experts, "
        f"{statistics.n_expert_used} used for a token",
        "",
        "busiest, idlest  how often the router selects this expert, where 1 is the average",
        "peer             share of an expert's co-activations that its strongest peer has, mean of the experts",
        f"entropy          mean entropy{selected}, where 1 is an even distribution",
        "TAE              the same of the selected experts alone (token activating entropy): mean and percentiles",
        "margin           largest probability less the second largest, median",
        "",
        Table(("layer", "busiest", "idlest", "unused", "gini", "peer", "TAE", "p10", "p20", "p50", "entropy", "margin"),
              rows),
        "",
        Table(("cache", *(f"{rate:.1%}" for rate in statistics.cache_rates)),
              [("hit rate", *(f"{rate:.1%}" for rate in statistics.hit_rates))], left=("cache",),
              title="an LRU cache that keeps this share of each layer's experts"),
    ]


def draw(statistics: TraceStatistics, arrays: list[LayerArrays], directory: Path) -> list[Path]:
    """Writes PNG files into a directory, which is made if needed; returns their paths.

    activations: uses of each layer's experts, sorted (BuddyMoE, fig. 6). coactivation: experts selected together, in
    each layer (figs. 7 and 9). tae: distribution of eq. 1. hit-rate: LRU, by cache size.

    Raises:
        PyorchError: matplotlib is missing, or a file cannot be written.
    """
    return pictures.save({
        "activations": partial(_activations, statistics=statistics),
        "coactivation": partial(_coactivation, statistics=statistics, arrays=arrays),
        "tae": partial(_tae, statistics=statistics),
        "hit-rate": partial(_hit_rate, statistics=statistics, arrays=arrays),
    }, directory)


def _grid(figure_class: type[Figure], n: int, size: tuple[float, float], **options: object):
    columns = min(n, _COLUMNS)
    rows = math.ceil(n / columns)
    figure = figure_class(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for unused in axes[n:]:
        unused.set_axis_off()
    return figure, axes


def _activations(figure_class: type[Figure], statistics: TraceStatistics) -> Figure:
    figure, axes = _grid(figure_class, len(statistics.layers), (3.2, 2.0), sharey=True)
    for axis, layer in zip(axes, statistics.layers):
        counts = np.sort(layer.activations)[::-1]
        axis.bar(np.arange(len(counts)), counts / counts.mean(), width=1.0)
        axis.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
        axis.set_title(f"layer {layer.il}, Gini {layer.gini:.2f}", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.supxlabel("experts, most used first", fontsize=9)
    figure.supylabel("uses, relative to even use", fontsize=9)
    return figure


def _coactivation(figure_class: type[Figure], statistics: TraceStatistics, arrays: list[LayerArrays]) -> Figure:
    figure, axes = _grid(figure_class, len(statistics.layers), (2.8, 2.9))
    for axis, layer, of in zip(axes, statistics.layers, arrays):
        uses = np.array(layer.activations, float)
        # Row i: the share of the tokens of i that also selected j.
        share = of.coactivation / np.maximum(uses, 1)[:, None]
        image = axis.imshow(share, cmap="magma", vmin=0, vmax=max(np.percentile(share, 99.5), 1e-9), aspect="equal")
        axis.set_title(f"layer {layer.il}", fontsize=9)
        axis.tick_params(labelsize=7)
        bar = figure.colorbar(image, ax=axis, shrink=0.75)
        bar.ax.tick_params(labelsize=7)
    figure.supxlabel("expert j", fontsize=9)
    figure.supylabel("expert i: share of its tokens for which j is selected too", fontsize=9)
    return figure


def _tae(figure_class: type[Figure], statistics: TraceStatistics) -> Figure:
    figure = figure_class(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    edges = np.linspace(0, 1, len(statistics.layers[0].tae_histogram) + 1)
    for shade, layer in zip(_shades(len(statistics.layers)), statistics.layers):
        left.stairs(np.array(layer.tae_histogram) / statistics.n_tokens, edges, color=shade, linewidth=0.9)
    left.set_xlabel("TAE")
    left.set_ylabel("share of tokens, each layer a line")
    layers = [layer.il for layer in statistics.layers]
    values = np.array([layer.tae_percentiles for layer in statistics.layers]).T
    low, high, p10, p20, middle = (statistics.percentiles.index(p) for p in (5, 95, 10, 20, 50))
    right.fill_between(layers, values[low], values[high], alpha=0.2, label="5 to 95 %")
    right.fill_between(layers, values[p10], values[p20], alpha=0.5, label="10 to 20 %, where tau is set")
    right.plot(layers, values[middle], marker=".", label="median")
    right.set_xlabel("layer")
    right.set_ylabel("TAE")
    right.legend(fontsize=8)
    return figure


def _hit_rate(figure_class: type[Figure], statistics: TraceStatistics, arrays: list[LayerArrays]) -> Figure:
    figure = figure_class(figsize=(5.5, 3.8), layout="constrained")
    axis = figure.subplots()
    size = np.arange(statistics.n_expert + 1) / statistics.n_expert
    for shade, of in zip(_shades(len(arrays)), arrays):
        axis.plot(size, of.hit_rates, color=shade, linewidth=0.7)
    axis.plot(size, np.mean([of.hit_rates for of in arrays], axis=0), color="black", linewidth=2, label="all layers")
    axis.plot(size, size, color="black", linewidth=0.7, linestyle=":", label="experts chosen by chance")
    axis.axvline(statistics.n_expert_used / statistics.n_expert, color="grey", linewidth=0.7)
    axis.set_xlabel("share of a layer's experts in its LRU cache")
    axis.set_ylabel("hit rate, each layer a line")
    axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.legend(fontsize=8)
    return figure


def _shades(n: int) -> np.ndarray:
    """Returns a colour for each layer, from dark, the first, to light."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0, 0.9, n))


if __name__ == "__main__":
    sys.exit(main())
