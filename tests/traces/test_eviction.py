"""Eviction policies, replayed: the learned one does what its equations say, and suits any kind of routing."""

from __future__ import annotations

from pathlib import Path

import learned_model
import numpy as np
import pytest
import routings

from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.traces.recording import Recording
from pyorch.traces.replay import ReplaySettings, replay

N_EXPERT, N_USED, N_LAYERS = 64, 6, 4
FIXED = "lru", "lfu"


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


def recording(used: np.ndarray, request: np.ndarray | None = None) -> Recording:
    return Recording(tuple(range(used.shape[1])), N_EXPERT, used, np.full(used.shape, 1 / N_USED),
                     np.zeros(len(used)) if request is None else request)


def experts(model_map: ModelMap, budget: str) -> int:
    """That fit into a budget."""
    with Engine(model_map, budget, simulated=True) as engine:
        return engine.stats().budget_bytes // model_map.layers[0].slot_bytes


def test_learned_hits_as_often_as_its_equations_say(model_map: ModelMap) -> None:
    used = routings.drifting(np.random.default_rng(5), 600, N_LAYERS, N_EXPERT, N_USED)
    request = np.repeat(np.arange(6), 100)
    played = replay(model_map, recording(used, request), ReplaySettings("learned", budget="15%", n_warm_tokens=100))
    expected = learned_model.hit_rate(used, request, N_EXPERT, experts(model_map, "15%"), 100)
    assert played.hit_rate == pytest.approx(expected, abs=0.003)


def test_learned_sees_what_follows_what(model_map: ModelMap) -> None:
    routing = recording(routings.cyclic(np.random.default_rng(6), 1000, N_LAYERS, N_EXPERT, N_USED))
    rates = {policy: replay(model_map, routing, ReplaySettings(policy, budget="15%", n_warm_tokens=500)).hit_rate
             for policy in ("lru", "lfu", "learned")}
    assert rates.pop("learned") > max(rates.values()) + 0.05, rates


@pytest.mark.parametrize("make", [routings.recent, routings.popular, routings.drifting, routings.uniform])
def test_learned_suits_any_kind_of_routing(model_map: ModelMap, make) -> None:
    """Within one point of the best of all others, and of what was most popular before where that is best."""
    used = make(np.random.default_rng(1), 3000, N_LAYERS, N_EXPERT, N_USED)
    n_warm = 1500
    settings = {policy: ReplaySettings(policy, budget="20%", n_warm_tokens=n_warm) for policy in (*FIXED, "learned")}
    rates = {policy: replay(model_map, recording(used), setting).hit_rate for policy, setting in settings.items()}
    static = routings.static_hit_rate(used[:n_warm], used[n_warm:], N_EXPERT, experts(model_map, "20%"))
    best = max(*rates.values(), static)
    assert rates["learned"] > best - 0.01, rates


@pytest.mark.parametrize("batch", [2, 7])
def test_learned_gains_with_several_sequences_too(model_map: ModelMap, batch: int) -> None:
    """A ubatch of several sequences is one visit of all that they use."""
    used = np.concatenate([routings.drifting(np.random.default_rng(seed), 150, N_LAYERS, N_EXPERT, N_USED)
                           for seed in range(14)])
    routing = recording(used, np.repeat(np.arange(14), 150))
    settings = {policy: ReplaySettings(policy, budget="20%", batch=batch, n_warm_tokens=300)
                for policy in ("lru", "lfu", "learned")}
    rates = {policy: replay(model_map, routing, setting).hit_rate for policy, setting in settings.items()}
    assert rates["learned"] > max(rates["lru"], rates["lfu"]) - 0.01, rates
