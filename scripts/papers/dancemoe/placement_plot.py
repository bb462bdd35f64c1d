"""Draws a placement: the share of rows that each server computes itself, and the experts that it holds for that."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.cluster.placement.placement import Placement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(placement: Placement, frequencies: np.ndarray, directory: Path) -> Path:
    """Writes placement.png. Both halves have a row for each server and a column for each layer.

    Args:
        placement: The placement.
        frequencies: float64[n_servers, n_layers, n_expert].
        directory: The directory, which is made if it does not exist.

    Returns:
        The path of the picture.

    Raises:
        PyorchError: matplotlib is missing, or the file cannot be written.
    """
    return pictures.save({"placement": partial(_placement, placement=placement, frequencies=frequencies)}, directory)[0]


def _placement(figure_class: type[Figure], placement: Placement, frequencies: np.ndarray) -> Figure:
    n_servers = len(placement.servers)
    figure = figure_class(figsize=(11, 2 + 0.35 * min(n_servers, 40)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    shown = (
        ("activations that the server computes itself, %", 100 * placement.local_ratio(frequencies), 100),
        ("experts of the layer on the server", placement.held.sum(axis=2), max(placement.n_experts)),
    )
    for axis, (title, values, most) in zip(axes, shown):
        image = axis.imshow(values, vmin=0, vmax=most, cmap="viridis", aspect="auto")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("layer")
        axis.set_xticks(*_ticks(placement.layers))
        axis.set_yticks(*_ticks(placement.servers))
        axis.tick_params(labelsize=7)
        figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
    return figure


def _ticks(names: tuple) -> tuple[list[int], list[str]]:
    """Returns the positions and labels of at most 40 ticks."""
    places = list(range(0, len(names), -(-len(names) // 40)))
    return places, [str(names[place]) for place in places]
