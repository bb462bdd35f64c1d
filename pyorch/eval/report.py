"""A sweep's table: as text, as CSV, as plain data for JSON, and as a picture of accuracy against throughput."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import pictures
from pyorch.errors import PyorchError
from pyorch.eval.arc import Difference
from pyorch.eval.perplexity import Divergence
from pyorch.eval.sweep import METRICS, Row
from pyorch.sizes import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHANGED = "changed slots/token"  # substituted, dropped or computed by ghosts


def names(data: Sequence[str]) -> list[str]:
    """Returns short names of the files: ARC-E and ARC-C for these, otherwise the name without directory and suffix."""
    known = {"arc-easy": "ARC-E", "arc-challenge": "ARC-C"}
    stems = [Path(path).stem for path in data]
    short = [next((name for start, name in known.items() if stem.lower().startswith(start)), stem) for stem in stems]
    for candidate in (short, stems):
        if len(set(candidate)) == len(data):
            return candidate
    return list(data)


WORDS = ("cache", "method", "settings")  # titles of columns without numbers


def table(rows: Sequence[Row], data: Sequence[str], metric: str) -> tuple[list[str], list[list[str]]]:
    """Returns titles and rows, with an empty row between cache rates, without columns that have no information."""
    columns = _columns(rows, names(data), metric)
    lines: list[list[str]] = []
    for i, row in enumerate(rows):
        if i and row.rate != rows[i - 1].rate:
            lines.append([])
        lines.append([cell(row) for _, cell in columns])
    return [title for title, _ in columns], lines


def _columns(rows: Sequence[Row], files: Sequence[str], metric: str) -> list:
    swept = rows[0].rate is not None
    columns = []
    if swept:
        columns += [("cache", lambda row: f"{row.rate:g}"), ("method", lambda row: row.method),
                    ("settings", lambda row: row.settings)]
    columns += [
        (name, lambda row, i=i: f"{getattr(row.judgement.accuracies[i], metric):.3f}") for i, name in enumerate(files)
    ]
    if len(files) > 1:
        columns.append(("average", lambda row: f"{row.judgement.average(metric):.3f}"))
    if swept:
        columns.append(("kept", lambda row: "-" if math.isnan(row.kept[metric]) else f"{row.kept[metric]:.1%}"))
        columns.append(("differs", lambda row: _difference(row.differs[metric])))
    if any(row.judgement.divergence is not None for row in rows):
        columns.append(("KL", lambda row: _nats(row.judgement.divergence)))
    if any(row.speed is not None for row in rows):
        columns += [
            ("tok/s", lambda row: _number(row.speed, lambda speed: f"{speed.rate:.2f}")),
            ("speedup", lambda row: "-" if row.speedup is None else f"{row.speedup - 1:+.1%}"),
            ("MiB/token", lambda row: _number(row.speed, lambda speed: f"{speed.bytes_per_token / MiB:.2f}")),
            (_CHANGED, lambda row: _number(
                row.speed, lambda speed: f"{(speed.substituted + speed.dropped + speed.ghosts) / speed.n_tokens:.2f}")),
        ]
    elif swept:
        columns.append((
            _CHANGED, lambda row: f"{sum(map(row.judgement.slots.per_token, ('substituted', 'dropped', 'ghosts'))):.2f}"
        ))
    return columns


def _number(value, form) -> str:
    return "-" if value is None else form(value)


def _difference(found: Difference) -> str:
    return f"{found.mean:+.3f}" + ("" if math.isnan(found.stderr) else f" ±{found.stderr:.3f}")


def _nats(found: Divergence) -> str:
    return f"{found.mean:.4f} ±{found.stderr:.4f}"


def to_json(rows: Sequence[Row], data: Sequence[str]) -> list[dict[str, object]]:
    """Returns one flat object per row, with the columns of the CSV. Accuracies and shares are from 0 to 1.

    judged_*_per_token are expert slots while accuracy was measured; text_*: divergence; decoded_*: speed. read: experts
    that a token waits for.
    """
    result = []
    for row in rows:
        flat: dict[str, object] = {"cache_rate": row.rate, "method": row.method, "settings": row.settings}
        for name, accuracy in zip(names(data), row.judgement.accuracies):
            flat[f"{name} questions"] = accuracy.n
            for metric in METRICS:
                flat[f"{name} {metric}"] = getattr(accuracy, metric)
                flat[f"{name} {metric} stderr"] = accuracy.stderr(metric)
        for metric in METRICS:
            flat[f"average {metric}"] = row.judgement.average(metric)
            flat[f"kept {metric}"] = row.kept[metric]
            flat[f"differs {metric}"] = row.differs[metric].mean
            flat[f"differs {metric} stderr"] = row.differs[metric].stderr
        divergence = row.judgement.divergence
        flat["kl_divergence"] = divergence.mean if divergence is not None else None
        flat["kl_divergence stderr"] = divergence.stderr if divergence is not None else None
        for what in ("absent", "substituted", "dropped", "ghosts"):
            flat[f"judged_{what}_per_token"] = row.judgement.slots.per_token(what)
        for name, done in (("judged", row.judgement.slots), ("text", row.judgement.text_slots)):
            flat[f"{name}_read_per_token"] = done.read_per_token
        flat["text_absent_per_token"] = row.judgement.text_slots.per_token("absent")
        speed = row.speed
        flat["tokens_per_second"] = speed.rate if speed is not None else None
        flat["speedup"] = row.speedup
        flat["bytes_read_per_token"] = speed.bytes_per_token if speed is not None else None
        flat["stall_seconds_per_token"] = speed.stall_seconds / speed.n_tokens if speed is not None else None
        flat["hit_rate"] = speed.hits / (speed.hits + speed.misses) if speed is not None and speed.hits else None
        for what in ("substituted", "dropped", "ghosts"):
            flat[f"decoded_{what}_per_token"] = getattr(speed, what) / speed.n_tokens if speed is not None else None
        result.append(flat)
    return result


def to_csv(objects: Sequence[dict[str, object]]) -> str:
    """Returns the CSV of the objects that to_json() makes."""
    text = io.StringIO()
    columns = dict.fromkeys(name for flat in objects for name in flat)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(objects)
    return text.getvalue()


_LOOKS = {"original": ("black", "s"), "random": ("tab:red", "X")}
_COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:cyan", "tab:brown", "tab:pink", "tab:olive")
_MARKERS = "o^vDP*"


def draw(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Writes the picture of the rows that have a speed. PyorchError: there are none, or matplotlib is missing."""
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
    """Returns colour and marker of each label, the same in all panels."""
    looks = {}
    for row in rows:
        n = sum(label not in _LOOKS for label in looks)
        other = _COLOURS[n % len(_COLOURS)], _MARKERS[n % len(_MARKERS)]
        looks.setdefault(_label(row), _LOOKS.get(_label(row), other))
    return looks


def _label(row: Row) -> str:
    alone = row.method in _LOOKS and row.settings in ("", f"mode={row.method}")
    return row.method if alone else f"{row.method} {row.settings}"
