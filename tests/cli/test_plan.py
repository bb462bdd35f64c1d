"""`pyorch plan`: a plan beside a model with a compressed pack, and models that are loaded with it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, small_model
from packs_of_choice import WHOLE, all_but_the_first, pack_with

from pyorch.cli import main
from pyorch.convert import pack as packing
from pyorch.errors import BudgetError, FormatError
from pyorch.llama import pools
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.planning.planner import HANDICAP, STEP
from pyorch.planning.ranks import fading_uses, inclusion_by_rank, use_counts
from pyorch.runtime import disk
from pyorch.runtime.decompression import measure_recovery
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.sidecars import container, packs
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.memory_plan import Machine, Reserve, default_path, new_planner, read_plan
from pyorch.sidecars.predictor import PredictorFile
from pyorch.traces.divisions import choose
from pyorch.traces.file import Trace, TraceHeader, TraceWriter
from pyorch.traces.recording import decoded_recording
from pyorch.traces.replay import ReplaySettings, replay

SPEEDS = ("--read-bandwidth", "100MB/s", "--decode-bandwidth", "1GB/s", "--workers", "1")


@pytest.fixture(scope="module")
def packed(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Path(shutil.copy(small_moe, tmp_path_factory.mktemp("plan") / "model.gguf"))
    packing.pack(model, codec="table")
    return model


@pytest.fixture
def model(packed: Path, tmp_path: Path) -> Path:
    """A model of its own name, so that a plan beside it is nobody else's."""
    for path in (packed, container.default_path(packed, "experts")):
        (tmp_path / path.name).symlink_to(path)
    return tmp_path / packed.name


