"""Pictures of simulations: over time, and over the size of the cluster and the bandwidth of its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """The values of one simulation.

    Attributes:
        bins: Edges of the bins, in seconds.
        local: Local ratio in each bin.
        latency: Mean latency in each bin, in seconds; nan if no request arrived.
        moves: Times at which experts began to move.
        megabits: Bandwidth of links, in megabits per second.
        group: The other properties that tell simulations apart in a picture by sizes.
    """

    name: str
    bins: Sequence[float]
    local: Sequence[float]
    latency: Sequence[float]
    moves: Sequence[float]
    n_servers: int
    megabits: float
    group: str
    latency_mean: float


def draw(curves: Sequence[Curve], shift: float | None, directory: Path) -> list[Path]:
    """Writes over-time.png (DanceMoE, figs. 6 and 7), and scaling.png (fig. 8) where sizes or bandwidths differ.

    Args:
        curves: The simulations.
        shift: Time at which the workload changes. None: never.
        directory: The directory, which is made if it does not exist.

    Returns:
        The written files.

    Raises:
        PyorchError: matplotlib is missing, or a file cannot be written.
    """
    made: dict[str, pictures.Picture] = {"over-time": partial(_over_time, curves=curves, shift=shift)}
    if len({(curve.n_servers, curve.megabits) for curve in curves}) > 1:
        made["scaling"] = partial(_scaling, curves=curves)
    return pictures.save(made, directory)


def _over_time(figure_class: type[Figure], curves: Sequence[Curve], shift: float | None) -> Figure:
    figure = figure_class(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, curve in enumerate(curves):
        middles = [(begin + end) / 2 for begin, end in zip(curve.bins, curve.bins[1:])]
        for axis, values, factor in ((left, curve.local, 100), (right, curve.latency, 1)):
            axis.plot(middles, [factor * value for value in values], color=f"C{i}", label=curve.name, linewidth=1.5)
            for move in curve.moves:
                axis.axvline(move, color=f"C{i}", linewidth=0.8, linestyle=":")
    for axis, label in ((left, "rows that the server computes itself, %"), (right, "mean latency of a request, s")):
        if shift is not None:
            axis.axvline(shift, color="0.4", linewidth=1.2, linestyle="--", label="workload changes")
        axis.set_xlabel("time, s")
        axis.set_ylabel(label)
    left.set_ylim(0, 100)
    right.set_ylim(bottom=0)
    left.legend(fontsize=8)
    return figure


def _scaling(figure_class: type[Figure], curves: Sequence[Curve]) -> Figure:
    """Draws latency by size and by bandwidth. Each has a line for each value of the other, and for each group."""
    sizes, rates = (sorted({getattr(curve, name) for curve in curves}) for name in ("n_servers", "megabits"))
    several = [len(sizes) > 1, len(rates) > 1]
    figure = figure_class(figsize=(5.5 * sum(several), 3.8), layout="constrained")
    axes = iter(figure.subplots(1, sum(several), squeeze=False)[0])
    if several[0]:
        axis = next(axes)
        _lines(axis, [(curve.n_servers, f"{curve.megabits:g} Mbit/s" if several[1] else "", curve) for curve in curves])
        axis.set_xlabel("servers")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, map(str, sizes))
    if several[1]:
        axis = next(axes)
        _lines(axis, [(curve.megabits, f"{curve.n_servers} servers" if several[0] else "", curve) for curve in curves])
        axis.set_xlabel("bandwidth of links, Mbit/s")
    for axis in figure.axes:
        axis.set_ylabel("mean latency of a request, s")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    return figure


def _lines(axis, points: Sequence[tuple[float, str, Curve]]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for x, what, curve in points:
        lines.setdefault(", ".join(filter(None, (curve.group, what))), []).append((x, curve.latency_mean))
    for name, line in lines.items():
        axis.plot(*zip(*sorted(line)), marker=".", label=name)
