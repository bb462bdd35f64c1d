"""A sweep's table: for people, as CSV, and as plain data for JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from pyorch.eval.arc import Difference
from pyorch.eval.perplexity import Divergence
from pyorch.eval.sweep import METRICS, Row
from pyorch.sizes import MiB

_CHANGED = "changed slots/token"  # substituted, dropped or computed by ghosts


def names(data: Sequence[str]) -> list[str]:
    """Short names of the files: ARC-E and ARC-C where they are these, else without directory and suffix."""
    known = {"arc-easy": "ARC-E", "arc-challenge": "ARC-C"}
    stems = [Path(path).stem for path in data]
    short = [next((name for start, name in known.items() if stem.lower().startswith(start)), stem) for stem in stems]
    for candidate in (short, stems):
        if len(set(candidate)) == len(data):
            return candidate
    return list(data)


WORDS = ("cache", "method", "settings")  # titles of the columns that hold no numbers


def table(rows: Sequence[Row], data: Sequence[str], metric: str) -> tuple[list[str], list[list[str]]]:
    """Titles of columns and their rows, an empty row between cache rates. Columns that say nothing are left out."""
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
        columns += [
            ("cache", lambda row: f"{row.rate:g}"),
            ("method", lambda row: row.method),
            ("settings", lambda row: row.settings),
        ]
    columns += [
        (name, lambda row, i=i: f"{getattr(row.judgement.accuracies[i], metric):.3f}") for i, name in enumerate(files)
    ]
    if len(files) > 1:
        columns.append(("average", lambda row: f"{row.judgement.average(metric):.3f}"))
    if swept:
        columns.append(("kept", lambda row: f"{row.kept[metric]:.1%}"))
        columns.append(("differs", lambda row: _difference(row.differs[metric])))
    if any(row.judgement.divergence is not None for row in rows):
        columns.append(("KL", lambda row: _nats(row.judgement.divergence)))
    if any(row.speed is not None for row in rows):
        columns += [
            ("tok/s", lambda row: _number(row.speed, lambda speed: f"{speed.rate:.2f}")),
            ("speedup", lambda row: "-" if row.speedup is None else f"{row.speedup - 1:+.1%}"),
            ("MiB/token", lambda row: _number(row.speed, lambda speed: f"{speed.bytes_per_token / MiB:.2f}")),
            (
                _CHANGED,
                lambda row: _number(
                    row.speed,
                    lambda speed: f"{(speed.substituted + speed.dropped + speed.ghosts) / speed.n_tokens:.2f}"
                ),
            ),
        ]
    elif swept:
        columns.append(
            (_CHANGED,
             lambda row: f"{sum(map(row.judgement.slots.per_token, ('substituted', 'dropped', 'ghosts'))):.2f}")
        )
    return columns


def _number(value, form) -> str:
    return "-" if value is None else form(value)


def _difference(found: Difference) -> str:
    return f"{found.mean:+.3f} ±{found.stderr:.3f}"


def _nats(found: Divergence) -> str:
    return f"{found.mean:.4f} ±{found.stderr:.4f}"


def to_json(rows: Sequence[Row], data: Sequence[str]) -> list[dict[str, object]]:
    """One flat object for each row; also the columns of the CSV. Accuracies and shares from 0 to 1.

    judged_*_per_token: expert slots while accuracy was measured; decoded_*: while speed was.
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
    """Of those that to_json() makes."""
    text = io.StringIO()
    columns = dict.fromkeys(name for flat in objects for name in flat)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(objects)
    return text.getvalue()