@pytest.fixture(scope="module")
def trace(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some experts are needed far more often than others."""
    path = tmp_path_factory.mktemp("trace") / "some.trace"
    rng = np.random.default_rng(1)
    with ModelMap(packed) as model_map:
        layers = model_map.decoded_layers
        header = TraceHeader(container.fingerprint(model_map), model_map.info.arch, tuple(layer.il for layer in layers),
                             layers[0].n_expert, model_map.info.n_expert_used, n_embd=0)
    records = np.zeros(400, header.record_dtype())
    records["position"], records["phase"] = np.arange(400), 1
    scores = 2 * rng.normal(size=(len(layers), header.n_expert)) + rng.gumbel(size=(400, len(layers), header.n_expert))
    records["experts"] = np.argsort(-scores, axis=2)[:, :, : header.n_expert_used]
    with TraceWriter(path, header) as writer:
        writer.write(records)
    return path


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=16, n_threads=1) as ctx:
        return np.concatenate([ctx.decode(tokens), *(ctx.decode([token]) for token in tokens[:12])])


def planned(capsys: pytest.CaptureFixture[str], *args: object) -> dict:
    assert main(["plan", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def play(model: Path, trace: Path, row: dict, batch: int = 1) -> dict:
    """A row of a plan with what comes of its division on the second half of a trace: hits of a layer, and the wait."""
    with ModelMap(model) as model_map:
        if row["compressed"]:
            packs.attach(model_map)
        known, rest = (recording := decoded_recording(Trace(trace), model_map)).divided(len(recording) // 2, batch)
        settings = ReplaySettings(
            prefetch=Prefetch("none"), budget=int(0.3 * model_map.info.slots_bytes), read_bandwidth=1e8, compute_ms=0.0,
            route_share=0.0, batch=batch, pools=Pools(*row["shares"]) if row["compressed"] else Pools(),
            decode_bandwidth=1e9, n_decoders=1)
        found = replay(model_map, rest, settings, uses=fading_uses(use_counts(known.experts, 64), len(known)))
    return row | {"played_hits": (found.stats.hits + found.stats.misses) / found.stats.layer_passes,
                  "played_wait_ms": found.stall_ms}


def test_a_plan_is_the_best_of_what_it_is_compared_with(
    model: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = planned(capsys, model, "--trace", trace, "--budget", "30%", *SPEEDS)
    rows = {row["name"]: play(model, trace, row) for row in report["rows"]}
    assert rows.keys() == {"plan", "full only", "best divided", "compressed only", "without a pack"}
    best, divided = rows["plan"], rows["best divided"]
    assert divided["shares"] != [1, 0, 0, 0] and best["shares"] == [1, 0, 0, 0] and best["compressed"]
    whole = (rows["full only"], rows["without a pack"])
    assert best["played_wait_ms"] <= 1.1 * min(row["played_wait_ms"] for row in whole)
    assert best["played_wait_ms"] <= 1.1 * HANDICAP * min(row["played_wait_ms"] for row in rows.values())
    assert sum(best["shares"]) == pytest.approx(1)
    assert sum(best["hits"]) == pytest.approx(6) and best["played_hits"] == pytest.approx(6)
    assert report["n_played"] > 4 and report["n_played_tokens"] == 100
    assert best["played_wait_ms"] == pytest.approx(best["wait_ms"], rel=0.25)
    with ModelMap(model) as model_map:
        plan = read_plan(default_path(model), model_map)
    assert plan.shares == tuple(best["shares"]) and plan.budget == report["budget"] and plan.n_tokens == 400
    assert plan.codecs == ("table",) and np.array(plan.uses).sum(axis=1).tolist() == [400 * 6] * 8


def test_a_plan_for_several_sequences_expects_what_their_tokens_need_together(
    model: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt_tokens: list[int]
) -> None:
    args = (model, "--trace", trace, "--budget", "30%", *SPEEDS)
    assert main(["plan", *map(str, args), "--batch", "3"]) == 2
    assert "some.trace has 1 request: for 3 sequences at once record as many" in capsys.readouterr().err
    several = tmp_path / "several.trace"
    records = Trace(trace).records.copy()
    records["request"], records["position"] = np.arange(400) // 67, np.arange(400) % 67
    with TraceWriter(several, Trace(trace).header) as writer:
        writer.write(records)
    args = (model, "--trace", several, "--budget", "30%", *SPEEDS)
    alone = planned(capsys, *args)["rows"][0]
    report = planned(capsys, *args, "--batch", "3")
    best = play(model, several, report["rows"][0], batch=3)
    assert report["batch"] == 3 and report["routing"].endswith("; 3 sequences at once")
    assert 6 < sum(best["hits"]) < 18 and sum(best["hits"]) == pytest.approx(best["played_hits"], rel=0.1)
    assert best["played_wait_ms"] == pytest.approx(best["wait_ms"], rel=0.3)
    assert alone["wait_ms"] < best["wait_ms"] < 3 * alone["wait_ms"]
    with small_model(model, "30%") as loaded:
        assert loaded.stats().pools_from == "model.plan.json"
        logits(loaded, prompt_tokens[:20])
    args = ("bench", model, "--budget", "30%", "--repeat", "1", "--tokens", "8", "--prompt-tokens", "16",
            "--threads", "1")
    assert main(list(map(str, args))) == 0
    assert "planned" not in capsys.readouterr().out, "it is no plan for one sequence"


class _Finalists:
    """What choose() needs to play divisions of 30 % of a model's experts. As a `with` block."""

    def __init__(self, model: Path, trace: Path) -> None:
        self.packed, self.plain, self.machine = ModelMap(model), ModelMap(model), Machine(1e8, 1e9, 1)
        packs.attach(self.packed)
        self.recording = decoded_recording(Trace(trace), self.packed)
        self.budget = int(0.3 * self.packed.info.slots_bytes)
        self.reserved = Reserve.of(self.packed).bytes(self.budget)
        ranks = inclusion_by_rank(self.recording.experts, self.recording.n_expert)
        self.planner = new_planner(self.packed, ranks, self.machine)

    def __enter__(self) -> _Finalists:
        return self

    def __exit__(self, *_: object) -> None:
        self.packed.close()
        self.plain.close()

    def choose(self, splits: list, handicap: float, **given: float):
        return choose(splits, self.packed, self.plain, self.recording, self.budget, self.machine, handicap, **given)


def test_other_forms_are_taken_where_they_gain_more_than_a_handicap(model: Path, trace: Path) -> None:
    with _Finalists(model, trace) as of:
        whole = of.planner.cost((1, 0, 0, 0), of.budget - of.reserved)
        splits = [whole, *of.planner.plan(of.budget, "FCSE", STEP, of.reserved, n_finalists=3).finalists]
        free, held = (of.choose(splits, handicap) for handicap in (1.0, HANDICAP))
    assert free.best.is_mixed and free.best is free.divided is held.divided and held.best is whole


def test_the_division_that_is_taken_depends_on_how_long_computing_takes(model: Path, trace: Path) -> None:
    """Computing hides reads: of these small experts it hides those of the model sooner than those of the pack."""
    with _Finalists(model, trace) as of:
        splits = [of.planner.cost((0, 1, 0, 0), of.budget - of.reserved), of.planner.plain(of.budget)]
        at_once, computed = (of.choose(splits, 1.0, compute_ms=ms).best for ms in (0.0, 5.0))
    assert at_once is splits[0] and computed is splits[1]


def test_a_plan_takes_the_time_of_computing_from_the_trace_or_what_knows_it(
    model: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = tmp_path / "timed.trace"
    with TraceWriter(timed, replace(Trace(trace).header, compute_ms=5.0)) as writer:
        writer.write(Trace(trace).records)

    def computing(recorded: Path, *more: object) -> tuple[float | None, str]:
        report = planned(capsys, model, "--trace", recorded, "--budget", "30%", *SPEEDS, *more)
        assert report["rows"][0]["compressed"] == (not report["compute_ms"])
        return report["compute_ms"], report["compute_from"]

    assert computing(trace) == (None, "unknown")
    assert computing(timed) == (5.0, "trace")
    assert computing(timed, "--compute-ms", 0) == (0.0, "given")
    with ModelMap(model) as model_map:
        path = container.default_path(model, "predictor")
        PredictorFile(curve=np.zeros((1, 2), np.float32), compute_ms=6.0).write(path, model_map)
    assert computing(trace) == (6.0, "calibrated") and computing(timed) == (5.0, "trace")
    for recorded, shown in ((timed, f"5 ms a token (recorded in {timed})"), (trace, "6 ms a token (measured by")):
        assert main(["plan", str(model), "--trace", str(recorded), "--budget", "30%", *SPEEDS]) == 0
        assert shown in " ".join(capsys.readouterr().out.split())
    report = planned(capsys, model, "--budget", "30%", *SPEEDS)
    assert report["n_played"] == 0 and report["compute_ms"] is report["compute_from"] is None


def test_a_model_is_loaded_with_its_plan_and_computes_the_same(
    model: Path, trace: Path, capsys: pytest.CaptureFixture[str], resident: Model, prompt_tokens: list[int]
) -> None:
    expected = logits(resident, prompt_tokens)
    planned(capsys, model, "--trace", trace, "--budget", "30%", *SPEEDS)
    change(model, shares=[0.4, 0.5, 0.1, 0.0], compressed=True)
    with small_model(model, "30%") as loaded:
        assert loaded.map.pack is not None
        assert_same_bits(logits(loaded, prompt_tokens), expected)
        stats = loaded.engine.stats()
        assert stats.decoded_bytes > 0 and stats.stored_bytes > 0
        assert loaded.stats().pools_from == "model.plan.json" and loaded.stats().pools.full < 1
    assert main(["inspect", str(model)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"experts.gguf \(table, 0\.\d+ of the experts' bytes\)", shown) and "model.plan.json" in shown


def test_an_expert_has_its_pool_from_the_first_token_on_where_uses_are_known(
    model: Path, trace: Path, capsys: pytest.CaptureFixture[str], prompt_tokens: list[int]
) -> None:
    planned(capsys, model, "--trace", trace, "--budget", "30%", *SPEEDS)

    def stored_bytes() -> int:
        with small_model(model, "30%", pools="0.4,0.6,0,0") as loaded:
            with Context(loaded.llama.model, n_ctx=64, n_threads=1) as ctx:
                ctx.decode(prompt_tokens[:1])
            loaded.engine.wait_idle()  # what is being read ahead is stored until it is decoded
            return loaded.engine.stats().stored_bytes

    assert stored_bytes() > 0
    change(model, uses=[])
    assert stored_bytes() == 0


def change(model: Path, **fields: object) -> None:
    """Of the plan beside a model."""
    path = default_path(model)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_plan_divides_its_budget_as_it_says_and_others_are_planned_by_it(
    model: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was played best need not be best by expectation."""
    planned(capsys, model, "--trace", trace, "--budget", "30%", *SPEEDS)
    change(model, shares=[0.1, 0.2, 0.3, 0.4], compressed=True)

    def divided(budget: str) -> tuple[tuple[float, ...] | None, str]:
        with small_model(model, budget) as loaded:
            stats = loaded.stats()
            return stats.pools and stats.pools.shares, stats.pools_from

    assert divided("30%") == ((0.1, 0.2, 0.3, 0.4), "model.plan.json")
    shares, origin = divided("31%")
    assert shares == (1.0, 0.0, 0.0, 0.0) and origin == "model.plan.json", "other forms gain too little to be trusted"
    change(model, codecs=["zstd"])
    shares, origin = divided("30%")
    assert shares != (0.1, 0.2, 0.3, 0.4)
    assert shares is None or origin == "model.plan.json, planned anew: it was made for another codec"


def test_bench_prints_what_a_token_was_planned_to_wait_beside_what_it_waited(
    model: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_ms = planned(capsys, model, "--trace", trace, "--budget", "30%", *SPEEDS)["rows"][0]["wait_ms"]
    assert main(["bench", str(model), "--budget", "30%", "--repeat", "1", "--tokens", "8", "--prompt-tokens", "16",
                 "--threads", "1"]) == 0
    line, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("budget 30%"))
    assert re.search(rf"\d \({wait_ms:.1f} planned\)", line)


def test_quantized_experts_that_are_compressed_whole_are_planned(
    small_moe_q4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt_tokens: list[int]
) -> None:
    """They have no exponents of their own: all of an expert is read, or nothing."""
    model = Path(shutil.copy(small_moe_q4, tmp_path / "model.gguf"))
    pack_with(lambda _: WHOLE, model)
    with small_model(model, "30%", packed=False) as plain:
        expected = logits(plain, prompt_tokens)
    report = planned(capsys, model, "--budget", "30%", *SPEEDS)
    assert report["rows"][0]["shares"][3] == 0 and report["rows"][0]["hits"][3] == 0
    with small_model(model, "30%", pools="0.5,0.5,0,0") as loaded:
        assert loaded.map.pack is not None
        assert_same_bits(logits(loaded, prompt_tokens), expected)
    planned(capsys, model, "--budget", "30%", "--read-bandwidth", "100GB/s", "--decode-bandwidth", "1MB/s")
    with small_model(model, "30%") as loaded:
        assert loaded.map.pack is None


def test_a_pack_that_is_compressed_in_some_layers_is_planned_while_its_model_is_loaded(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], resident: Model, prompt_tokens: list[int]
) -> None:
    model = Path(shutil.copy(small_moe, tmp_path / "model.gguf"))
    pack_with(all_but_the_first, model)
    with ModelMap(model) as model_map:
        packs.attach(model_map)
        assert measure_recovery(model_map, 0.001) > 0
    with small_model(model, "30%") as loaded:
        logits(loaded, prompt_tokens[:20])
    planned(capsys, model, "--budget", "30%", *SPEEDS)
    with small_model(model, "30%") as loaded:
        assert loaded.map.pack is not None
        assert_same_bits(logits(loaded, prompt_tokens), logits(resident, prompt_tokens))


def test_a_budget_that_the_model_alone_can_do_with_is_enough_beside_a_compressed_pack(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "measure_recovery", lambda *_: 1e12)
    with ModelMap(model) as model_map:
        floor = model_map.info.floor_bytes
        packs.attach(model_map)
        packed_floor = model_map.info.floor_bytes
    assert floor < packed_floor
    for budget, packed in ((floor, False), (packed_floor - 1, False), (packed_floor, True)):
        with small_model(model, budget) as loaded:
            assert (loaded.map.pack is not None) == packed, budget
    with pytest.raises(BudgetError, match="is below the floor"):
        small_model(model, floor - 1)


@pytest.mark.parametrize("change", [{"n_expert": 128}, {"n_expert_used": 5}])
def test_a_damaged_trace_is_refused_in_a_sentence(
    model: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int]
) -> None:
    header = replace(Trace(trace).header, **change)
    records = np.zeros(3, header.record_dtype())
    records["position"], records["experts"] = np.arange(3), np.arange(header.n_expert_used) + header.n_expert - 6
    with TraceWriter(tmp_path / "damaged.trace", header) as writer:
        writer.write(records)
    args = ("plan", model, "--budget", "30%", "--trace", tmp_path / "damaged.trace", *SPEEDS)
    assert main(list(map(str, args))) == 2
    assert "damaged.trace is damaged: it" in capsys.readouterr().err


def test_where_decoding_is_slow_nothing_is_compressed(
    model: Path, trace: Path, capsys: pytest.CaptureFixture[str], prompt_tokens: list[int]
) -> None:
    report = planned(capsys, model, "--trace", trace, "--budget", "30%", "--read-bandwidth", "100GB/s",
                     "--decode-bandwidth", "1MB/s")
    assert not report["rows"][0]["compressed"] and report["rows"][0]["shares"] == [1, 0, 0, 0]
    with small_model(model, "30%") as loaded:
        assert loaded.map.pack is None and "pack is not used" in loaded.stats().pools_from
        logits(loaded, prompt_tokens)
        assert loaded.engine.stats().decoded_bytes == 0
    with small_model(model, "30%", pools="0.5,0.5,0,0") as asked:
        assert asked.map.pack is not None


def test_without_a_plan_memory_is_divided_by_what_is_known_of_the_routing(
    model: Path, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int]
) -> None:
    monkeypatch.setattr(pools, "measure_recovery", lambda *_: 1e12)
    with small_model(model, "40%") as loaded:
        assert loaded.map.pack is not None
        logits(loaded, prompt_tokens)
        loaded.engine.wait_idle()
        assert loaded.engine.stats().stored_bytes == 0
    with ModelMap(model) as model_map:
        maps = ExpertMaps.for_model(model_map)
        maps.uses += 1
        maps.write(container.default_path(model, "maps"), model_map)
    for budget, gains_enough in (("20%", False), ("60%", True)):  # the more experts there is memory for
        with small_model(model, budget) as loaded:
            logits(loaded, prompt_tokens)
            loaded.engine.wait_idle()
            assert (loaded.engine.stats().stored_bytes > 0) == gains_enough, budget


def test_a_plan_of_another_model_refuses_to_load(model: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(capsys, model, "--trace", trace, "--budget", "30%", *SPEEDS)
    path = default_path(model)
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    with pytest.raises(FormatError, match="was made for another model"):
        small_model(model, "30%")
    path.write_text("{}")
    assert main(["run", str(model), "-p", "x", "-n", "1", "--budget", "30%"]) == 2
    assert "is not a plan: `pyorch plan` makes one" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "sentence"), [
    (("--budget", "auto"), "a plan is for a size or a share of the experts: give --budget, such as 40%"),
    ((), "a plan is for a size or a share of the experts"),
    (("--budget", "30%", "--forms", "F,X", *SPEEDS), 'forms "F,X" are not understood'),
    (("--budget", "1KiB", *SPEEDS), "is below the floor"),
    (("--budget", "30%", "--decode-bandwidth", "fast"), 'bandwidth: "fast" is not understood'),
    (("--budget", "30%", "--compute-ms", "5"), "--compute-ms is for playing a trace: give --trace"),
    (("--budget", "30%", "--compute-ms", "inf"), "is not a number of 0 or more"),
    (("--budget", "30%", "--step", "0.001"), "is not a number of 0.01 or more"),
    (("--budget", "30%", "--trace", "nowhere.trace", *SPEEDS), "nowhere.trace cannot be read"),
])
def test_what_cannot_be_planned_is_refused_in_a_sentence(
    model: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    assert main(["plan", str(model), *args]) == 2
    assert sentence in capsys.readouterr().err
    assert not default_path(model).exists()


def test_a_model_without_a_compressed_pack_is_refused(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copy(small_moe, tmp_path / "bare.gguf"))
    for has_plain_pack in (False, True):
        assert main(["run", str(bare), "-p", "x", "-n", "1", "--budget", "30%", "--pools", "0.5,0.5,0,0"]) == 2
        assert "has no compressed pack: make one with `pyorch pack --codec table`" in capsys.readouterr().err
        assert main(["plan", str(bare), "--budget", "30%"]) == 2
        error = capsys.readouterr().err
        assert "has no compressed pack: make one with `pyorch pack --codec table`" in error
        assert ("bare.experts.gguf is not compressed" in error) == has_plain_pack
        pack = packing.pack(bare).path
    assert main(["run", str(pack), "-p", "x"]) == 2
    assert f"{pack} is the pack of a model: name the model" in capsys.readouterr().err
    assert main(["run", str(bare), "-p", "x", "--no-pack", "--pools", "1,0,0,0"]) == 2
    assert "with --no-pack" in capsys.readouterr().err


def test_a_disk_is_measured_by_a_compressed_pack(model: Path) -> None:
    """Where threads decode what was read, whoever reads is told that there is room for more."""
    with ModelMap(model) as model_map:
        assert packs.attach(model_map) == ""
        for reads in ("auto:1:1MiB", "threads:1:1MiB"):
            assert disk.measure(model_map, Reads.parse(reads), 0.02).bytes_per_second > 0


def test_decoding_is_measured(model: Path) -> None:
    with ModelMap(model) as model_map:
        assert measure_recovery(model_map, 0.01) is None
        packs.attach(model_map)
        assert measure_recovery(model_map, 0.01) > 0
