"""What commands say of settings that are not what they seem, and numbers that they do not print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from processes import pyorch

from pyorch.cli import main
from pyorch.llama import memory
from pyorch.runtime import kept
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.sidecars.predictor import DefaultVectors, PredictorFile
from pyorch.traces.file import Trace, TraceWriter
from scripts import replay


@pytest.mark.parametrize(("budget", "said"), [("4GB", True), ("100%", False), ("auto", False), ("50%", False)])
def test_a_budget_above_the_model_says_what_is_taken(budget: str, said: bool, small_moe: Path) -> None:
    with ModelMap(small_moe) as model_map:
        sentence = Budget.parse(budget).surplus(model_map.info)
    assert bool(sentence) is said
    if said:
        assert sentence == (
            "budget 4GB is more than all experts of the model occupy: 12 MiB is taken, and they all stay in memory")


def test_it_is_said_by_whatever_loads_the_model(small_moe: Path) -> None:
    done = pyorch("verify", small_moe, "--budget", "4GB,3GB,50%", "--tokens", "1", "-p", "x")
    assert done.returncode == 0
    assert [line[:23] for line in done.stderr.splitlines()] == ["pyorch: note: budget 4G", "pyorch: note: budget 3G"]


def replayed(small_moe: Path, trace: Path, *more: str) -> list[str]:
    return [str(small_moe), str(trace), "--budget", "50%", "--read-bandwidth", "1GB/s", *more]


@pytest.fixture
def untimed(trace: Path, tmp_path: Path) -> Path:
    """The trace as an older version recorded it, without the time of computing."""
    path, recorded = tmp_path / "untimed.trace", Trace(trace)
    with TraceWriter(path, replace(recorded.header, compute_ms=None)) as writer:
        writer.write(recorded.records)
    return path


def test_a_replay_shows_no_times_where_nobody_knows_how_long_computing_takes(
    small_moe: Path, trace: Path, untimed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, trace = trace, untimed
    assert replay.main(replayed(small_moe, trace)) == 0
    shown = capsys.readouterr().out
    assert "hits" in shown and "ms/token" not in shown and "stall ms" not in shown
    assert "give --compute-ms, or have pyorch calibrate measure it" in shown
    assert replay.main(replayed(small_moe, trace, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compute_from"] == "assumed" and report["rows"][0]["tpot_ms"] is None
    assert report["rows"][0]["hit_rate"] > 0
    assert replay.main(replayed(small_moe, recorded, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compute_from"] == "trace" and report["compute_ms"] == Trace(recorded).header.compute_ms


def test_a_replay_takes_the_calibrated_time(
    small_moe: Path, untimed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = untimed
    sidecar = small_moe.with_name("small-moe.predictor.gguf")
    with ModelMap(small_moe) as model_map:
        vectors = {layer.il: np.ones((layer.n_expert, 128), np.float32) for layer in model_map.layers}
        counts = {il: np.ones(len(array), np.int64) for il, array in vectors.items()}
        PredictorFile(DefaultVectors(vectors, counts, 1), compute_ms=2.5).write(sidecar, model_map)
    try:
        assert replay.main(replayed(small_moe, trace)) == 0
        shown = capsys.readouterr().out
        assert "compute 2.5 ms a token (calibrated)" in shown and "ms/token" in shown
        assert replay.main(replayed(small_moe, trace, "--compute-ms", "4")) == 0
        assert "compute 4 ms a token (given)" in capsys.readouterr().out
    finally:
        sidecar.unlink()


def test_no_roofline_of_a_model_that_fits_into_the_cache(small_moe: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(memory, "cache_bytes", lambda: 1 << 40)
    command = ["bench", str(small_moe), "--budget", "50%", "--repeat", "1", "--tokens", "4", "--threads", "1"]
    assert main([*command, "--prompt-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("budget 50%"))
    assert "fits into the processor's cache" in shown and row.count("%") == 2  # of the budget and of the hits


def test_a_text_that_the_context_ends_is_told(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(small_moe), "-p", "def", "--ctx", "256", "--threads", "1", "--temp", "0", "-n"]
    assert main([*command, "5000"]) == 0
    assert "note: the context of 256 tokens is full" in capsys.readouterr().err
    assert main([*command, "8"]) == 0
    assert "is full" not in capsys.readouterr().err


def test_a_cache_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.directory() == tmp_path / "pyorch"
    monkeypatch.setattr(kept.os, "access", lambda path, mode: False)  # root may read everything
    assert kept.directory() is None


@pytest.mark.parametrize("command", ["profile", "calibrate"])
def test_a_text_that_time_cuts_short_is_told(
    command: str, small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Path(__file__).parents[1] / "fixtures" / "small-moe" / "text-test.txt"  # several pieces
    words = [command, str(small_moe), "--data", str(long), "--threads", "1", "-o", str(tmp_path / "made")]
    assert main([*words, "--minutes", "0.00001"]) == 0
    assert "note: 1e-05 minutes were over before all of the data was read" in capsys.readouterr().err
    assert main([*words, "--minutes", "0.00001", "--tokens", "8"]) == 0  # which the first piece has
    assert "were over" not in capsys.readouterr().err


@pytest.mark.parametrize(("options", "refused"), [
    ((), []), (("--router", "topk", "--inputs", "0"), ["pyorch maps", "pyorch ghosts"]),
])
def test_profile_says_at_the_start_which_commands_will_refuse(
    options: tuple[str, ...], refused: list[str], small_moe: Path, text: Path, tmp_path: Path, capsys
) -> None:
    trace = tmp_path / "text.trace"
    command = ["profile", str(small_moe), "--data", str(text), "--tokens", "40", "--threads", "1", "-o", str(trace)]
    assert main([*command, *options]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "will refuse" in line]
    assert [" ".join(line.removeprefix("pyorch: note: ").split()[:2]) for line in notes] == refused


def test_a_trace_by_default_is_enough_for_what_comes_next(small_moe: Path, text: Path, tmp_path: Path, capsys) -> None:
    trace = tmp_path / "text.trace"
    command = ["profile", str(small_moe), "--data", str(text), "--tokens", "60", "--threads", "1", "-o", str(trace)]
    assert main(command) == 0
    assert main([*command, "--append"]) == 0
    assert main(["maps", str(small_moe), str(trace), "-o", str(tmp_path / "m.maps.gguf")]) == 0
    assert main(["buddies", str(small_moe), "--trace", str(trace), "-o",
                 str(tmp_path / "m.buddies.gguf")]) == 0
    assert "120 in the trace" in capsys.readouterr().out
    assert main([*command, "--router", "topk"]) == 0
    assert main([*command, "--append"]) == 0, "as the trace began"
