"""A picture of a sweep: accuracy against throughput, a panel for each cache rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import pictures
from pyorch.errors import PyorchError
from pyorch.eval.sweep import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS = {"original": ("black", "s"), "random": ("tab:red", "X")}
_COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:cyan", "tab:brown", "tab:pink", "tab:olive")
_MARKERS = "o^vDP*"


def draw(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Writes the picture of the rows that have a speed. PyorchError where there are none, or no matplotlib."""
    timed = [row for row in rows if row.speed is not None]
    if not timed:
        raise PyorchError("a plot of accuracy against throughput needs --cache-rate and --speed-tokens")
    pictures.save_as(partial(_sweep, timed=timed, metric=metric), path, pictures.PRINT_DPI)


def _sweep(figure_class: type[Figure], timed: Sequence[Row], metric: str) -> Figure:
    rates = sorted({row.rate for row in timed}, reverse=True)
    looks = _looks(timed)
    n_rows = len(looks) // 2 + 1  # of the legend
    figure = figure_class(figsize=(max(3.8 * len(rates), 6), 3.8 + 0.22 * n_rows), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    shown = {}
    for panel, rate in zip(panels, rates):
        panel.set_title(f"cache rate {rate:g}")
        panel.set_xlabel("tokens/s")
        panel.grid(alpha=0.3)
        panel.margins(0.1)
        for row in timed:
            if row.rate != rate:
                continue
            label = _label(row)
            colour, marker = looks[label]
            y = row.judgement.average(metric)
            shown[label], = panel.plot(row.speed.rate, y, marker, color=colour)
            if row.method == "original":
                panel.axhline(y, color=colour, linewidth=0.6, linestyle=":")
    panels[0].set_ylabel(f"average {metric}")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _looks(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each label, the same in all panels."""
    looks = {}
    for row in rows:
        n = sum(label not in _LOOKS for label in looks)
        other = _COLOURS[n % len(_COLOURS)], _MARKERS[n % len(_MARKERS)]
        looks.setdefault(_label(row), _LOOKS.get(_label(row), other))
    return looks


def _label(row: Row) -> str:
    return (
        row.method
        if row.method in _LOOKS and row.settings in ("", f"mode={row.method}")
        else f"{row.method} {row.settings}"
    )
