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

_NAME = "advice"


def draw(estimates: Sequence[Estimate], resident_rate: float, chosen: int, directory: Path) -> Path:
    """Writes advice.png into a directory, which is made if necessary, and returns its path.

    Args:
        estimates: In the order of their budgets.
        resident_rate: Tokens a second with all experts in memory.
        chosen: Bytes of the recommended budget.
        directory: The directory.

    Raises:
        PyorchError: matplotlib is missing, or the file cannot be written.
    """
    picture = partial(_advice, estimates=estimates, resident_rate=resident_rate, chosen=chosen)
    return pictures.save({_NAME: picture}, directory)[0]


def picture_in(directory: Path) -> Path:
    """Returns the path that draw() writes to."""
    return directory / f"{_NAME}.png"


def _advice(figure_class: type[Figure], estimates: Sequence[Estimate], resident_rate: float, chosen: int) -> Figure:
    figure = figure_class(figsize=(10, 3.6), layout="constrained")
    speed, hits, first = figure.subplots(1, 3)
    for vram_bytes in dict.fromkeys(estimate.vram_bytes for estimate in estimates):
        of_line = [estimate for estimate in estimates if estimate.vram_bytes == vram_bytes]
        label = f"{vram_bytes / GiB:.3g} GiB of VRAM" if vram_bytes else None
        at = [estimate.budget_bytes / GiB for estimate in of_line]
        speed.plot(at, [estimate.decode_rate for estimate in of_line], marker="o", label=label)
        hits.plot(at, [100 * (1 - estimate.read) for estimate in of_line], marker="o")
        first.plot(at, [estimate.first_token_seconds for estimate in of_line], marker="o")
    speed.axhline(resident_rate, color="0.6", linestyle=":", label="the processor, with all experts in memory")
    speed.set_ylabel("decoded tokens a second")
    hits.set_ylabel("experts that need not be read, %")
    first.set_ylabel("seconds to the first token")
    for axis in (speed, hits, first):
        axis.axvline(chosen / GiB, color="C1", linewidth=0.8, label="recommended")
        axis.set_xlabel("budget, GiB")
        axis.set_ylim(bottom=0)
    speed.legend(fontsize=8)
    return figure
