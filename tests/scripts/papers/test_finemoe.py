"""scripts.papers.finemoe: its numbers against brute force, its files, and what it says where something is missing."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.routers import Router
from pyorch.traces.file import PREFILL, Trace
from pyorch.traces.recorder import profile
from pyorch.traces.recording import Recording
from scripts.papers.finemoe import replays, report, serving
from scripts.papers.finemoe.evaluate import main
from scripts.papers.finemoe.measure import Iteration, Overhead, measure_contexts, measure_overheads
from scripts.papers.finemoe.predictability import entropies, state_cosines
from scripts.papers.finemoe.replays import (
    FINEMOE,
    MIXTRAL_OFFLOADING,
    MOE_INFINITY,
    ON_DEMAND,
    ON_DEMAND_LFU,
    Conditions,
    Evaluation,
    Material,
    Played,
    Recall,
    TracePart,
    split,
)
from scripts.papers.finemoe.similarity import overlaps, pearson, similarities, trajectory_cosines

TEXT, FACTS = CHECKPOINT / "text-test.txt", CHECKPOINT / "facts-test.jsonl"
N_LAYERS, N_USED = 8, 6
TABLES = ("recall", "ranks", "cosines", "entropies", "similarity", "similarity-bins", "budgets", "distances",
          "capacities", "batches", "requests", "stream", "patterns", "stores", "goals")
FAST = ("--read-bandwidth", "20MB", "--compute-ms", "10", "--capacity", "60", "--distance", "1",
        "--min-precision", "0.3")
PICTURES = ("recall", "similarity", "budgets", "sweeps", "stream")
CONDITIONS = Conditions(read_bandwidth=20e6, compute_ms=10.0, distances=(1, 2), min_precisions=(0.0, 0.6), capacity=100)


@pytest.fixture(scope="module")
def trace(small_moe: Path) -> Trace:
    path = small_moe.with_name("eval-replays.trace")
    for data in (TEXT, FACTS):
        profile(small_moe, [data], path, n_tokens=160, router="full", states=True, append=True, n_ctx=64, n_threads=1,
                budget="100%")
    return Trace(path)


@pytest.fixture(scope="module")
def material(small_moe: Path, trace: Trace):
    with ModelMap(small_moe) as model_map:
        yield Material(model_map, *split(trace), CONDITIONS)


def quiet(*_: object) -> None:
    pass


def test_seven_of_ten_requests_are_the_past(trace: Trace):
    past, present = split(trace)
    assert not set(past.records["request"]) & set(present.records["request"])
    assert len(past) + len(present) == len(trace)
    n = len(np.unique(trace.records["request"]))
    assert abs(len(np.unique(present.records["request"])) / n - 0.3) < 0.1


def test_what_cannot_be_split_says_so(trace: Trace):
    one = TracePart(trace.path, trace.header, trace.records[:5])
    with pytest.raises(PyorchError, match="1 request: with three or more"):
        split(one)


@pytest.fixture(scope="module")
def recalls(material: Material) -> dict[str, Recall]:
    """By predictor."""
    return {replay.predictor: replay for replay in replays.recalls(material, material.store(100), quiet)}


def test_recall_of_the_previous_token_is_that_of_brute_force(material: Material, recalls: dict[str, Recall]):
    experts, request = material.recording.experts, material.recording.request
    decoded = np.flatnonzero(np.diff(request, prepend=request[0] + 1) == 0)
    for layer in range(1, N_LAYERS):
        # Only what is decoded is seen: the first token after a prompt has the last of the request before as its guess.
        right = sum(len(set(experts[i, layer]) & set(experts[j, layer])) for i, j in zip(decoded[1:], decoded))
        assert recalls["previous-token"].by_layer[layer] == pytest.approx(right / (len(decoded) * N_USED))
    for recall in recalls.values():
        assert recall.mean == pytest.approx(np.mean(recall.by_layer[1:]))
        for layer in range(1, N_LAYERS):
            assert np.mean(recall.by_rank[layer]) >= recall.by_layer[layer] - 1e-9
            assert 0 < recall.by_layer[layer] < 1


def test_recall_of_the_next_router_is_that_of_numpy(material: Material, recalls: dict[str, Recall]):
    recall = recalls["next-router"]
    recording = material.recording
    decoded = np.flatnonzero(np.diff(recording.request, prepend=recording.request[0] + 1) == 0)

    def tensor(name: str) -> np.ndarray:
        where = material.map.tensor_range(name)
        return np.fromfile(where.path, np.float32, where.size // 4, offset=where.offset)

    for layer in (1, 5):
        states = recording.states[decoded, layer - 1]
        norm = tensor(f"blk.{layer - 1}.ffn_norm.weight")
        inputs = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-6) * norm
        logits = inputs @ tensor(f"blk.{layer}.ffn_gate_inp.weight").reshape(64, -1).T
        guesses = np.argsort(-logits, axis=1)[:, :N_USED]
        used = recording.experts[decoded, layer].astype(int)
        right = np.mean([len(set(a) & set(b)) / N_USED for a, b in zip(guesses, used)])
        assert recall.by_layer[layer] == pytest.approx(right, abs=1e-2)  # weights of 8 bits
    assert math.isnan(recall.by_layer[0])


def random_iterations(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    maps = rng.dirichlet(np.ones(8), (n, 3)).astype(np.float32)
    return rng.normal(size=(n, 5)).astype(np.float32), maps, np.argsort(-maps, axis=2)[:, :, :2]


def test_similarities_are_those_of_brute_force():
    past, present = random_iterations(7, 1), random_iterations(5, 2)
    found = {similarity.kind: similarity for similarity in similarities(*past, *present, distance=1)}
    scores: dict[str, list[float]] = {kind: [] for kind in found}
    rates: dict[str, list[float]] = {kind: [] for kind in found}
    for i in range(5):
        for j in range(7):
            common = [len(set(present[2][i, layer]) & set(past[2][j, layer])) / 2 for layer in range(3)]
            a, b = present[1][i], past[1][j]

            def cosine(x: np.ndarray, y: np.ndarray) -> float:
                return float(x.ravel() @ y.ravel() / np.linalg.norm(x) / np.linalg.norm(y))

            scores["semantic"].append(cosine(present[0][i], past[0][j]))
            scores["trajectory"].append(cosine(a, b))
            for kind in ("semantic", "trajectory"):
                rates[kind].append(np.mean(common))
            for layer in (1, 2):
                scores["trajectory ahead"].append(cosine(a[:layer], b[:layer]))
                rates["trajectory ahead"].append(common[layer])
    for kind, entry in found.items():
        assert entry.n_pairs == len(scores[kind]) == sum(entry.counts)
        assert entry.pearson == pytest.approx(np.corrcoef(scores[kind], rates[kind])[0, 1], abs=1e-5)
        counts, means = np.array(entry.counts), np.nan_to_num(np.array(entry.hit_rates))
        assert counts @ means == pytest.approx(sum(rates[kind]), rel=1e-5)


def test_iterations_that_are_equal_are_wholly_alike():
    _, maps, experts = random_iterations(4, 3)
    assert np.diagonal(overlaps(experts, experts, 8), axis1=1, axis2=2).tolist() == [[1.0] * 4] * 3
    assert np.diagonal(trajectory_cosines(maps, maps), axis1=1, axis2=2) == pytest.approx(1)


def test_entropies_are_of_distributions_aggregated_over_a_request():
    sure, other, even = np.float32([1, 0, 0, 0]), np.float32([0, 1, 0, 0]), np.full(4, 0.25, np.float32)
    probs = np.stack([[sure, even], [other, even], [even, even]])
    one, two, whole = entropies(probs, np.array([3, 3, 8]), (1, 2))
    assert (one.n_iterations, one.n_requests) == (1, 2) and one.by_layer == pytest.approx((1, 2))
    assert (two.n_iterations, two.n_requests) == (2, 1) and two.by_layer == pytest.approx((1, 2))
    assert (whole.n_iterations, whole.n_requests) == (0, 2) and whole.by_layer == pytest.approx((1.5, 2))
    assert whole.mean == pytest.approx(1.75)


def test_default_vectors_that_tell_all_make_states_the_true_ones():
    rng = np.random.default_rng(0)
    n, n_embd, n_expert = 40, 16, 4
    norms = rng.uniform(0.5, 2, (2, n_embd)).astype(np.float32)
    routers = [Router(np.zeros((n_expert, n_embd), np.float32), None, None, norm, 1e-6, "softmax", 1) for norm in norms]
    defaults = rng.normal(size=(n_expert, n_embd)).astype(np.float32)
    experts = rng.integers(0, n_expert, (n, 2, 1))
    weights = rng.uniform(0.5, 1, (n, 2, 1)).astype(np.float32)
    first = rng.normal(size=(n, n_embd)).astype(np.float32)
    states = np.stack([first, first + weights[:, 0] * defaults[experts[:, 0, 0]]], axis=1)
    own, quasi = state_cosines(states, experts, weights, routers, {0: defaults})
    assert quasi.mean == pytest.approx(1, abs=1e-5) and math.isnan(quasi.by_layer[0])
    a, b = (states[:, i] / np.sqrt((states[:, i] ** 2).mean(-1, keepdims=True)) * norms[i] for i in (0, 1))
    cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert own.by_layer[1] == pytest.approx(cosines.mean(), abs=1e-5) and own.mean < 0.95
    assert [router.mean for router in state_cosines(states, experts, weights, routers, {})][1] < 0.95


def test_requests_of_a_stream_are_the_text_cut_anew():
    request = np.repeat([4, 2, 9], (700, 20, 300))
    experts = np.arange(len(request))[:, None, None] % 64
    text = Recording((0,), 64, experts, np.ones(experts.shape), request)
    cut = serving.pieces(text, np.random.default_rng(1))
    assert np.array_equal(cut.experts, text.experts)
    whole = np.flatnonzero(np.diff(text.request)) + 1
    begin = np.flatnonzero(np.diff(cut.request, prepend=cut.request[0] + 1))
    assert set(whole) < set(begin) and len(begin) > len(whole) + 1
    for at, end in zip(begin, [*begin[1:], len(cut)]):
        n_prompt = int((cut.phase[at:end] == PREFILL).sum())
        assert n_prompt == max(1, round(0.2 * (end - at))) and (cut.phase[at : at + n_prompt] == PREFILL).all()
        assert end - at <= serving.LENGTHS[1] + serving.LENGTHS[0]


def test_the_time_to_the_first_token_is_that_of_the_prompt(material: Material):
    recording = serving.prompted(material.recording, 20)
    n_ubatches = len(recording.schedule(1, as_decode=False).decode)
    ends = np.cumsum(np.arange(1, n_ubatches + 1)).astype(float)  # each ubatch takes a second longer than that before
    prompts, whole = serving.request_seconds(recording, ends)
    lengths = np.bincount(recording.request)
    assert lengths.min() > 20  # a ubatch of its prompt, then one of each token
    first = np.cumsum(lengths - 20 + 1) - (lengths - 20)
    assert prompts.tolist() == first.tolist() and whole.sum() == ends[-1]


def test_a_request_waits_for_those_before_it():
    come, took = np.array([1.0, 2.0, 10.0]), np.array([5.0, 1.0, 1.0])
    assert serving.latencies(come, took).tolist() == [5.0, 5.0, 1.0]


def test_maps_name_more_the_more_they_are_searched_by(material: Material):
    found = {
        (pattern.approach, pattern.distance): pattern
        for pattern in serving.patterns(material, material.store(100), quiet)
    }
    for distance in (1, 3):
        alone, both, all = (found[f"map ({approach})", distance] for approach in ("T", "T+S", "T+S+delta"))
        assert alone.covered < both.covered <= all.covered < 1  # the first layers have no trajectory
        assert alone.n_named == pytest.approx(N_USED * (N_LAYERS - distance) / N_LAYERS, rel=0.01)
        assert both.n_named == pytest.approx(N_USED, rel=0.01) and all.n_named >= both.n_named
    assert found["speculate", 1].covered > found["speculate", 3].covered > found["hit count", 3].covered


def test_what_does_not_vary_has_no_correlation():
    assert math.isnan(pearson(np.ones(5), np.arange(5)))
    assert pearson(np.arange(5), -np.arange(5)) == pytest.approx(-1)


def played(pair, budget: str, hit_rate: float, tpot_ms: float) -> Played:
    return Played(pair.predictor, pair.policy, pair.known_as, budget, 2, 0.6, 1, 100, hit_rate, tpot_ms, tpot_ms / 2,
                  1.0, 1.0, 0.0, 0.1)


def evaluation(finemoe_hits: float, finemoe_ms: float) -> Evaluation:
    def recall(predictor: str, mean: float) -> Recall:
        return Recall(predictor, 1, (0, 1), (math.nan, mean), ((math.nan,), (mean,)), mean)

    others = [played(pair, "40%", 0.5, 100.0)
              for pair in (ON_DEMAND, ON_DEMAND_LFU, MIXTRAL_OFFLOADING, MOE_INFINITY)]
    return Evaluation(
        1, 1, Conditions(budgets=("40%",)), (), [recall("next-router", 0.6), recall("quasi-hidden", 0.7)], [],
        [*others, played(FINEMOE, "40%", finemoe_hits, finemoe_ms)], [], [], [],
    )


def reached(evaluation: Evaluation) -> dict[str, report.Goal]:
    return {goal.what: goal for goal in report.goals(evaluation)}


def test_what_reading_ahead_can_gain_is_the_lesser_of_computing_and_reading():
    """Eq. 1 of Speculating Experts: T_on_demand = compute + copy, T_prefetch = max(compute, copy) at best."""
    rng = np.random.default_rng(1)
    for compute, copy in rng.uniform(1, 100, (50, 2)):
        base = replace(played(ON_DEMAND, "40%", 0.5, compute + copy), stall_ms=copy)
        hidden = rng.uniform(0, min(compute, copy))
        row = replace(played(FINEMOE, "40%", 0.6, compute + copy - hidden))
        best = replace(row, tpot_ms=max(compute, copy))
        found = replace(evaluation(0.6, 80.0), budgets=[base, row])
        assert report.gain_reached(found, best) == pytest.approx(1)
        assert report.gain_reached(found, row) == pytest.approx(hidden / (compute + copy - max(compute, copy)))


def test_goals_tell_what_is_met_and_what_was_not_measured():
    good, bad = reached(evaluation(0.6, 80.0)), reached(evaluation(0.4, 102.0))
    hits = "hit rate of expert-map + finemoe / next-router + lru, 40%"
    assert good[hits].met and good[hits].reached == pytest.approx(1.2)
    assert not bad[hits].met
    best = next(goal for what, goal in good.items() if what.endswith("best budget"))
    assert best.met and best.reached == pytest.approx(0.2)
    assert not good["recall of hybrid"].measured
    measured = replace(evaluation(0.6, 80.0), contexts=[
        Iteration(256, name, tpot, 50, 50, 50, 0, 0.5, 1.0, 50, 0.0)
        for name, tpot in (("none", 100.0), ("auto", 102.0))
    ], overheads=[Overhead("expert-map", 10.1, 10.0)])
    slower = reached(measured)["measured: TPOT of auto above on demand, worst context"]
    assert slower.reached == pytest.approx(0.02) and not slower.met
    assert reached(measured)["measured: decode time that expert-map costs"].met


def test_command_writes_every_table_and_picture(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "evaluation"
    arguments = [str(small_moe), "--data", str(TEXT), str(FACTS), "--tokens", "400",
                 "--budget", "40%", *FAST, "-o", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name in TABLES:
        rows = list(csv.reader((out / f"{name}.csv").open()))
        assert len(rows) > 1 and len({len(row) for row in rows}) == 1, name
    for name in PICTURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert {path.name for path in out.iterdir()} == {f"{table}.csv" for table in TABLES} | {
        f"{picture}.png" for picture in PICTURES
    }
    assert "note: hybrid is left out" in printed and "note: quasi-hidden predicts without default vectors" in printed
    assert "expert-map" in printed and "belady" in printed
    budgets = list(csv.DictReader((out / "budgets.csv").open()))
    hit_rate = {(row["predictor"], row["policy"]): float(row["hit rate"]) for row in budgets}
    assert hit_rate["none", "belady"] > hit_rate["none", "lru"]
    requests = list(csv.DictReader((out / "requests.csv").open()))
    on_demand = {row["machine"]: float(row["TPOT ms"]) for row in requests
                 if (row["predictor"], row["policy"], row["prompt"]) == ("none", "lru", "40")}
    assert on_demand["does both"] < on_demand["reads 4 times as fast"] < on_demand["as given"]
    first = [float(row["TTFT ms"]) for row in requests if row["machine"] == "as given" and row["predictor"] == "none"]
    assert first[0] < first[1]  # prompts of 4 and of 40 tokens
    sizes = {int(row["capacity"]): float(row["MiB"]) for row in csv.DictReader((out / "stores.csv").open())}
    assert sizes[1000] == pytest.approx(1000 * 4 * (N_LAYERS * 64 + 128) / 2**20, rel=1e-3)


def test_command_prints_one_json_object_of_traces(small_moe: Path, trace: Trace, capsys: pytest.CaptureFixture):
    assert main([str(small_moe), "--trace", str(trace.path), "--history-trace", str(trace.path),
                 "--budget", "40%", *FAST, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["n_past"] == value["n_present"] == len(trace)
    assert {recall["predictor"] for recall in value["recalls"]} >= {"next-router", "expert-map"}
    assert value["goals"] and isinstance(value["budgets"][0]["tpot_ms"], float)


def test_measuring_decodes_on_demand_and_ahead(small_moe: Path, tmp_path: Path, trace: Trace):
    model = shutil.copy(small_moe, tmp_path)
    rows = measure_contexts(model, [TEXT], "40%", [32, 100_000], 8, 1, quiet, n_threads=1)
    assert [(row.n_context, row.prefetch) for row in rows] == [(32, "none"), (32, "auto")]
    for row in rows:
        assert row.tpot_ms == pytest.approx(row.compute_ms + row.stall_ms) and 0 < row.hit_rate < 1
        assert row.bound_ms <= rows[0].tpot_ms
    overheads = measure_overheads(model, [TEXT], ["quasi-hidden"], 1, quiet, 1)
    assert overheads[0].predictor == "quasi-hidden" and overheads[0].tpot_ms > 0


@pytest.mark.parametrize("arguments, sentence", [
    ([], "give --data or --trace"),
    (["--data", str(TEXT), "--trace", "x.trace"], "give --data or --trace"),
    (["--data", str(TEXT), "--history", str(TEXT), "--history-trace", "x"], "not both"),
    (["--data", str(TEXT), "--tokens", "0"], '--tokens: "0" is not a whole number'),
    (["--data", str(TEXT), "--context", "many"], "not a list of numbers"),
    (["--data", str(TEXT), "--budget", "100KB", "--compute-ms", "1"], "below the floor"),
    (["--data", str(TEXT), "--min-precision", "2", "--compute-ms", "1"], "from 0 to 1"),
    (["--data", str(TEXT), "--read-bandwidth", "fast", "--compute-ms", "1"], "fast"),
    (["--data", str(TEXT), "--distance", "1,9"], "more than the 8 layers"),
    (["--trace", "x.trace"], "give --compute-ms"),
    (["--trace", "missing.trace", "--compute-ms", "1"], "missing.trace cannot be read"),
])
def test_mistakes_are_sentences(small_moe: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture):
    assert main([str(small_moe), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_trace_without_states_is_refused(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "plain.trace"
    profile(small_moe, [TEXT], path, n_tokens=64, n_ctx=16, n_threads=1, budget="100%")
    assert main([str(small_moe), "--trace", str(path), *FAST]) == 2
    assert "--router full --states" in capsys.readouterr().err
