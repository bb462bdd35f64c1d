"""`pyorch prepare`: what it makes, keeps, skips, and says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pyorch.cli import main
from pyorch.cli.prepare import FAILED, MADE, SKIPPED, STEPS, THERE
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.beside import Sidecars
from pyorch.traces.data import read_documents

TEXT = Path(__file__).parents[1] / "fixtures" / "small-moe" / "text-test.txt"
FEW = ["--data", str(TEXT), "--tokens", "600", "--threads", "1"]


@pytest.fixture
def model(small_moe: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    os.link(small_moe, path)
    return path


@pytest.fixture
def model_q4(small_moe_q4: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    os.link(small_moe_q4, path)
    return path


def prepare(capsys: pytest.CaptureFixture[str], model: Path, *options: str, status: int = 0) -> dict[str, dict]:
    """What --json says, by step."""
    assert main(["prepare", str(model), *options, "--json"]) == status
    return {step["step"]: step for step in json.loads(capsys.readouterr().out)["steps"]}


def test_all_that_helps_is_made_and_found_by_every_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # With a codec that is named: whether one pays is measured, and a busy machine may say no.
    assert main(["pack", str(model), "--codec", "table"]) == 0
    capsys.readouterr()
    steps = prepare(capsys, model, *FEW, "--budget", "40%", "--with-lossy")
    assert {name for name, step in steps.items() if step["state"] == MADE} == {
        "calibrate", "profile", "maps", "plan", "buddies", "ghosts"}
    assert steps["pack"]["state"] == THERE
    assert steps["tune"]["state"] == SKIPPED and "--questions" in steps["tune"]["brings"]
    with ModelMap(model) as model_map:
        sidecars = Sidecars(model_map)
        assert sidecars.predictor.default_vectors is not None
        found = (sidecars.buddies, sidecars.ghosts, sidecars.plan, sidecars.inclusion())
        assert all(content is not None for content in found)
    assert not model.with_name("model.trace").exists(), "all steps have read it"
    written = {path: path.stat().st_mtime_ns for path in model.parent.iterdir()}
    again = prepare(capsys, model, *FEW, "--budget", "40%", "--with-lossy")
    assert {step["state"] for step in again.values()} == {THERE, SKIPPED}
    assert written == {path: path.stat().st_mtime_ns for path in model.parent.iterdir()}


def test_what_only_lossy_settings_use_is_made_when_it_is_asked_for(
    model_q4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = prepare(capsys, model_q4, *FEW, "--skip", "calibrate")
    assert {steps[name]["brings"] for name in ("buddies", "ghosts")} == {
        "only a lossy setting uses it: give --with-lossy"}
    assert {step["state"] for step in steps.values()} == {SKIPPED}
    steps = prepare(capsys, model_q4, *FEW, "--skip", "calibrate,ghosts", "--with-lossy")
    assert steps["buddies"]["state"] == steps["profile"]["state"] == MADE


def test_quantized_experts_are_not_packed_and_no_trace_is_recorded_for_nobody(
    model_q4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = prepare(capsys, model_q4, *FEW, "--skip", "calibrate,buddies,ghosts")
    assert {step["state"] for step in steps.values()} == {SKIPPED}
    assert "quantized" in steps["pack"]["brings"] and "calibrate" not in steps
    assert [path.name for path in model_q4.parent.iterdir()] == ["model.gguf"]


def test_only_makes_a_step_that_would_be_skipped_and_records_what_it_reads(
    model_q4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = prepare(capsys, model_q4, *FEW, "--only", "maps")
    assert [(name, step["state"]) for name, step in steps.items()] == [("profile", MADE), ("maps", MADE)]
    assert {path.name for path in model_q4.parent.iterdir()} == {"model.gguf", "model.maps.gguf"}


def test_a_trace_of_the_user_is_read_and_stays(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = model.with_name("model.trace")
    assert main(["profile", str(model), *FEW, "-o", str(trace)]) == 0
    capsys.readouterr()
    steps = prepare(capsys, model, "--only", "buddies")
    assert [(name, step["state"]) for name, step in steps.items()] == [("profile", THERE), ("buddies", MADE)]
    assert trace.exists()


def test_a_step_that_fails_leaves_the_others(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.with_name("model.predictor.gguf").mkdir()
    steps = prepare(capsys, model, *FEW, "--only", "calibrate,pack", status=1)
    assert steps["calibrate"]["state"] == FAILED and "model.predictor.gguf" in steps["calibrate"]["brings"]
    assert steps["pack"]["state"] == MADE


def test_a_damaged_file_is_made_anew(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buddies = model.with_name("model.buddies.gguf")
    assert prepare(capsys, model, *FEW, "--only", "buddies")["buddies"]["state"] == MADE
    with buddies.open("r+b") as file:
        file.truncate(3000)
    assert prepare(capsys, model, *FEW, "--only", "buddies")["buddies"]["state"] == MADE
    assert prepare(capsys, model, *FEW, "--only", "buddies")["buddies"]["state"] == THERE
    assert prepare(capsys, model, *FEW, "--only", "buddies", "--again")["buddies"]["state"] == MADE


def test_files_that_pyorch_did_not_make_stay_unless_it_is_forced(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = {model.with_name(f"model.{ending}"): ending.encode() for ending in ("buddies.gguf", "prepare.trace")}
    for path, content in notes.items():
        path.write_bytes(content)
    steps = prepare(capsys, model, *FEW, "--only", "buddies", status=1)
    assert steps["profile"]["state"] == FAILED and "--force" in steps["profile"]["brings"]
    assert {path: path.read_bytes() for path in notes} == notes
    trace = model.with_name("model.trace")
    trace.write_bytes(b"of somebody else")
    assert main(["prepare", str(model), *FEW, "--only", "buddies", "--keep-trace"]) == 2
    assert f"{trace} exists" in capsys.readouterr().err and trace.read_bytes() == b"of somebody else"
    assert prepare(capsys, model, *FEW, "--only", "buddies", "--force")["buddies"]["state"] == MADE
    assert trace.read_bytes() == b"of somebody else"


def test_a_model_that_is_converted_anew_is_prepared_in_one_call(
    small_moe: Path, small_moe_q4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies beside it is of the model that had its name before. Its pack may be the only one with its experts."""
    model = tmp_path / "model.gguf"
    os.link(small_moe, model)
    assert main(["pack", str(model), "--codec", "table"]) == 0
    capsys.readouterr()
    steps = prepare(capsys, model, *FEW, "--budget", "40%", "--with-lossy", "--keep-trace")
    made = {name for name, step in steps.items() if step["state"] == MADE}
    assert made == {"calibrate", "profile", "maps", "plan", "buddies", "ghosts"}
    former = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "model.prepare.trace").write_bytes(former["model.trace"])  # a run that was killed
    assert main(["convert", str(small_moe_q4), "-o", str(model), "--quantize", "F16", "--force"]) == 0
    assert main(["advise", str(model), "--compute-ms", "5:2", "--read-bandwidth", "1000000000"]) == 0
    assert "model.predictor.gguf belongs to another model" in " ".join(capsys.readouterr().out.split())
    assert main(["prepare", str(model), *FEW, "--only", "calibrate,pack"]) == 2
    assert "model.experts.gguf is the pack of another model" in capsys.readouterr().err
    assert main(["pack", str(model)]) == 2
    assert "model.experts.gguf is the pack of another model" in capsys.readouterr().err
    assert {name: (tmp_path / name).read_bytes() for name in former if name != "model.gguf"} == {
        name: content for name, content in former.items() if name != "model.gguf"}
    steps = prepare(capsys, model, *FEW, "--budget", "40%", "--with-lossy", "--keep-trace")
    assert {name for name, step in steps.items() if step["state"] == MADE} == {
        "calibrate", "profile", "buddies", "ghosts"}
    assert steps["pack"]["state"] == SKIPPED and "is the pack of another model" in steps["pack"]["brings"]
    kept = {name for name in former if (tmp_path / name).read_bytes() == former[name]}
    assert kept == {"model.experts.gguf", "model.maps.gguf", "model.plan.json"}
    (tmp_path / "model.trace").unlink()
    steps = prepare(capsys, model, *FEW, "--budget", "40%", "--only", "pack,maps,plan", "--force")
    assert {name for name, step in steps.items() if step["state"] == MADE} == {
        "profile", "pack", "maps", "plan"}


