"""The file of settings: which value wins, where it is from, and what is said of names and values that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyorch.cli import _parse, main
from pyorch.errors import PyorchError

LEVELS = """\
tokens = 1
[run]
tokens = 2
[model."SMALL"]
tokens = 3
[model."small*q4".run]
tokens = 4
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the file where it is looked for."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def write(text: str) -> Path:
        path = tmp_path / "pyorch/config.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(("words", "tokens"), [
    (["bench", "other.gguf"], 1), (["run", "other.gguf"], 2), (["bench", "models/small-moe.gguf"], 3),
    (["run", "small-moe.gguf"], 3), (["run", "hf:org/small-moe-q4:Q4_K_M"], 4),
    (["run", "small-q4.gguf", "-n", "5"], 5),
])
def test_what_is_said_more_closely_wins(write, words: list[str], tokens: int) -> None:
    write(LEVELS)
    assert _parse(words).tokens == tokens


def test_a_value_means_what_the_flag_means(write, tmp_path: Path) -> None:
    write('buffered = true\nverbose = true\nbudget = "40%"\n[profile]\ndata = ["a.txt", "~/b.txt"]\n'
          'output = "x.trace"\n[model.other]\nverbose = false\n')
    data = ["a.txt", str(Path.home() / "b.txt")]
    flags = ["--buffered", "--verbose", "--budget", "40%", "--data", *data, "--output", "x.trace"]
    by_file = vars(_parse(["profile", "model.gguf"]))
    elsewhere = tmp_path / "empty.toml"
    elsewhere.touch()
    by_flags = vars(_parse(["--config", str(elsewhere), "profile", "model.gguf", *flags]))
    assert by_file | {"config": by_flags["config"]} == by_flags
    assert _parse(["profile", "other.gguf"]).verbose is False


def test_what_may_be_repeated_is_replaced(write) -> None:
    write('[eval.arc]\nlossy = ["heaviest", "ghosts"]\ndata = "a.jsonl"\n')
    assert _parse(["eval", "arc", "m.gguf"]).settings == ["heaviest", "ghosts"]
    given = _parse(["eval", "arc", "m.gguf", "--lossy", "buddies", "--lossy", "none", "--data", "b", "c"])
    assert given.settings == ["buddies", "none"] and [str(path) for path in given.data] == ["b", "c"]


@pytest.mark.parametrize(("text", "said"), [
    ('threads = 2\nbudjet = "40%"', ':2: nothing is called "budjet": did you mean budget?'),
    ('[serv]\nport = 1', ':1: nothing is called "serv": did you mean serve?'),
    ('[run]\n# port\nport = 1', ':3: nothing is called "port"'),
    ('[model.olmoe]\nbudget = "1GiB"\n[model.olmoe.rnu]\ntemp = 0', ':3: nothing is called "rnu": did you mean run?'),
    ('[model."olmoe"]\n\nbudgt = "40%"', ':3: nothing is called "budgt": did you mean budget?'),
    ('run = 3', ":1: run is a value, and has to be a table: [run]"),
    ('threads = "all"', ":1: n_threads is all, and must be a whole number from 1"),
    ("threads = 4.5", ":1: n_threads is 4.5, and must be a whole number from 1 to 512"),
    ('[run]\ntokens = "some"', ':2: argument -n/--tokens: "some" is not a whole number of 1 or more'),
    ('verbose = "yes"', ':1: verbose is "yes", and must be true or false'),
    ('budget = true', ":1: budget is true, and must be a text or a number"),
    ('run.temp = -1', ":1: argument --temp"),
    ('threads = ', "is not TOML"),
])
def test_what_cannot_be_meant_is_said_with_its_place(
    write, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    for words in (["run", "olmoe.gguf", "-p", "x"], ["config"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"{path}{said}" in error or ("TOML" in said and said in error), error
        assert len(error.splitlines()) == 1


def test_a_flag_of_another_command_is_known(write) -> None:
    write('grace = 5\ntemp = 0\n')
    assert _parse(["serve", "m.gguf"]).grace == 5
    assert not hasattr(_parse(["models"]), "grace")


def test_config_says_what_is_in_force_and_where_it_is_from(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(LEVELS)
    assert main(["config", "run", "small-moe.gguf", "--json"]) == 0
    rows = {row["name"]: (row["value"], row["from"]) for row in json.loads(capsys.readouterr().out)}
    assert rows["tokens"] == (3, f"{path}:5") and rows["budget"] == ("auto", "default")
    assert rows["policy"] == ("learned", "default") and rows["ctx"] == ("as trained, at most 4096", "default")
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert f"{path}:3" in shown and str(path) in shown.splitlines()[0]
    assert main(["config", "rnu"]) == 2


def test_the_file_can_be_named_before_the_command(
    write, tmp_path: Path, small_moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write('budget = "much"\n')
    named = tmp_path / "mine.toml"
    named.write_text(f'budget = "50%"\n[model."{small_moe.stem}"]\ntokens = 3\n[run]\ntemp = 0\nthreads = 1\n')
    assert main(["--config", str(named), "run", str(small_moe), "-p", "import ", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["decode_tokens"] == 2 and stats["experts"]["budget_bytes"] == 6 << 20
    for words, said in ((["--config", str(tmp_path / "none.toml"), "models"], "none.toml cannot be read"),
                        (["--config"], "expected one argument")):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    named.write_text("")
    assert main(["--config", str(named), "run", "m.gguf", "--config", "x"]) == 2
    assert "before the command" in capsys.readouterr().err


def test_a_short_name_means_the_model_that_it_finds(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write('[model."olmoe-7b"]\nbudget = "40%"\n')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OLMoE-7B-it.gguf").touch()
    assert _parse(["run", "olm"]).budget == "40%"
    assert _parse(["run", "other"]).budget is None


def test_without_a_file_all_is_as_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["config", "serve", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["from"] for row in rows} == {"default"} and {"name": "grace", "value": 10.0, "from": "default"} in rows
    assert {"name": "prompt-cache", "value": "1GiB", "from": "default"} in rows
    with pytest.raises(PyorchError, match="is not a command"):
        _parse(["confg"])
