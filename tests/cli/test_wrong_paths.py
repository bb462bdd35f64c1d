"""A path that leads nowhere: every command says so in one sentence, with exit status 2, and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pyorch.cli import COMMANDS, main, make_parser, with_nested

# What each command is given. MODEL, TRACE, TEXT, HF_DIR: files that exist; NONE: one that does not; NOWHERE: a file in
# a directory that does not exist; OUT: a file that could be written.
INPUTS = [
    "run NONE -p x",
    "run MODEL -f NONE",
    "run MODEL -p x --tuned NONE",
    "run MODEL -p x --lossy buddies --buddies-file NONE",
    "serve NONE",
    "serve MODEL --tuned NONE",
    "convert NONE -o OUT",
    "inspect NONE",
    "advise NONE",
    "advise MODEL --trace NONE",
    "models list NONE",
    "models rm NONE --yes",
    "pack NONE -o OUT",
    "verify NONE",
    "verify MODEL -f NONE",
    "bench NONE",
    "bench MODEL --data NONE",
    "profile NONE --data TEXT -o OUT",
    "profile MODEL --data NONE -o OUT",
    "plan NONE --budget 40%",
    "plan MODEL --trace NONE --budget 40%",
    "calibrate NONE --data TEXT -o OUT",
    "calibrate MODEL --data NONE -o OUT",
    "prepare NONE --data TEXT",
    "prepare MODEL --data NONE",
    "prepare MODEL --data TEXT --questions NONE",
    "train-predictor NONE --data TEXT -o OUT",
    "train-predictor MODEL --data NONE -o OUT",
    "maps NONE TRACE -o OUT",
    "maps MODEL NONE -o OUT",
    "buddies NONE --trace TRACE -o OUT",
    "ghosts NONE --trace TRACE -o OUT",
    "buddies MODEL --trace NONE -o OUT",
    "ghosts MODEL --trace NONE -o OUT",
    "eval arc NONE --data TEXT",
    "eval arc MODEL --data NONE",
    "eval perplexity NONE --data TEXT",
    "eval perplexity MODEL --data NONE",
    "tune NONE --data TEXT --cache-rate 0.5 -o OUT",
    "tune MODEL --data NONE --cache-rate 0.5 -o OUT",
    "place --cluster NONE --trace here=TRACE -o OUT",
    "place --cluster TOML --trace here=NONE -o OUT",
    "cluster up --config NONE",
    "exec NONE",
    "demo NONE",
    "place --cluster NONE --trace a=TRACE -o OUT",
    "cluster up --config NONE",
]
OUTPUTS = [
    "run MODEL -p x --prefetch expert-map --maps NOWHERE",
    "serve MODEL --prefetch expert-map --maps NOWHERE",
    "convert HF_DIR -o NOWHERE",
    "pack MODEL -o NOWHERE",
    "profile MODEL --data TEXT -o NOWHERE",
    "plan MODEL --budget 40% -o NOWHERE",
    "calibrate MODEL --data TEXT -o NOWHERE",
    "train-predictor MODEL --data TEXT -o NOWHERE",
    "maps MODEL TRACE -o NOWHERE",
    "buddies MODEL --trace TRACE -o NOWHERE",
    "ghosts MODEL --trace TRACE -o NOWHERE",
    "eval arc MODEL --data TEXT --csv NOWHERE",
    "eval arc MODEL --data TEXT --cache-rate 0.5 --plot NOWHERE",
    "eval arc MODEL --data TEXT --resume NOWHERE",
    "tune MODEL --data TEXT --cache-rate 0.5 -o NOWHERE",
]
# A directory for pictures that is a file.
PICTURES = [
    "advise MODEL --plot TEXT",
]
# What would replace a file that is read for it: of these, the last word.
REPLACED = [
    "pack MODEL -o MODEL",
    "profile MODEL --data TEXT -o MODEL",
    "profile MODEL --data TEXT -o TEXT",
    "plan MODEL --budget 40% -o MODEL",
    "plan MODEL --budget 40% --trace TRACE -o TRACE",
    "calibrate MODEL --data TEXT -o MODEL",
    "train-predictor MODEL --data TEXT -o MODEL",
    "maps MODEL TRACE -o MODEL",
    "maps MODEL TRACE -o TRACE",
    "buddies MODEL --trace TRACE -o MODEL",
    "ghosts MODEL --trace TRACE -o MODEL",
    "eval arc MODEL --data TEXT --csv TEXT",
    "tune MODEL --data TEXT --cache-rate 0.5 -o MODEL",
]
# What would replace a file that somebody else made: OUT, a file; PICTURES: a directory with such a file.
OCCUPIED = [
    "convert HF_DIR -o OUT",
    "demo -o OUT",
    "pack MODEL -o OUT",
    "pack MODEL --slim OUT",
    "profile MODEL --data TEXT -o OUT",
    "plan MODEL --budget 40% -o OUT",
    "calibrate MODEL --data TEXT -o OUT",
    "train-predictor MODEL --data TEXT -o OUT",
    "maps MODEL TRACE -o OUT",
    "buddies MODEL --trace TRACE -o OUT",
    "ghosts MODEL --trace TRACE -o OUT",
    "tune MODEL --data TEXT --cache-rate 0.5 -o OUT",
    "eval arc MODEL --data TEXT --csv OUT",
    "eval arc MODEL --data TEXT --cache-rate 0.5 --plot OUT",
    "bench MODEL --lossy heaviest --plot OUT",
    "advise MODEL --plot PICTURES",
    "place --cluster TOML --trace here=TRACE -o OUT",
    "place --cluster TOML --trace here=TRACE -o NEW --save-counts OUT",
    "cluster measure --config TOML -o OUT",
]


def _with_paths(word: str, paths: dict[str, Path]) -> str:
    server, equals, path = word.rpartition("=")
    return server + equals + str(paths.get(path, path))


def refusal(line: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must fail."""
    capsys.readouterr()
    assert main([_with_paths(word, paths) for word in line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pyorch: error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


@pytest.fixture
def paths(
    small_moe: Path, text: Path, trace: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    cluster = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    cluster.write_text(f'model = "{small_moe}"\n[[server]]\nname = "here"\nmemory = "100%"\n', encoding="utf-8")
    return {
        "MODEL": small_moe, "TOML": cluster, "TRACE": trace, "TEXT": text,
        "HF_DIR": Path(__file__).parents[1] / "fixtures" / "small-moe",
        "NEW": tmp_path / "new", "PICTURES": tmp_path / "pictures",
        "NONE": tmp_path / "absent.file", "NOWHERE": tmp_path / "absent-directory" / "out", "OUT": tmp_path / "out",
    }


def test_every_command_is_asked() -> None:
    assert {line.split()[0] for line in INPUTS} == COMMANDS.keys() - {"completion", "config"}  # which read none


@pytest.mark.parametrize("line", INPUTS)
def test_a_file_that_does_not_exist(line: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert str(paths["NONE"]) in refusal(line, paths, capsys)
    assert not any(paths["OUT"].parent.iterdir())


@pytest.mark.parametrize("line", OUTPUTS)
def test_an_output_in_a_directory_that_does_not_exist(
    line: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(paths["NOWHERE"].parent) in refusal(line, paths, capsys)
    assert not paths["NOWHERE"].parent.exists()


@pytest.mark.parametrize("line", PICTURES)
def test_pictures_that_cannot_be_written_are_refused_before_anything_is_measured(
    line: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    before = paths["TEXT"].read_bytes()
    assert f"{paths['TEXT']} is a file, and a folder is needed there" in refusal(line, paths, capsys)
    assert paths["TEXT"].read_bytes() == before and not paths["OUT"].exists()


@pytest.mark.parametrize("line", REPLACED)
def test_an_output_that_would_replace_what_is_read(
    line: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the hand must not cost the model. It is found before anything is done."""
    word = line.split()[-1]
    target = paths["OUT"].with_name(paths[word].name)
    shutil.copyfile(paths[word], target)
    before = target.read_bytes()
    sentence = refusal(line, {**paths, word: target}, capsys)
    assert str(target) in sentence and "name another file" in sentence
    assert target.read_bytes() == before and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("content", [b"notes of years\n", b"GGUF of somebody else"])
@pytest.mark.parametrize("line", OCCUPIED)
def test_an_output_that_would_replace_what_pyorch_did_not_make(
    line: str, content: bytes, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in line:
        pytest.importorskip("matplotlib")
    paths["PICTURES"].mkdir()
    paths["OUT"] = paths["OUT"].with_suffix(".png")  # which is all the same to whom it names no picture
    made = [paths["OUT"], paths["PICTURES"] / "advice.png"]
    for path in made:
        path.write_bytes(content)
    sentence = refusal(line, paths, capsys)
    assert str(made["PICTURES" in line]) in sentence and "--force" in sentence
    assert [path.read_bytes() for path in made] == [content, content]
    assert sorted(paths["OUT"].parent.iterdir()) == sorted([paths["OUT"], paths["PICTURES"]])


def test_every_command_that_writes_a_file_can_be_forced() -> None:
    writing = {line.split()[0] for line in (*OUTPUTS, *OCCUPIED)} - {"run", "serve"}  # these read --maps first
    assert writing | {"prepare"} == {
        words[0] for words, parser in with_nested(make_parser(COMMANDS)) if "--force" in parser.format_help()}


def test_a_sidecar_is_replaced_by_one_of_its_kind_and_model_alone(
    small_moe: Path, small_moe_q4: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    maps = ["maps", str(small_moe), str(trace), "-o", str(out)]
    out.write_text("notes of years")
    assert main([*maps, "--force"]) == 0
    first = out.read_bytes()
    assert main([*maps, "--capacity", "7"]) == 0
    second = out.read_bytes()
    assert first != second
    for command in (["buddies", small_moe, "--trace", trace], ["maps", small_moe_q4, trace], ["pack", small_moe]):
        words = [*map(str, command), "-o", str(out)]
        assert main(words) == 2
        assert "--force" in capsys.readouterr().err
    with out.open("r+b") as file:  # damaged, but still its own
        file.truncate(3000)
    assert main(maps) == 0


def test_a_trace_is_replaced_by_one_of_its_model_alone(
    small_moe: Path, small_moe_q4: Path, text: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.trace"
    shutil.copyfile(trace, out)
    words = ["profile", str(small_moe_q4), "--data", str(text), "--threads", "1", "-o", str(out)]
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err and out.read_bytes() == trace.read_bytes()
    assert main([*words, "--force"]) == main(words) == 0


def test_a_plan_is_replaced_by_one_of_its_model_alone(
    small_moe: Path, small_moe_q4: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, clusters = tmp_path / "placement.json", []
    for model in (small_moe, small_moe_q4):
        clusters.append(tmp_path / f"{model.name}.toml")
        clusters[-1].write_text(f'model = "{model}"\n[[server]]\nname = "here"\nmemory = "100%"\n', encoding="utf-8")
    words = [["place", "--cluster", str(cluster), "--trace", f"here={trace}", "-o", str(out)] for cluster in clusters]
    assert main(words[0]) == main(words[0]) == 0
    assert main(words[1]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words[1], "--force"]) == 2
    assert "recorded with another model" in capsys.readouterr().err
