"""Output of commands for people: lines, tables, and labelled facts.

On a terminal they fit its width, and colours obey NO_COLOR. A pipe gets plain text without wrapping. Control characters
of names are escaped.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from pyorch.errors import one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_ANY_WIDTH = 10_000
_GAP = 2  # spaces between columns


@dataclass(frozen=True)
class Table:
    """rows: a cell for each column; an empty row is an empty line. left: titles of columns of words, not numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()
    title: str = ""


@dataclass(frozen=True)
class Facts:
    """rows: label and value."""

    rows: Sequence[tuple[str, str]]


def show(parts: Iterable[str | Table | Facts], file: TextIO | None = None) -> None:
    """Prints the parts, one below the other, to stdout or `file`."""
    file = sys.stdout if file is None else file
    for part in parts:
        if isinstance(part, str):
            print(one_line(part), file=file)
        elif file.isatty():
            _show_on_terminal(part, file)
        else:
            if isinstance(part, Table) and part.title:
                print(part.title, file=file)
            print(_plain(part), file=file)
    file.flush()


def _show_on_terminal(part: Table | Facts, file: TextIO) -> None:
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if isinstance(part, Table) and part.title:  # rich would wrap the title at the table's width
        console.print(part.title)
    if isinstance(part, Facts):
        console.print(_grid(part))
    elif _width(part) <= console.width:
        console.print(_table(part))
    else:
        _show_row_by_row(part, console)


def _show_row_by_row(table: Table, console: Console) -> None:
    """Shows a table that is too wide row by row: a number split over two lines is unreadable."""
    from rich.padding import Padding

    for row in table.rows:
        names = table.left or table.columns[:1]
        heading = [cell for title, cell in zip(table.columns, row) if title in names and cell]
        if heading:
            console.print(one_line(" ".join(heading)), style="bold")
        facts = [(title, cell) for title, cell in zip(table.columns, row) if title not in names and cell]
        console.print(Padding(_grid(Facts(facts)), (0, 0, 0, 2)))


def _plain(part: Table | Facts) -> str:
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=_ANY_WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False,
                      highlight=False)
    console.print(_grid(part) if isinstance(part, Facts) else _table(part))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _width(table: Table) -> int:
    from rich.cells import cell_len

    columns = zip(table.columns, *(row for row in table.rows if row))
    return sum(max(cell_len(one_line(cell)) for cell in column) for column in columns) + _GAP * (len(table.columns) - 1)


def _table(table: Table) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for title in table.columns:
        rich.add_column(Text(title), justify="left" if title in table.left else "right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*(Text(one_line(cell)) for cell in row))
    return rich


def _grid(facts: Facts) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable.grid(padding=(0, _GAP, 0, 0))
    rich.add_column(style="bold", no_wrap=True)
    rich.add_column(overflow="fold")
    for label, value in facts.rows:
        rich.add_row(Text(label), Text(one_line(value)))
    return rich
