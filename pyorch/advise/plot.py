"""A picture of advice: speed and hits over the budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import pictures
from pyorch.advise.estimates import Estimate
from pyorch.sizes import GiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(estimates: Sequence[Estimate], resident_rate: float, chosen: int, directory: Path) -> Path:
    """Writes advice.png into a directory, which is made if need be; returns its path.

    estimates: in the order of their budgets. resident_rate: tokens a second with all experts in memory. chosen: bytes
    of the budget that is recommended.

    Raises PyorchError without matplotlib, or where nothing can be written.
    """
    picture = partial(_advice, estimates=estimates, resident_rate=resident_rate, chosen=chosen)
    return pictures.save({"advice": picture}, directory)[0]


def _advice(figure_class: type[Figure], estimates: Sequence[Estimate], resident_rate: float, chosen: int) -> Figure:
    figure = figure_class(figsize=(10, 3.6), layout="constrained")
    speed, hits, first = figure.subplots(1, 3)
    at = [estimate.budget_bytes / GiB for estimate in estimates]
    speed.plot(at, [estimate.decode_rate for estimate in estimates], marker="o")
    speed.axhline(resident_rate, color="0.6", linestyle=":", label="all experts in memory")
    speed.set_ylabel("decoded tokens a second")
    hits.plot(at, [100 * estimate.hit_rate for estimate in estimates], marker="o")
    hits.set_ylabel("experts that are in memory when they are needed, %")
    first.plot(at, [estimate.first_token_seconds for estimate in estimates], marker="o")
    first.set_ylabel("seconds to the first token")
    for axis in (speed, hits, first):
        axis.axvline(chosen / GiB, color="C1", linewidth=0.8, label="recommended")
        axis.set_xlabel("budget, GiB")
        axis.set_ylim(bottom=0)
    speed.legend(fontsize=8)
    return figure