def test_damaged_files_of_later_steps_do_not_keep_the_model_from_being_run(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(model), "--codec", "table"]) == 0
    capsys.readouterr()
    assert prepare(capsys, model, *FEW, "--only", "maps")["maps"]["state"] == MADE
    with model.with_name("model.maps.gguf").open("r+b") as file:
        file.truncate(3000)
    steps = prepare(capsys, model, *FEW, "--skip", "ghosts,plan")
    assert steps["profile"]["state"] == steps["maps"]["state"] == MADE


def test_the_only_copy_of_the_experts_of_a_slim_model_stays_even_if_it_is_damaged(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slim = model.with_name("slim.gguf")
    assert main(["pack", str(model), "--codec", "table", "--slim", str(slim)]) == 0
    pack = model.with_name("slim.experts.gguf")
    with pack.open("r+b") as file:
        file.truncate(5000)
    capsys.readouterr()
    steps = prepare(capsys, slim, *FEW, status=1)
    assert steps["calibrate"]["state"] == FAILED and "slim" in steps["pack"]["brings"]
    assert pack.stat().st_size == 5000


def test_without_a_text_one_is_read_that_every_machine_has(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    steps = prepare(capsys, model, *FEW[2:], "--only", "buddies")
    assert steps["buddies"]["state"] == MADE and str(tmp_path / "cache") in steps["profile"]["command"]
    documents = list(read_documents([tmp_path / "cache" / "pyorch" / "default-text.jsonl"]))
    assert sum(len(document.text) for document in documents) > 300_000
    assert '"""' in documents[1].text and '"""' not in documents[0].text  # programs and prose, by turns
    monkeypatch.setenv("XDG_CACHE_HOME", str(TEXT))
    assert main(["prepare", str(model), "--again", "--only", "buddies"]) == 2
    assert "give one with --data" in capsys.readouterr().err


def test_no_trace_but_the_users_own_stays(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = model.with_name("model.trace")
    trace.write_bytes(b"of an interrupted run")
    assert prepare(capsys, model, *FEW, "--only", "buddies")["profile"]["state"] == MADE
    assert trace.read_bytes() == b"of an interrupted run" and not model.with_name("model.prepare.trace").exists()
    assert main(["profile", str(model), *FEW, "-o", str(trace), "--force"]) == 0
    content = trace.read_bytes()
    capsys.readouterr()
    assert prepare(capsys, model, "--only", "buddies", "--again")["buddies"]["state"] == MADE
    assert trace.read_bytes() == content


def test_a_kept_trace_has_the_name_that_other_commands_look_for(
    model_q4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(capsys, model_q4, *FEW, "--only", "maps", "--keep-trace")
    command = ["buddies", str(model_q4), "--trace", str(model_q4.with_name("model.trace"))]
    assert main([*command, "-o", str(model_q4.with_name("b.gguf"))]) == 0


def test_models_whose_names_look_like_options_are_prepared(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.link(model, model.with_name("-m.gguf"))
    monkeypatch.chdir(model.parent)
    assert main(["prepare", "./-m.gguf", *FEW, "--only", "buddies"]) == 0
    assert model.with_name("-m.buddies.gguf").exists()


@pytest.mark.parametrize("options, sentence", [
    (["--only", "pock"], '"pock" is not a step: use some of calibrate'),
    (["--minutes", "0"], "not a number above 0"),
    (["--only", ","], "names no step"),
    (["--only", "tune", "--skip", "tune"], "leave no step"),
    (["--only", "tune"], "give --questions"),
    (["--data", __file__.replace(".py", ".jsonl")], "cannot be read"),
    (["--data", os.devnull], "no text"),
])
def test_what_cannot_be_done_is_said_before_anything_is_made(
    model: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(model), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in model.parent.iterdir()] == ["model.gguf"]


def test_a_sidecar_in_the_place_of_its_model_is_called_that(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(model), *FEW, "--only", "calibrate"]) == 0
    assert main(["prepare", str(model.with_name("model.predictor.gguf")), *FEW]) == 2
    assert "is a sidecar" in capsys.readouterr().err


def test_each_step_is_a_command() -> None:
    from pyorch.cli import COMMANDS
    from pyorch.cli import STEPS as LISTED

    assert {step.name for step in STEPS} == set(LISTED) <= set(COMMANDS)
