"""A picture of how alike the experts of each layer compute, as figure 4 of BuddyMoE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 4


def draw(cosines: Mapping[int, np.ndarray], path: Path) -> None:
    """Writes the picture. cosines: by layer, float[n_expert, n_expert] of the outputs of experts on the same inputs.

    Raises PyorchError without matplotlib, or where nothing can be written.
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
