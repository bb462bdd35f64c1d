"""Whether experts that are selected together compute alike, as a table and as figure 4 of BuddyMoE."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.cli.options import add_model, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table, show
from pyorch.convert import expert_outputs
from pyorch.convert.buddies import check, conditional, count, router_inputs
from pyorch.convert.output_similarity import OutputSimilarity, compare
from pyorch.sidecars import packs
from pyorch.traces.file import Trace
from scripts.papers import program

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 4


@dataclass(frozen=True)
class Agreement:
    """Whether experts that are selected together compute alike, in one layer.

    Means over the experts i that the trace selected. Correlations are between q(j|i) and cos(i, j) over the
    peers j of i. Cosines and relative errors are given for the peer with the largest q(j|i), for a random
    peer (the mean of all), and for the peer with the largest cosine.
    """

    il: int
    spearman: float
    pearson: float
    coactivated_cosine: float
    random_cosine: float
    best_cosine: float
    coactivated_error: float
    random_error: float
    best_error: float


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.buddymoe.similarity", "show whether experts that are selected together compute alike",
        "olmoe.gguf --trace olmoe.trace --plot alike.png")
    add_model(parser)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE",
                        help="a trace that pyorch profile --inputs recorded")
    parser.add_argument("--plot", type=Path, metavar="FILE.png",
                        help="draw how alike experts compute into this file")
    parser.add_argument("--json", action="store_true", help="print an object for each layer")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        pictures.check_plot(args.plot)
    trace = Trace(args.trace)
    agreements, cosines = [], {}
    with packs.open_model(args.model) as model_map, Progress() as progress:
        check(model_map, trace)
        inputs = router_inputs(model_map, trace)
        counts = count(trace, on_progress=progress.update)
        for done, (layer, counted) in enumerate(zip(model_map.layers, counts)):
            progress.update("comparing", done, len(counts))
            experts = expert_outputs.LayerExperts(model_map, layer.il)
            outputs = compare(experts, *inputs.layer(layer.il, layer.n_expert))
            q = conditional(counted.coactivations)
            agreements.append(agreement(layer.il, counted.activations, q, outputs))
            cosines[layer.il] = outputs.cosine
    if args.plot is not None:
        draw(cosines, args.plot)
    if args.json:
        print_json(agreements)
    else:
        show([_table(agreements, len(inputs))])
    return 0


def agreement(il: int, activations: np.ndarray, q: np.ndarray, outputs: OutputSimilarity) -> Agreement:
    n_expert = len(activations)
    rows = []
    for i in np.flatnonzero(activations):
        peers = np.arange(n_expert) != i
        together, cosine, error = q[i, peers], outputs.cosine[i, peers], outputs.relative_error[i, peers]
        first, best = together.argmax(), cosine.argmax()
        rows.append((correlation(ranks(together), ranks(cosine)), correlation(together, cosine),
                     cosine[first], cosine.mean(), cosine[best], error[first], error.mean(), error[best]))
    return Agreement(il, *np.array(rows, np.float64).mean(axis=0).tolist())


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns Pearson's correlation of two float[n]; 0 if one is constant."""
    a, b = a - a.mean(dtype=np.float64), b - b.mean(dtype=np.float64)
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm > 0 else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Returns the ranks, float64[n]; equal values share their mean rank. Their correlation is Spearman's."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _table(agreements: Sequence[Agreement], n_inputs: int) -> Table:
    columns = {
        "spearman": ("rank correlation", "+.3f"), "pearson": ("linear", "+.3f"),
        "coactivated_cosine": ("cosine: most co-activated", "+.3f"), "random_cosine": ("random", "+.3f"),
        "best_cosine": ("best", "+.3f"),
        "coactivated_error": ("relative error: most co-activated", ".2f"), "random_error": ("random", ".2f"),
        "best_error": ("best", ".2f"),
    }

    def cells(label: str, values: dict[str, float]) -> tuple[str, ...]:
        return (label, *(format(values[name], form) for name, (_, form) in columns.items()))

    means = {name: sum(getattr(row, name) for row in agreements) / len(agreements) for name in columns}
    rows = [cells(str(row.il), vars(row)) for row in agreements] + [cells("mean", means)]
    return Table(
        ("layer", *(title for title, _ in columns.values())), rows,
        title=f"outputs of experts on {n_inputs} router inputs: does co-activation say how alike they are, and "
              "how alike is the most co-activated, a random, and the best buddy",
    )


def draw(cosines: Mapping[int, np.ndarray], path: Path) -> None:
    """Writes the picture. cosines: by layer, float[n_expert, n_expert] of the outputs of experts on the same inputs.

    Raises:
        PyorchError: matplotlib is missing, or the file cannot be written.
    """
    pictures.save_as(partial(_similarity, cosines=cosines), path, pictures.PAGE_DPI)


def _similarity(figure_class: type[Figure], cosines: Mapping[int, np.ndarray]) -> Figure:
    columns = min(len(cosines), _COLUMNS)
    rows = math.ceil(len(cosines) / columns)
    figure = figure_class(figsize=(2.8 * columns, 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[len(cosines):]:
        unused.set_axis_off()
    peers = {il: np.where(np.eye(len(cosine), dtype=bool), np.nan, cosine) for il, cosine in cosines.items()}
    most = max(float(np.nanpercentile(np.abs(cosine), 99.5)) for cosine in peers.values())
    for axis, (il, cosine) in zip(axes, peers.items()):
        image = axis.imshow(cosine, cmap="RdBu_r", vmin=-most, vmax=most, aspect="equal")
        axis.set_title(f"layer {il}", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.colorbar(image, ax=axes, shrink=0.75, label="cosine of outputs")
    figure.supxlabel("expert j", fontsize=9)
    figure.supylabel("expert i", fontsize=9)
    return figure


if __name__ == "__main__":
    sys.exit(main())
