"""Warm memory: what is resident before a layer asks for it, and what is kept for the next start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shared

from pyorch.cli import main
from pyorch.llama import managed, warm
from pyorch.llama.managed import find
from pyorch.llama.model import Model, load
from pyorch.runtime import kept
from pyorch.sidecars import container, eviction

BUDGET = "40%"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(warm, "kept_in", shared.KEPT_IN)
    return kept.directory()


def resident(model: Model) -> set[tuple[int, int]]:
    """When everything that was ordered has been read."""
    model.engine.wait_idle()
    return {(layer.il, int(expert)) for layer in model.map.layers
            for expert in model.engine.residency(layer.il).resident.nonzero()[0]}


def run(model: Path, *options: str) -> None:
    assert main(["run", str(model), "-p", "The experts", "-n", "24", "--budget", BUDGET, *options]) == 0


def text(model: Model) -> str:
    return "".join(model.generate("The experts", max_tokens=8, temperature=0))


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("warm-*"))


def test_what_fits_is_read_before_anybody_asks(small_moe: Path) -> None:
    with load(small_moe, budget="100%") as model:
        assert len(resident(model)) == sum(layer.n_expert for layer in model.map.layers)


def test_a_start_brings_back_what_was_resident(small_moe: Path, cache: Path) -> None:
    run(small_moe)
    assert len(files(cache)) == 1
    with load(small_moe, budget=BUDGET) as model:
        first = resident(model)
        n_slots = model.engine.stats().budget_bytes // model.map.layers[0].slot_bytes
        assert n_slots / 2 < len(first) <= n_slots  # but for the room of a layer that comes meanwhile
        assert model.engine.stats().hits == 0
        answer = text(model)
    with load(small_moe, budget=BUDGET, warm=False) as model:
        assert resident(model) == set()
        assert text(model) == answer
    with load(small_moe, budget="20%") as model:
        assert 0 < len(resident(model)) < len(first)


def test_the_policy_goes_on_from_what_it_had_learned(small_moe: Path, cache: Path) -> None:
    run(small_moe)
    with load(small_moe, budget=BUDGET) as model:
        known, kept_ones = model.engine.learned(), eviction.read(files(cache)[0], model.map).learned
        assert known["tables"].any() and known.keys() == kept_ones.keys()
        assert all(np.array_equal(known[name], values) for name, values in kept_ones.items())
    with load(small_moe, budget=BUDGET, warm=False) as model:
        assert not model.engine.learned()["tables"].any()


def test_nothing_is_kept_where_that_is_not_wanted(small_moe: Path, cache: Path) -> None:
    run(small_moe, "--cold")
    assert not files(cache)
    assert main(["run", str(small_moe), "-p", "x", "-n", "2", "--budget", "100%"]) == 0
    assert not files(cache)  # all are read anyway


def test_a_file_with_what_cannot_have_been_learned_keeps_nobody_from_starting(
    small_moe: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(small_moe)
    [file] = files(cache)
    with load(small_moe, budget=BUDGET) as model:
        metadata, arrays = container.read(file, eviction.KIND, eviction.VERSION, model.map)
        container.write(file, eviction.KIND, eviction.VERSION, model.map, metadata,
                        {**arrays, "bias": np.full_like(arrays["bias"], np.nan)})
    lines: list[str] = []
    monkeypatch.setattr(managed.fatal, "notice", lines.append)
    with load(small_moe, budget=BUDGET) as model:
        assert not model.engine.learned()["tables"].any() and text(model)
    assert any("eviction starts without the state of the last time" in line for line in lines)


@pytest.mark.parametrize("contents", ["damaged", "foreign"])
def test_a_file_that_is_none_of_this_model_is_ignored_with_a_line(
    small_moe: Path, small_moe_q4: Path, cache: Path, contents: str
) -> None:
    run(small_moe)
    [file] = files(cache)
    if contents == "damaged":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        run(small_moe_q4)
        [other] = set(files(cache)) - {file}
        file.write_bytes(other.read_bytes())
    with load(small_moe, budget=BUDGET) as model:
        assert resident(model) == set()
        notes = find(model.llama.model).plan.notes
        assert any("memory begins without what was kept of the last time" in note for note in notes)
    run(small_moe)  # and it is written anew
    with load(small_moe, budget=BUDGET) as model:
        assert resident(model)
