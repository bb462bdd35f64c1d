"""What settings mean for a model, before an engine is made."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import llama_cpp.llama_cpp as llama
import pytest
from architectures import Zoo
from ghost_layers import random_ghosts

from pyorch.errors import BudgetError, PyorchError
from pyorch.llama.managed import build
from pyorch.llama.plan import EnginePlan, make_plan
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import RESIDENT, Budget
from pyorch.settings.settings import Settings


def planned(path: Path, **settings: object) -> EnginePlan:
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    return make_plan(Settings(**settings), ModelMap(path), params)


def test_a_plan_says_all_that_an_engine_is_made_of_and_cannot_be_changed(small_moe: Path) -> None:
    plan = planned(small_moe, budget="40%", policy="lru", prefetch="quasi-hidden:2:0.5")
    assert plan.budget == Budget.parse("40%").resolve(plan.map.info) and not plan.automatic
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.budget = 0
    with build(plan) as engine:
        assert engine.stats().budget_bytes == plan.budget


def test_the_automatic_budget_is_the_least_that_works_until_a_context_says_more(small_moe: Path) -> None:
    plan = planned(small_moe)
    assert plan.automatic and plan.budget == plan.map.info.floor_bytes


def test_no_engine_is_planned_where_all_experts_are_to_be_resident(small_moe: Path) -> None:
    plan = planned(small_moe, budget=RESIDENT)
    assert plan.budget is None and build(plan) is None


def test_a_header_without_weights_is_told(small_moe: Path, tmp_path: Path) -> None:
    header = tmp_path / "header.gguf"
    with small_moe.open("rb") as whole, header.open("wb") as file:
        file.write(whole.read(1 << 20))
        file.truncate(small_moe.stat().st_size)
    for path, told in ((header, True), (small_moe, False)):
        notes = planned(path, budget="40%").notes
        assert any("seems to be a header without weights" in note for note in notes) == told


def test_a_lossy_setting_that_waits_for_all_that_a_token_uses_is_told(small_moe: Path, zoo: Zoo) -> None:
    top_2 = planned(zoo.path("mixtral", "Q8_0"), budget="100%", substitution="heaviest,sacred=2")
    assert top_2.notes[-1] == ("the lossy setting heaviest,sacred=2 changes nothing: it waits for a token's heaviest "
                               "experts, 2 of the 2 that the model uses in a layer; sacred=1 does not")
    for path, setting in ((small_moe, "heaviest,sacred=2"), (top_2.map.path, "heaviest")):
        assert planned(Path(path), budget="100%", substitution=setting).notes[-1] == ""


def test_a_budget_counts_ghosts(small_moe: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(small_moe, tmp_path))
    with ModelMap(path) as model_map:
        random_ghosts(1).write(path.with_suffix(".ghosts.gguf"), model_map)
    lossless, lossy = (planned(path, budget="40%", substitution=setting) for setting in ("heaviest", "ghosts"))
    assert lossless.budget - lossy.budget == lossy.ghosts.n_bytes > 0
    with build(lossy) as engine:
        assert engine.stats().budget_bytes == lossy.budget
    floor = lossy.map.info.floor_bytes
    assert planned(path, budget=str(floor), substitution="heaviest").budget == floor
    with pytest.raises(BudgetError, match="are for ghosts, is below the floor of .* use --budget") as refused:
        planned(path, budget=str(floor), substitution="ghosts")
    least = str(refused.value).split("--budget ")[1].split()[0]
    assert planned(path, budget=least, substitution="ghosts").budget >= floor
    slots = lossy.map.info.slots_bytes
    assert planned(path, budget="100%", substitution="ghosts").budget == slots - lossy.ghosts.n_bytes
    assert planned(path, budget=str(slots + lossy.ghosts.n_bytes), substitution="ghosts").budget == slots
    assert planned(path, substitution="ghosts").budget == floor


@pytest.mark.parametrize("settings, error", [
    ({"budget": "1KiB"}, BudgetError),
    ({"budget": "40%", "substitution": "buddies"}, PyorchError),
    ({"budget": "40%", "substitution": "ghosts"}, PyorchError),
    ({"budget": "40%", "pools": "0.5,0.5,0,0"}, PyorchError),
    ({"budget": "40%", "device": "CUDA77"}, PyorchError),
])
def test_what_the_model_lacks_is_said_when_it_is_planned(
    small_moe: Path, tmp_path: Path, settings: dict[str, str], error: type[PyorchError]
) -> None:
    alone = shutil.copy(small_moe, tmp_path / "alone.gguf")
    with pytest.raises(error):
        planned(Path(alone), **settings)


def test_what_loading_raises_ends_the_engine(small_moe: Path) -> None:
    from pyorch.llama.managed import loading

    made = []
    params = llama.llama_model_default_params()
    with pytest.raises(OSError), loading(os.fspath(small_moe), ModelMap(small_moe), Settings(budget="40%"),
                                         params) as managed:
        made.append(managed.engine)
        raise OSError
    with pytest.raises(PyorchError, match="closed"):
        made[0].stats()
