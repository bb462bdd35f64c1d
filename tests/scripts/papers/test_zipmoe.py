"""scripts.papers.zipmoe: strategies at one budget, measurements that go on where they ended, files and mistakes."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT

from pyorch.bench.surroundings import memory_group
from pyorch.convert import pack as packing
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.sidecars import container, packs
from pyorch.sidecars.memory_plan import Machine
from pyorch.sizes import Amount, MiB
from pyorch.traces.file import Trace, TraceHeader, TraceWriter
from scripts.papers.zipmoe import caching, measure, plots, report
from scripts.papers.zipmoe.caching import COMPRESSED, FULL, PLAN, WITHOUT, Conditions, Played
from scripts.papers.zipmoe.evaluate import main
from scripts.papers.zipmoe.measure import MMAP, Case, Measured, Measurements, Work

TEXT = CHECKPOINT / "text-test.txt"
SPEEDS = ("--read-bandwidth", "20MB/s", "--decode-bandwidth", "1GB/s", "--workers", "1")
CONDITIONS = Conditions((Budget.parse("30%"),), ("lru", "fifo", "marking", "learned", "belady"),
                        Machine(20e6, 1e9, 1), compute_ms=10.0)
LIMIT = Amount.parse("400MiB")


def limits_work() -> bool:
    try:
        with memory_group(64 * MiB):
            return True
    except PyorchError:
        return False


needs_limits = pytest.mark.skipif(not limits_work(), reason="no memory controller is writable here")


@pytest.fixture(scope="module")
def model(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Path(shutil.copy(small_moe, tmp_path_factory.mktemp("eval-pack") / "model.gguf"))
    packing.pack(model, codec="table")
    return model


@pytest.fixture(scope="module")
def maps(model: Path):
    """Without the pack, and with it."""
    with ModelMap(model) as plain, ModelMap(model) as packed:
        packs.require_compressed(packed)
        yield plain, packed


def trace(model_map: ModelMap, path: Path, n: int = 400, other_half: bool = False) -> Trace:
    """Some experts are needed far more often than others; other_half: others in the second half."""
    layers = model_map.decoded_layers
    header = TraceHeader(container.fingerprint(model_map), model_map.info.arch, tuple(layer.il for layer in layers),
                         layers[0].n_expert, model_map.info.n_expert_used, n_embd=0)
    rng = np.random.default_rng(1)
    scores = 2 * rng.normal(size=(len(layers), header.n_expert)) + rng.gumbel(size=(n, len(layers), header.n_expert))
    if other_half:
        scores[n // 2 :] = rng.gumbel(size=scores[n // 2 :].shape)
    records = np.zeros(n, header.record_dtype())
    records["position"], records["phase"] = np.arange(n), 1
    records["experts"] = np.argsort(-scores, axis=2)[:, :, : header.n_expert_used]
    with TraceWriter(path, header) as writer:
        writer.write(records)
    return Trace(path)


def quiet(*_: object) -> None:
    pass


def by_name(rows: list[Played]) -> dict[tuple[str, str], Played]:
    return {(row.kept, row.policy): row for row in rows}


@pytest.fixture(scope="module")
def played(maps, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Played]:
    return by_name(caching.compare(*maps, trace(maps[0], tmp_path_factory.mktemp("trace") / "t"), CONDITIONS, quiet))


def test_every_form_is_played_with_every_policy_that_suits_it(played: dict[tuple[str, str], Played]):
    assert played.keys() == {
        (kept, policy) for kept in (WITHOUT, FULL, COMPRESSED, PLAN) for policy in CONDITIONS.policies
        if kept in (WITHOUT, FULL) or policy not in ("fifo", "marking")}
    assert not any(row.failure for row in played.values())
    for kept in (WITHOUT, FULL):
        waits = {policy: played[kept, policy].wait_ms for policy in CONDITIONS.policies}
        assert waits["belady"] == min(waits.values()) and waits["learned"] < waits["lru"] < 1.2 * waits["fifo"]
        assert len(set(waits.values())) == len(waits)
    assert played[WITHOUT, "lru"].shares is None and played[FULL, "lru"].shares == (1, 0, 0, 0)
    assert played[COMPRESSED, "lru"].part_rate > 0 == played[FULL, "lru"].part_rate


def test_a_miss_reads_less_from_the_compressed_pack(maps, played: dict[tuple[str, str], Played]):
    """By as much as it is smaller."""
    parts = packs.required_part_sizes(maps[1])
    layer = maps[1].layers[0]
    smaller = (parts[layer.il].e_bytes + parts[layer.il].sm_bytes) / layer.expert_bytes
    whole, full = played[WITHOUT, "lru"], played[FULL, "lru"]
    missed = (1 - full.hit_rate) / (1 - whole.hit_rate)
    assert full.read_mib / whole.read_mib == pytest.approx(missed * smaller, rel=0.03) and smaller < 0.75


def test_the_plan_does_not_know_what_counts(maps, played: dict[tuple[str, str], Played], tmp_path: Path):
    changed = by_name(caching.compare(*maps, trace(maps[0], tmp_path / "t", other_half=True),
                                   replace(CONDITIONS, policies=("learned",)), quiet))
    before, after = played[PLAN, "learned"], changed[PLAN, "learned"]
    assert (after.shares, after.expected_ms) == (before.shares, before.expected_ms)
    assert after.wait_ms > 1.5 * before.wait_ms and before.expected_ms == pytest.approx(before.wait_ms, rel=0.5)


def test_a_plan_that_gains_nothing_keeps_whole_experts(maps, tmp_path: Path):
    slow = replace(CONDITIONS, machine=Machine(20e6, 1e6, 1), policies=("lru",))
    rows = by_name(caching.compare(*maps, trace(maps[0], tmp_path / "t"), slow, quiet))
    assert rows[PLAN, "lru"].shares is None
    assert rows[PLAN, "lru"].wait_ms == rows[WITHOUT, "lru"].wait_ms < rows[FULL, "lru"].wait_ms


def test_a_budget_that_is_too_small_with_a_pack_is_said_in_its_rows(maps, tmp_path: Path):
    floor = Budget.parse(maps[0].info.floor_bytes)
    assert maps[1].info.floor_bytes > maps[0].info.floor_bytes
    small = replace(CONDITIONS, budgets=(floor,), policies=("lru",))
    rows = by_name(caching.compare(*maps, trace(maps[0], tmp_path / "t"), small, quiet))
    assert "below the floor" in rows[FULL, "lru"].failure and "below the floor" in rows[COMPRESSED, "lru"].failure
    assert rows[WITHOUT, "lru"].wait_ms == rows[PLAN, "lru"].wait_ms > 0
    assert all(not goal.measured or goal.reached == 1 for goal in report.caching_goals(list(rows.values()), small)
               if WITHOUT in goal.what)


def test_goals_tell_whether_the_plan_is_the_best():
    conditions = replace(CONDITIONS, policies=("lru",))

    def rows(plan_ms: float) -> list[Played]:
        made = [Played(kept, "lru", "30%", None, wait_ms=wait) for kept, wait in
                ((WITHOUT, 12.0), (FULL, 10.0), (COMPRESSED, 11.0))]
        return [*made, Played(PLAN, "lru", "30%", (0.5, 0.5, 0, 0), wait_ms=plan_ms, expected_ms=8.0)]

    better, worse = (list(report.caching_goals(rows(wait), conditions)) for wait in (8.0, 11.5))
    assert all(goal.met for goal in better) and len(better) >= 4
    assert [goal.met for goal in worse if "replayed wait" in goal.what].count(False) >= 2
    assert not worse[-1].met and worse[-1].reached == pytest.approx(1 - 8 / 11.5)


def test_command_records_compares_and_writes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "evaluation"
    assert main([str(model), "--data", str(TEXT), "--tokens", "300", "--budget", "25%,50%", "--policy",
                 "lru,learned", *SPEEDS, "-o", str(out)]) == 0
    assert "caching.png" in capsys.readouterr().out
    rows = list(csv.DictReader((out / "caching.csv").open()))
    assert [(row["budget"], row["kept"], row["policy"]) for row in rows] == [
        (budget, kept, policy) for budget in ("25%", "50%") for kept in (WITHOUT, FULL, COMPRESSED, PLAN)
        for policy in ("lru", "learned")]
    assert all(float(row["wait ms"]) > 0 for row in rows)
    assert (out / "caching.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"caching.csv", "caching.png", "goals.csv"}


def work(model: Path, tmp_path: Path) -> Work:
    text = tmp_path / "text"
    text.write_text(TEXT.read_text())
    return Work(str(model), None, str(text), n_prompt=16, n_tokens=8, n_threads=1, n_rounds=1, max_seconds=600)


@needs_limits
def test_systems_take_turns_and_what_was_measured_stays(model: Path, tmp_path: Path):
    record, told = tmp_path / "record.json", []
    first = [Case(PLAN, LIMIT), Case(FULL, LIMIT), Case(PLAN, LIMIT, 3)]
    with ModelMap(model) as model_map:
        before = Measurements(work(model, tmp_path), model_map, first, record)
        before.run(quiet, told.append)
        after = Measurements(work(model, tmp_path), model_map, [*first, Case(MMAP, LIMIT)], record)
        after.run(quiet, told.append)
        with pytest.raises(PyorchError, match="made with another n_tokens"):
            Measurements(replace(work(model, tmp_path), n_tokens=9), model_map, first, record)
        assert [line.partition(": ")[2].partition(":")[0] for line in told] == [case.label for case in after.cases]
        rows = {(row.system, row.batch): row for row in after.rows()}
        assert list(map(str, after.rows()[:3])) == list(map(str, before.rows()))  # nan is not nan
    assert not any(row.failure for row in rows.values())
    assert all(row.ttft_s > 0 and row.tpot_ms > 0 and 0 < row.peak_mib <= 400 for row in rows.values())
    several = next(run.measurement for run in after.results.runs if "3 sequences" in run.config.label)
    assert several.decode.n_tokens == 3 * 8
    assert rows[PLAN, 3].tpot_ms == pytest.approx(3000 / rows[PLAN, 3].tokens_per_second)
    assert rows[PLAN, 1].budget_mib > 0 and rows[MMAP, 1].budget_mib == 0
    assert after.decode_ratio(Case(FULL, LIMIT), Case(FULL, LIMIT)) == 1
    goals = {goal.what: goal for goal in report.measured_goals(after, list(rows.values()))}
    assert goals[f"decode of the plan / {MMAP}, memory 400MiB"].measured
    json.loads(record.read_text())
    record.write_text(record.read_text()[:-9])
    with ModelMap(model) as model_map, pytest.raises(FormatError, match="is no record of this evaluation"):
        Measurements(work(model, tmp_path), model_map, first, record)


def measured(system: str, batch: int, rate: float) -> Measured:
    return Measured(system, "40%", batch, 3, 1.0, 1000 * batch / rate, rate, 0.5, 10.0, 5.0, float("nan"), None, 100.0,
                    200.0, "")


def test_tables_and_pictures_of_what_was_measured(tmp_path: Path):
    rows = [measured(system, batch, 5.0 * batch) for batch in (1, 4) for system in measure.SEVERAL]
    evaluation = report.Evaluation(measured=[*rows, measured(FULL, 1, 4.0)])
    latency, throughput = report.tables(evaluation)
    assert len(latency.rows) == len(measure.SEVERAL) + 1 and len(throughput.rows) == len(rows)
    made = plots.draw(evaluation, tmp_path)
    assert [path.name for path in made] == ["latency.png", "throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


@pytest.mark.parametrize("arguments, sentence", [
    ([], "give --data or --trace"),
    (["--data", str(TEXT), "--trace", str(TEXT)], "one of them"),
    (["--data", str(TEXT), "--compare", "speed"], '"speed" is not known'),
    (["--trace", str(TEXT), "--compare", "latency"], "give --data"),
    (["--data", "missing.txt"], "missing.txt cannot be read"),
    (["--data", str(TEXT), "--budget", "auto"], 'not at "auto"'),
    (["--data", str(TEXT), "--budget", "1KiB"], "below the floor"),
    (["--data", str(TEXT), "--policy", "mru"], '"mru" is not known'),
    (["--data", str(TEXT), "--batch", "0"], "--batch"),
    (["--data", str(TEXT), "--resume", "record.json"], "--resume keeps what is measured"),
    (["--data", str(TEXT), "--memory-limit", "some"], '"some" is not understood'),
    (["--data", str(TEXT), "--read-bandwidth", "fast"], "fast"),
    (["--data", str(TEXT), "--compare", "latency", "--plain", "missing.gguf"], "missing.gguf"),
])
def test_mistakes_are_sentences(model: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(model), *arguments]) == 2
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err


def test_a_model_without_a_compressed_pack_is_refused(small_moe: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(small_moe), "--data", str(TEXT)]) == 2
    assert "has no compressed pack: make one with" in capsys.readouterr().err
