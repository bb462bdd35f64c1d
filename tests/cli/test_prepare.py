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
    steps = prepare(capsys, model, *FEW, "--budget", "40%")
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
    again = prepare(capsys, model, *FEW, "--budget", "40%")
    assert {step["state"] for step in again.values()} == {THERE, SKIPPED}
    assert written == {path: path.stat().st_mtime_ns for path in model.parent.iterdir()}


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
    buddies.write_bytes(b"GGUF")
    assert prepare(capsys, model, *FEW, "--only", "buddies")["buddies"]["state"] == MADE
    assert prepare(capsys, model, *FEW, "--only", "buddies")["buddies"]["state"] == THERE
    assert prepare(capsys, model, *FEW, "--only", "buddies", "--again")["buddies"]["state"] == MADE


@pytest.mark.parametrize("options, sentence", [
    ([], "calibrate needs text"),
    (["--only", "pock"], '"pock" is not a step: use some of calibrate'),
    (["--skip", "tune,"], ""),
    (["--minutes", "0"], "not a number above 0"),
])
def test_what_cannot_be_done_is_said_before_anything_is_made(
    model: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(model), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in model.parent.iterdir()] == ["model.gguf"]


def test_each_step_is_a_command() -> None:
    from pyorch.cli import COMMANDS
    from pyorch.cli import STEPS as LISTED

    assert {step.name for step in STEPS} == set(LISTED) <= set(COMMANDS)
