"""Plans belong to one model and version, and are read as they were written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyorch.errors import FormatError
from pyorch.planning.ranks import even_inclusion, inclusion_of_counts
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.plan import Machine, Plan, default_path, layer_costs, read_plan, write_plan


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


@pytest.fixture
def plan(model_map: ModelMap) -> Plan:
    rows = even_inclusion([layer.n_expert for layer in model_map.decoded_layers], model_map.info.n_expert_used)
    rows = np.sort(rows * np.linspace(1.5, 0.5, rows.shape[1]))[:, ::-1]
    rows *= model_map.info.n_expert_used / rows.sum(axis=1, keepdims=True)
    return Plan(1 << 22, "FCSE", 0.05, (0.75, 0.2, 0.0, 0.05), True, (4.0, 1.0, 0.0, 0.5, 0.5), 12.5, 1000,
                Machine(1.2e9, 2.5e9, 2), tuple(map(tuple, rows.tolist())))


def test_a_plan_is_read_as_it_was_written(model_map: ModelMap, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model.plan.json"
    write_plan(path, plan, model_map)
    read = read_plan(path, model_map)
    assert replace(read, inclusion=()) == replace(plan, inclusion=())
    assert read.rows == pytest.approx(plan.rows, rel=1e-5)
    assert read.rows.sum(axis=1) == pytest.approx([model_map.info.n_expert_used] * len(plan.rows), rel=1e-12)
    assert default_path("a/model.gguf") == Path("a/model.plan.json")


def test_a_plan_of_another_model_is_refused(
    model_map: ModelMap, small_moe_q4: Path, plan: Plan, tmp_path: Path
) -> None:
    write_plan(tmp_path / "plan.json", plan, model_map)
    with ModelMap(small_moe_q4) as other, pytest.raises(FormatError, match="was made for another model"):
        read_plan(tmp_path / "plan.json", other)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"kind": "something"}, "is not a plan"),
    ({"version": 2}, "has version 2 of its format"),
    *(({name: value}, "is damaged: plan again") for name, value in (
        ("shares", [0.5, 0.2, 0.0, 0.0]), ("shares", [1.0]), ("shares", None), ("shares", [1.5, -0.5, 0, 0]),
        ("budget", -1), ("budget", "40%"), ("hits", [1, 2]), ("makespan_ms", True), ("step", 0), ("pools", "FX"),
        ("compressed", 1), ("machine", {}),
        ("machine", {"bytes_per_second": 0, "decoded_per_second": 1, "n_workers": 1}),
        ("inclusion", []), ("inclusion", [[0.5, "a"]]), ("inclusion", {"a": 1}), ("n_tokens", 1e400),
    )),
])
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


def test_routing_is_known_from_requests_beside_the_model(small_moe: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(small_moe)
    with ModelMap(model) as model_map:
        assert Sidecars(model_map).inclusion() is None
        maps = ExpertMaps.for_model(model_map)
        counts = np.random.default_rng(0).integers(0, 9, (2, maps.n_layers, maps.n_expert))
        for request in counts:
            maps.add_request(request)
        maps.write(container.default_path(model, "maps"), model_map)
        assert Sidecars(model_map).inclusion() == pytest.approx(inclusion_of_counts(
            counts.sum(axis=0), model_map.info.n_expert_used))
