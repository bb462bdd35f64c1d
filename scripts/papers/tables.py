"""Tables of an evaluation, as text and as CSV files, and goals."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pyorch.files import write_text


@dataclass(frozen=True)
class Table:
    """A table. name: of its file. rows: full values; texts() shortens numbers."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple, ...]

    def texts(self) -> list[tuple[str, ...]]:
        """Returns the rows as text."""
        return [tuple(_text(cell) for cell in row) for row in self.rows]

    @property
    def words(self) -> tuple[str, ...]:
        """Returns titles of the columns without numbers."""
        return tuple(title for i, title in enumerate(self.columns) if all(isinstance(row[i], str) for row in self.rows))

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Goal:
    """A goal.

    Attributes:
        reached: nan: not measured.
        at_most: The value must be below the goal, not above.
        interval: Of the mean of repeated measurements, with 95 %.
    """

    what: str
    goal: float
    reached: float
    at_most: bool = False
    interval: tuple[float, float] | None = None

    @property
    def met(self) -> bool:
        return self.reached <= self.goal if self.at_most else self.reached >= self.goal

    @property
    def measured(self) -> bool:
        return self.reached == self.reached


def goal_table(goals: Iterable[Goal]) -> Table:
    return Table("goals", "goals", ("goal", "", "limit", "reached", "interval", "met"), tuple(
        (goal.what, "at most" if goal.at_most else "at least", goal.goal, goal.reached,
         "-" if goal.interval is None else " to ".join(map(_text, goal.interval)),
         "-" if not goal.measured else "yes" if goal.met else "NO") for goal in goals
    ))


def write_csv(tables: Iterable[Table], directory: Path) -> list[Path]:
    """Writes a file for each table. PyorchError: the directory cannot be written."""
    paths = []
    for table in tables:
        paths.append(directory / f"{table.name}.csv")
        write_text(paths[-1], table.csv())
    return paths


def _text(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    if cell != cell:
        return "-"
    return f"{cell:.3f}" if abs(cell) < 10 else f"{cell:.1f}"
