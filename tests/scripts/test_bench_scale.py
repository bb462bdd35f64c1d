"""A tiny shape through the real program. No test depends on how fast anything was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_scale

TINY = bench_scale.Shape(2, 32, 2, 1024, 1024)  # experts of 1.7 MiB
WORK = ("--shape", "tiny", "--tokens", "4", "--prompt-tokens", "2", "--threads", "1")


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_scale.SHAPES, "tiny", TINY)


def test_each_budget_is_measured_beside_a_twin_that_is_resident(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    arguments = (*WORK, "--budget", "20%,40%", "--kernels", "repacked,plain", "--directory", str(tmp_path))
    assert bench_scale.main([*arguments, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    twin, *cells = report["shapes"][0]["summaries"]
    assert twin["config"]["preload"] and twin["decode_hit_rate"] == 1
    assert [(cell["config"]["settings"]["budget"], cell["config"]["settings"]["kernels"]) for cell in cells] == [
        ("20%", "repacked"), ("20%", "plain"), ("40%", "repacked"), ("40%", "plain")]
    for cell in cells:
        assert cell["failure"] == ""
        assert cell["decode_bytes_per_token"] > 0 and cell["decode_processor_seconds_per_token"] > 0
        assert cell["budget_bytes"] < cell["memory_bytes"] <= cell["peak_memory_bytes"]
        assert cell["decode_roofline"] > 0
    assert not any(tmp_path.iterdir())


def test_a_budget_that_does_not_fit_is_skipped_with_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    limit = bench_scale.memory.MemoryLimit("a test", 0, 140 << 20)
    monkeypatch.setattr(bench_scale.memory, "memory_limit", lambda: limit)
    assert bench_scale.main([*WORK, "--budget", "20%,90%", "--directory", str(tmp_path)]) == 0
    out, progress = capfd.readouterr()
    assert "tiny, budget 90% is skipped: " in out and "of free memory" in progress
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("20% ", "90% "))] == ["20%"]


def test_experts_occupy_no_disk(tmp_path: Path):
    path = tmp_path / "sparse.gguf"
    bench_scale.write_sparse(path, TINY)
    status = path.stat()
    assert status.st_size > 100 << 20 and status.st_blocks * 512 < 8 << 20


def test_an_unknown_shape_is_refused(capfd: pytest.CaptureFixture[str]):
    assert bench_scale.main(["--shape", "3x3"]) == 2
    assert '--shape "3x3" is not known: use 94x128' in capfd.readouterr().err
