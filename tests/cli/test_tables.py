"""What commands print for people: as wide as it is in a pipe, within its borders on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from terminals import Terminal

from pyorch.cli import main
from pyorch.cli.tables import Facts, Table, show

TABLE = Table(
    ("policy", "predictor", "hits [%]", "ms/token"),
    [("lru", "none", "47.1%", "1234.5"), (), ("finemoe", "next-router:2:0.5", "100.0%", "9.0")],
    left=("policy", "predictor"), title="a table of [bold]numbers[/bold]",
)
FACTS = Facts([("model", "a name of many words, " * 4), ("layers", "8")])
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def piped(*parts: object) -> list[str]:
    file = io.StringIO()
    show(parts, file)
    return file.getvalue().splitlines()


def on_terminal(columns: int, monkeypatch: pytest.MonkeyPatch, *parts: object, kind: str = "xterm") -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", kind)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    show(parts, terminal.stream)
    return terminal.text().replace("\r\n", "\n")


def test_a_pipe_gets_plain_text_as_wide_as_it_is() -> None:
    assert piped("a line [x]", TABLE, FACTS) == [
        "a line [x]",
        "a table of [bold]numbers[/bold]",
        "policy   predictor          hits [%]  ms/token",
        "lru      none                  47.1%    1234.5",
        "",
        "finemoe  next-router:2:0.5    100.0%       9.0",
        "model   " + "a name of many words, " * 3 + "a name of many words,",
        "layers  8",
    ]


def test_a_title_is_one_line_however_narrow_its_table_is() -> None:
    title = "recall of both predictors on 952 tokens that were held out"
    assert piped(Table(("a", "b"), [("1", "2")], title=title)) == [title, "a  b", "1  2"]


def test_a_terminal_that_is_wide_enough_shows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(60, monkeypatch, TABLE)
    assert [line.rstrip() for line in _STYLE.sub("", shown).splitlines()] == piped(TABLE)
    assert "\x1b[1m" in shown  # titles stand out


def test_no_number_is_cut_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _STYLE.sub("", on_terminal(30, monkeypatch, TABLE, FACTS)).splitlines()
    assert all(len(line) <= 30 for line in lines)
    words = {word for line in lines for word in line.split()}
    assert {"lru", "47.1%", "1234.5", "next-router:2:0.5", "100.0%", "9.0", "hits", "[%]", "ms/token"} <= words
    assert " ".join(words).count("words,") == 1 and sum("words," in line for line in lines) == 4


def test_a_dumb_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(80, monkeypatch, TABLE, kind="dumb")
    assert "\x1b" not in shown and "1234.5" in shown


def test_a_table_of_a_command_is_plain_in_a_pipe(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(small_moe), "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layers          8, 8 of them with routed experts" in lines
    assert len(lines) > 8 + 6 and not any("\x1b" in line or line != line.rstrip() for line in lines)
