"""How far a command is: a bar on a terminal, now and then a line elsewhere, and nothing that programs would read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import Terminal

from pyorch.cli import main
from pyorch.cli.progress import PlainLines, Progress

_COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture()
def clock() -> Clock:
    return Clock()


@pytest.fixture()
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


@pytest.fixture()
def pipe() -> Iterator[tuple]:
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as lines, open(writer, "w", encoding="utf-8") as stream:
        yield lines, stream


def test_a_short_command_says_nothing(clock: Clock) -> None:
    lines = PlainLines(10, clock)
    for done in range(100):
        clock.now += 0.0999
        assert lines.update("counting", done, 100) is None and lines.beat() is None


def test_a_line_comes_every_ten_seconds(clock: Clock) -> None:
    lines = PlainLines(10, clock)
    said = []
    for _ in range(60):  # nothing is done in that minute
        clock.now += 1
        said.append(lines.update("reading", 1, 100))
    assert [second for second, line in enumerate(said, 1) if line] == [10, 20, 30, 40, 50, 60]
    assert said[9] == "reading: 1%"


def test_a_line_comes_for_every_tenth_of_the_work_too(clock: Clock) -> None:
    lines = PlainLines(10, clock)
    said = []
    for done in range(1, 101):
        clock.now += 0.5
        said.append(lines.update("reading", done, 100))
    assert [int(line.split()[1].rstrip("%,")) for line in said if line] == [20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert said[19] == "reading: 20%, about 38 s left"


def test_lines_are_at_least_a_second_apart(clock: Clock) -> None:
    lines = PlainLines(10, clock)
    clock.now += 10
    assert lines.update("reading", 0, 100) == "reading: 0%"
    clock.now += 0.5
    assert lines.update("reading", 50, 100) is None
    clock.now += 0.6
    assert lines.update("reading", 51, 100).startswith("reading: 51%")


def test_what_has_no_known_end_is_counted(clock: Clock) -> None:
    lines = PlainLines(10, clock)
    clock.now += 11
    assert lines.update("calibrating", 1200, 0) == "calibrating: 1200 so far"


def test_another_piece_of_work_has_a_pace_of_its_own(clock: Clock) -> None:
    lines = PlainLines(10, clock)
    lines.update("converting", 100, 100)
    clock.now += 10
    lines.update("quantizing", 0, 50)
    clock.now += 10
    assert lines.update("quantizing", 25, 50) == "quantizing: 50%, about 10 s left"


def test_a_step_that_reports_nothing_is_seen_to_live(pipe: tuple) -> None:
    lines, stream = pipe
    with Progress(stream=stream, interval=0.01) as progress:
        assert lines.readline() == "pyorch: starting\n"
        progress.update("reading", 3, 0)
        while (line := lines.readline()) == "pyorch: starting\n":
            pass
        assert line == lines.readline() == "pyorch: reading: 3 so far\n"


def test_lines_are_not_lost_where_the_descriptor_is_pointed_elsewhere(pipe: tuple) -> None:
    lines, stream = pipe
    with Progress(stream=stream, interval=0.01):
        assert lines.readline() == "pyorch: starting\n"
        with open(os.devnull, "w") as silence:
            os.dup2(silence.fileno(), stream.fileno())  # as llama_cpp does while it loads a model
        assert lines.readline() == "pyorch: starting\n"


def test_nothing_is_said_after_the_end(pipe: tuple) -> None:
    lines, stream = pipe
    with Progress(stream=stream, interval=0.01) as progress:
        assert lines.readline()
        with progress.paused():
            stream.write("in between\n")
            stream.flush()
        progress.say("noted")
    stream.write("the end\n")
    stream.close()
    said = lines.read().splitlines()
    assert said[-1] == "the end" and "in between" in said and "pyorch: noted" in said


def test_a_terminal_shows_a_bar_and_loses_it_again(terminal: Terminal) -> None:
    with Progress(stream=terminal.stream) as progress:
        progress.update("counting [x]", 1, 2)
    shown = terminal.text()
    assert "counting [x]" in shown and "50%" in shown and _COLOUR.search(shown)
    assert shown.rstrip().endswith("\x1b[2K") and "\x1b[?25h" in shown  # the line is erased, the cursor is back


def test_no_color_leaves_the_bar_without_colours(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with Progress(stream=terminal.stream) as progress:
        progress.update("counting", 1, 2)
    shown = terminal.text()
    assert "50%" in shown and not _COLOUR.search(shown)


def test_a_log_that_scrolls_forbids_the_bar(terminal: Terminal) -> None:
    with Progress(live=False, stream=terminal.stream) as progress:
        progress.update("counting", 1, 2)
    assert terminal.text() == ""


def test_json_is_clean_where_a_bar_is_shown(small_moe: Path, terminal: Terminal) -> None:
    command = [sys.executable, "-m", "pyorch", "verify", small_moe, "--tokens", "4", "--threads", "1", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal.stream, check=False)
    shown = terminal.text()
    assert done.returncode == 0, shown
    (comparison,) = json.loads(done.stdout)
    assert comparison["identical"] and "resident model" in shown and "budget 50%" in shown


@pytest.mark.parametrize(("command", "steps"), [
    ("convert HF_DIR -o OUT --pre-tokenizer gpt-2 --quantize Q8_0", ["converting", "quantizing"]),
    ("profile MODEL --data TEXT -o OUT", ["profiling"]),
    ("calibrate MODEL --data TEXT -o OUT", ["calibrating"]),
    ("maps MODEL TRACE -o OUT", ["searching"]),
    ("buddies MODEL --trace TRACE -o OUT", ["counting"]),
    ("eval perplexity MODEL --data TEXT --tokens 64", ["tokens"]),
    ("demo --tokens 8 -o OUT", ["converting", "resident model", "budget 50%"]),
])
def test_long_commands_show_how_far_they_are(
    command: str, steps: list[str], small_moe: Path, text: Path, trace: Path, tmp_path: Path, terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch, torch_at_hand: None,
) -> None:
    fixtures = Path(__file__).parents[1] / "fixtures"
    words = {
        "MODEL": small_moe,
        "TEXT": text,
        "TRACE": trace,
        "OUT": tmp_path / "out",
        "HF_DIR": fixtures / "small-moe",
    }
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    status = main([str(words.get(word, word)) for word in command.split()])
    monkeypatch.undo()
    shown = terminal.text()
    assert status == 0, shown
    assert [step for step in steps if step not in shown] == []
    assert (tmp_path / "out").is_file() == ("OUT" in command)
