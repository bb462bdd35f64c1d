"""scripts.papers.buddymoe: what it says of a cache that fills, of experts that compute alike, and of a trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT

from pyorch.cli import main as pyorch
from pyorch.convert import output_similarity as outputs
from pyorch.convert.expert_outputs import LayerExperts
from pyorch.runtime.model_map import ModelMap
from scripts.papers.buddymoe import over_time, similarity, trace_stats

TEXT = CHECKPOINT / "text-test.txt"


@pytest.fixture(scope="module")
def trace(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    assert pyorch(["profile", str(small_moe), "--data", str(TEXT), "--tokens", "300", "--inputs", "64", "--threads",
                   "1", "-o", str(path)]) == 0
    return path


def windows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert over_time.main([*map(str, arguments), "--data", str(TEXT), "--lossy", "mode=none,miss=drop", "--threads",
                           "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_less_is_lost_as_the_cache_fills(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "alone.gguf"  # no lists lie beside it, so the cache begins empty
    os.link(small_moe, alone)
    found = windows(capsys, alone, "--cache-rate", 0.75, "--window", 32, "--tokens", 320)
    assert [each["first_token"] for each in found] == list(range(0, 320, 32))
    assert found[0]["resident_experts"] <= found[-1]["resident_experts"] <= 384
    assert found[0]["changed_per_token"] > found[-1]["changed_per_token"]
    assert all(each["kl_divergence"] > 0 for each in found)


def test_a_cache_that_fills_gives_the_same_twice(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (small_moe, "--cache-rate", 0.3, "--window", 16, "--tokens", 48, "--read-time", 3)
    found = windows(capsys, *arguments)
    assert windows(capsys, *arguments) == found
    assert found[0]["resident_experts"] <= 0.3 * 8 * 64


def test_it_is_told_whether_selected_together_means_alike(
    small_moe: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(small_moe), "--trace", str(trace)]
    assert similarity.main([*arguments, "--plot", str(tmp_path / "alike.png")]) == 0
    assert (tmp_path / "alike.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "most co-activated" in printed and printed.splitlines()[-1].split()[0] == "mean"
    assert similarity.main([*arguments, "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)
    assert len(layers) == 8 and all(layer["best_cosine"] >= layer["coactivated_cosine"] for layer in layers)


def test_rank_correlation_is_that_of_ranks() -> None:
    assert similarity.ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]
    random = np.random.default_rng(1)
    a, b = random.random((2, 50))
    assert similarity.correlation(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert similarity.correlation(similarity.ranks(a), similarity.ranks(a**3)) == pytest.approx(1)
    assert similarity.correlation(a, np.ones(50)) == 0


def test_pictures_of_a_trace_are_drawn(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_stats.main([str(trace), "--plot", str(tmp_path / "plots")]) == 0
    printed = capsys.readouterr().out
    for name in ("activations", "coactivation", "tae", "hit-rate"):
        picture = tmp_path / "plots" / f"{name}.png"
        assert str(picture) in printed and picture.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_sentences(small_moe: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program, arguments, sentence in (
        (over_time, [str(small_moe), "--data", str(TEXT), "--cache-rate", "0.5", "--lossy", "rho=x"], "whole number"),
        (trace_stats, ["absent.trace"], "absent.trace cannot be read"),
        (similarity, [str(small_moe)], "--trace"),
    ):
        assert program.main(arguments) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1


def test_similarity_is_that_of_a_plain_loop(small_moe: Path, monkeypatch) -> None:
    monkeypatch.setattr(outputs, "SLICE_BYTES", 64 * 30 * 4 * 50)  # 128 outputs in slices of 50
    random = np.random.default_rng(5)
    inputs = random.normal(size=(30, 128)).astype(np.float32)
    selected = random.random((30, 64)) < np.linspace(0, 1, 64)
    with ModelMap(small_moe) as model_map:
        experts = LayerExperts(model_map, 2)
        found = outputs.compare(experts, inputs, selected)
        computed = np.stack([experts.outputs(e, inputs) for e in range(64)]).astype(np.float64)
    assert found.samples.tolist() == selected.sum(axis=0).tolist() and found.samples[0] == 0
    for i in (0, 5, 20, 63):  # from one that has no samples of its own to one that has all
        rows = selected[:, i] if selected[:, i].sum() >= 8 else np.ones(30, bool)
        for j in range(64):
            a, b = computed[i, rows], computed[j, rows]
            norm_a, norm_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
            assert found.cosine[i, j] == pytest.approx(((a * b).sum(1) / (norm_a * norm_b)).mean(), abs=1e-4)
            assert found.relative_error[i, j] == pytest.approx(
                (np.linalg.norm(a - b, axis=1) / norm_a).mean(), rel=1e-3, abs=1e-3)


def test_samples_that_do_not_fit_are_thinned_out(small_moe: Path, monkeypatch) -> None:
    monkeypatch.setattr(outputs, "WORK_BYTES", 4 * 64 * 64 * 10)
    inputs = np.random.default_rng(0).normal(size=(100, 128)).astype(np.float16)
    with ModelMap(small_moe) as model_map:
        found = outputs.compare(LayerExperts(model_map, 0), inputs, np.ones((100, 64), bool))
    assert (found.samples == 10).all() and np.diagonal(found.cosine) == pytest.approx(1, abs=1e-5)
