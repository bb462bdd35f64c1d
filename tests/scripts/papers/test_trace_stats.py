"""scripts.papers.buddymoe.trace_stats: its numbers against counts one by one, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pyorch.errors import FormatError, PyorchError
from pyorch.traces.file import Trace, TraceHeader, TraceWriter
from pyorch.traces.routing_statistics import coactivation, token_activating_entropy
from scripts.papers.buddymoe.statistics import LruDistances, analyze, gini
from scripts.papers.buddymoe.trace_stats import main

HEADER = TraceHeader("f" * 64, "qwen2moe", (1, 2, 5), n_expert=16, n_expert_used=4, n_embd=8)


def random_records(header: TraceHeader, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    records = np.zeros(n, header.record_dtype())
    records["request"], records["position"] = np.arange(n) // 10, np.arange(n) % 10
    records["experts"] = rng.random((n, len(header.layers), header.n_expert)).argsort(-1)[..., : header.n_expert_used]
    records["probs"] = rng.random(records["probs"].shape, np.float32)
    return records


def write_trace(path: Path, records: np.ndarray) -> Trace:
    with TraceWriter(path, HEADER) as writer:
        writer.write(records)
    return Trace(path)


@pytest.fixture
def layer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """experts, probs, token weights of 300 tokens, 16 experts, 4 used, some far more than others."""
    rng = np.random.default_rng(1)
    scores = rng.gumbel(size=(300, 16)) + np.linspace(0, 3, 16)
    experts = np.argsort(-scores, -1)[:, :4].astype(np.uint16)
    return experts, rng.random((300, 4), np.float32), rng.random(300)


def test_gini_of_even_and_of_single_use() -> None:
    assert gini(np.full(8, 3)) == pytest.approx(0)
    assert gini([0, 0, 0, 5]) == pytest.approx(0.75)
    assert np.isnan(gini(np.zeros(4)))


def lru_hit_rate(experts: np.ndarray, size: int) -> float:
    """A list of what the cache holds, most recent first."""
    cache: list[int] = []
    hits = 0
    for chosen in experts.tolist():
        hits += sum(expert in cache for expert in chosen)
        for expert in chosen:
            cache = [expert, *(other for other in cache if other != expert)]
        cache = cache[:size]
    return hits / experts.size


def test_hit_rates_are_those_of_an_lru_cache_of_each_size(layer) -> None:
    experts, _, _ = layer
    distances = LruDistances(16)
    for start in range(0, 300, 77):
        distances.add(experts[start : start + 77])
    rates = distances.hit_rates()
    assert rates[0] == 0 and (np.diff(rates) >= 0).all() and rates[-1] == pytest.approx(1 - 16 / experts.size)
    for size in range(1, 17):
        assert rates[size] == pytest.approx(lru_hit_rate(experts, size)), size


def test_statistics_of_a_trace_equal_those_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = random_records(HEADER, 500)
    records["phase"] = records["position"] >= 7
    shuffled = records[np.random.default_rng(0).permutation(500)]  # as requests decoded together are
    monkeypatch.setattr("scripts.papers.buddymoe.statistics.CHUNK_BYTES", 50 * records.itemsize)
    statistics, arrays = analyze(write_trace(tmp_path / "a.trace", shuffled))
    assert (statistics.n_tokens, statistics.n_prefill, statistics.n_decode) == (500, 350, 150)
    assert statistics.n_requests == 50
    for i, layer in enumerate(statistics.layers):
        experts, probs = records["experts"][:, i], records["probs"][:, i]
        assert layer.il == HEADER.layers[i]
        assert layer.activations == tuple(np.bincount(experts.ravel(), minlength=16))
        assert layer.busiest == pytest.approx(max(layer.activations) / 125)
        assert layer.hit_rates[3] == pytest.approx(lru_hit_rate(experts, 8))
        tae = token_activating_entropy(probs)
        assert layer.tae_percentiles == pytest.approx(np.percentile(tae, statistics.percentiles), abs=1e-6)
        assert sum(layer.tae_histogram) == 500 and layer.entropy == pytest.approx(tae.mean())
        pairs = coactivation(experts, 16)
        assert np.array_equal(arrays[i].coactivation, pairs)
        assert layer.strongest_peer == pytest.approx((pairs.max(1) / pairs.sum(1)).mean())
    assert statistics.hit_rates[3] == pytest.approx(np.mean([layer.hit_rates[3] for layer in statistics.layers]))
    decoded, _ = analyze(Trace(tmp_path / "a.trace"), "decode")
    assert (decoded.n_tokens, decoded.n_prefill) == (150, 0)


def test_an_expert_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    records = random_records(HEADER, 10)
    records["experts"][3, 1, 2] = 16
    with pytest.raises(FormatError, match="is damaged: it names expert 16 of 16"):
        analyze(write_trace(tmp_path / "a.trace", records))


def test_a_trace_without_tokens_has_no_statistics(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.trace", random_records(HEADER, 10))
    with pytest.raises(PyorchError, match="holds no tokens of decode"):
        analyze(trace, "decode")


def test_command_prints_tables_and_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = random_records(HEADER, 60)
    records["phase"] = records["position"] >= 5
    path = str(write_trace(tmp_path / "a.trace", records).path)
    assert main([path]) == 0
    assert "3 layers of 16 experts, 4 used" in capsys.readouterr().out
    assert main([path, "--phase", "prefill", "--json"]) == 0
    statistics = json.loads(capsys.readouterr().out)
    assert statistics["n_tokens"] == 30 and len(statistics["layers"]) == 3
    assert sum(statistics["layers"][0]["activations"]) == 30 * 4
    assert statistics["hit_rates"] == sorted(statistics["hit_rates"])
