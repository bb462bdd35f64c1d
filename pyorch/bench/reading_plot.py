"""A picture of what is read while text is decoded, lossless and lossy, as figure 8 of BuddyMoE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.bench.job import Config, Text
from pyorch.bench.rounds import Results
from pyorch.sizes import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 24


def draw(results: Results, pairs: Sequence[tuple[Config, Config]], path: Path) -> None:
    """Writes the picture, of the last round. PyorchError without matplotlib, or where it cannot be written."""
    pictures.save_as(partial(_bandwidths, results=results, pairs=pairs), path, pictures.PRINT_DPI)


def _bandwidths(figure_class: type[Figure], results: Results, pairs: Sequence[tuple[Config, Config]]) -> Figure:
    bases = list(dict.fromkeys(base for _, base in pairs))
    figure = figure_class(figsize=(9, 3 * len(bases)), layout="constrained")
    for axis, base in zip(figure.subplots(len(bases), 1, squeeze=False)[:, 0], bases):
        for config in (base, *(one for one, other in pairs if other == base)):
            texts = [run.measurement.text for run in results.of(config) if run.measurement is not None]
            if not texts or len(texts[-1].seconds) < 2:
                continue
            seconds, rates = bandwidth(texts[-1])
            axis.step(seconds, rates / MiB, where="mid", label=config.label)
        axis.set_ylabel("MiB read a second")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    axis.set_xlabel("seconds")
    return figure


def bandwidth(text: Text, n_bins: int = _BINS) -> tuple[np.ndarray, np.ndarray]:
    """Over equal pieces of the time that decoding took: their middles, in seconds, and bytes read a second in each."""
    edges = np.linspace(0, text.seconds[-1], n_bins + 1)
    read = np.interp(edges, text.seconds, text.bytes_read)
    return (edges[1:] + edges[:-1]) / 2, np.diff(read) / np.diff(edges)
