"""Plans belong to one model and version, and are read as they were written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from packs_of_choice import IN_PLANES, WHOLE, all_but_the_first, pack_with

from pyorch.errors import FormatError, PyorchError
from pyorch.planning.ranks import HALF_LIFE, even_inclusion, fading_uses, inclusion_of_counts
from pyorch.runtime.decompression import decode_threads, recovery_threads
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, packs
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.memory_plan import Machine, Plan, Reserve, default_path, layer_costs, read_plan, write_plan
from pyorch.sidecars.packs import part_sizes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


@pytest.fixture
def plan(model_map: ModelMap) -> Plan:
    rows = even_inclusion([layer.n_expert for layer in model_map.decoded_layers], model_map.info.n_expert_used)
    rows = np.sort(rows * np.linspace(1.5, 0.5, rows.shape[1]))[:, ::-1]
    rows *= model_map.info.n_expert_used / rows.sum(axis=1, keepdims=True)
    uses = tuple(tuple(range(1, len(row) + 1)) for row in rows)
    return Plan(1 << 22, "FCSE", 0.05, (0.75, 0.2, 0.0, 0.05), True, (4.0, 1.0, 0.0, 0.5, 0.5), 12.5, 1.1, 1000,
                Machine(1.2e9, 2.5e9, 2), ("table",), tuple(map(tuple, rows.tolist())), uses)


def test_a_plan_is_read_as_it_was_written(model_map: ModelMap, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model.plan.json"
    write_plan(path, plan, model_map)
    read = read_plan(path, model_map)
    assert replace(read, inclusion=()) == replace(plan, inclusion=())
    assert read.rows == pytest.approx(plan.rows, rel=1e-5)
    assert read.rows.sum(axis=1) == pytest.approx([model_map.info.n_expert_used] * len(plan.rows), rel=1e-12)
    assert default_path("a/model.gguf") == Path("a/model.plan.json")


def test_a_plan_that_names_no_batch_is_for_one_sequence(model_map: ModelMap, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model.plan.json"
    write_plan(path, replace(plan, batch=4), model_map)
    assert read_plan(path, model_map).batch == 4
    value = json.loads(path.read_text())
    del value["batch"]
    path.write_text(json.dumps(value))
    assert read_plan(path, model_map).batch == 1


def test_a_plan_of_another_model_is_refused(
    model_map: ModelMap, small_moe_q4: Path, plan: Plan, tmp_path: Path
) -> None:
    write_plan(tmp_path / "plan.json", plan, model_map)
    with ModelMap(small_moe_q4) as other, pytest.raises(FormatError, match="was made for another model"):
        read_plan(tmp_path / "plan.json", other)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "something"}, "is not a plan"),
        ({"version": 1}, "has version 1 of its format"),
        *(
            ({name: value}, "is damaged: plan again")
            for name, value in (
                ("shares", [0.5, 0.2, 0.0, 0.0]),
                ("shares", [1.0]),
                ("shares", None),
                ("shares", [1.5, -0.5, 0, 0]),
                ("budget", -1),
                ("budget", "40%"),
                ("hits", [1, 2]),
                ("makespan_ms", True),
                ("step", 0),
                ("step", 1e-4),
                ("pools", "FX"),
                ("pools", "FF"),
                ("compressed", 1),
                ("machine", {}),
                ("machine", {"bytes_per_second": 0, "decoded_per_second": 1, "n_workers": 1}),
                ("handicap", 0.5),
                ("batch", 0),
                ("batch", "4"),
                ("codecs", "table"),
                ("codecs", [1]),
                ("uses", [[1, 2]]),
                ("uses", 3),
                ("uses", [["a"]]),
                ("inclusion", []),
                ("inclusion", [[0.5, "a"]]),
                ("inclusion", {"a": 1}),
                ("n_tokens", 1e400),
            )
        ),
    ],
)
def test_a_damaged_plan_is_refused(
    model_map: ModelMap, plan: Plan, tmp_path: Path, change: dict, sentence: str
) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, plan, model_map)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=sentence):
        read_plan(path, model_map)


@pytest.mark.parametrize("scale", [0.0, 2.0, float("nan")])
def test_probabilities_that_are_none_are_refused(
    model_map: ModelMap, plan: Plan, tmp_path: Path, scale: float
) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, plan, model_map)
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"inclusion": [[scale * f for f in row] for row in value["inclusion"]]}))
    with pytest.raises(FormatError, match="is damaged"):
        read_plan(path, model_map)


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"\xff\xfe", b"[]", b"[" * 100_000])
def test_what_is_no_plan_is_refused(model_map: ModelMap, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(FormatError, match="is not a plan"):
        read_plan(tmp_path / "plan.json", model_map)
    with pytest.raises(FormatError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.json", model_map)


def test_without_a_compressed_pack_there_is_nothing_to_divide(model_map: ModelMap, plan: Plan) -> None:
    with pytest.raises(FormatError, match="no compressed pack: make one with `pyorch pack"):
        layer_costs(model_map, plan.machine)


@pytest.fixture(scope="module", params=[lambda _: IN_PLANES, all_but_the_first, lambda _: WHOLE],
                ids=["all layers", "some layers", "without planes"])
def packed(request: pytest.FixtureRequest, small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    model = Path(shutil.copy(small_moe, tmp_path_factory.mktemp("packed") / "model.gguf"))
    pack_with(request.param, model)
    with ModelMap(model) as packed_map:
        packs.attach(packed_map)
        yield packed_map


def test_the_memory_that_is_reserved_is_that_of_the_library(packed: ModelMap) -> None:
    reserve, info = Reserve.of(packed), packed.info
    slot = packed.layers[0].slot_bytes
    assert reserve.least_full == (2 * info.n_expert_used + 1) * slot
    assert (
        info.slots_bytes
        == sum(layer.n_expert * layer.slot_bytes for layer in packed.layers) + reserve.each * reserve.most
    )
    for budget in (info.floor_bytes, 40 * reserve.each, 16 * reserve.each * reserve.most + 1):
        budget = min(max(budget, info.floor_bytes), info.slots_bytes - reserve.each * reserve.most)
        with Engine(packed, budget) as engine:
            for layer in packed.layers:
                engine.prefetch(layer.il, list(range(layer.n_expert)))
                engine.wait_idle()
            held = engine.stats().resident_bytes
        room = budget - reserve.bytes(budget)
        assert room - slot < held <= room


def test_layers_that_are_not_compressed_have_no_parts(packed: ModelMap, plan: Plan) -> None:
    parts = part_sizes(packed)
    costs = layer_costs(packed, plan.machine)
    for layer, cost in zip(packed.layers, costs):
        whole, compressed, sm, e = cost.form_bytes
        if layer.il in parts:
            assert whole == layer.slot_bytes and compressed == sm + e and sm > 0 and cost.delays.decode > 0
        else:
            assert cost.form_bytes == (layer.slot_bytes, 0, 0, 0)
            delays = cost.delays
            read = delays.n_matrices * (delays.sm_read + delays.n_shards * delays.e_read)
            assert read == pytest.approx(cost.plain_read) and delays.decode == 0


def test_uses_fade_in_plans_as_in_the_library() -> None:
    """By its source: nothing that is called shows it."""
    source = (ROOT / "native/src/residency/pools.cpp").read_text()
    assert list(map(float, re.findall(r"constexpr double HALF_LIFE_TOKENS\s*=\s*([0-9.]+);", source))) == [HALF_LIFE]


@pytest.mark.parametrize("uses", [(), ((0, 0), (0, 0))])
def test_a_plan_without_a_trace_knows_no_uses(model_map: ModelMap, plan: Plan, tmp_path: Path, uses: tuple) -> None:
    write_plan(tmp_path / "plan.json", replace(plan, uses=uses), model_map)
    if uses:
        with pytest.raises(FormatError, match="is damaged"):
            read_plan(tmp_path / "plan.json", model_map)
    else:
        assert read_plan(tmp_path / "plan.json", model_map).uses == ()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_threads_for_half_of_the_cores_decode_beside_those_that_compute(packed: ModelMap) -> None:
    """A plan counts on the others as well: who waits decodes. Where threads read, they decode what they read."""
    def n_started(reads: str) -> int:
        before = len(os.listdir("/proc/self/task"))
        with Engine(packed, "50%", reads=reads):
            return len(os.listdir("/proc/self/task")) - before

    assert n_started("threads") == decode_threads()
    with contextlib.suppress(PyorchError):  # where the system allows the ring
        assert n_started("io_uring") == 1 + decode_threads()


@pytest.mark.parametrize(("n_cores", "n_allowed", "n_computing", "n"), [
    (2, 2, 2, 2), (2, 2, 1, 2), (64, 64, 32, 36), (64, 8, 8, 8), (64, 64, 4, 8), (1, 1, 1, 1),
])
def test_a_plan_counts_on_threads_that_compute_and_on_those_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, n_allowed: int, n_computing: int, n: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: n_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n_allowed)), raising=False)
    assert recovery_threads(n_computing) == n


def test_routing_is_known_from_the_maps_beside_the_model(small_moe: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(small_moe)
    with ModelMap(model) as model_map:
        assert Sidecars(model_map).inclusion() is None and Sidecars(model_map).uses() is None
        maps = ExpertMaps.for_model(model_map)
        counts = np.random.default_rng(0).integers(0, 9, (2, maps.n_layers, maps.n_expert))
        maps.uses += counts.sum(axis=0)
        maps.write(container.default_path(model, "maps"), model_map)
        assert Sidecars(model_map).inclusion() == pytest.approx(inclusion_of_counts(
            counts.sum(axis=0), model_map.info.n_expert_used))
        uses = Sidecars(model_map).uses()
        n_tokens = counts.sum(axis=0)[0].sum() / model_map.info.n_expert_used
        assert uses == pytest.approx(fading_uses(counts.sum(axis=0), n_tokens))
