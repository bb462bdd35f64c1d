"""The second promise, the budget is kept; and what can be seen of residency and routing, and set."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from models import small_model

from pyorch.errors import BudgetError, PyorchError
from pyorch.llama.context import Context
from pyorch.llama.layer import LayerSettings
from pyorch.llama.model import Model
from pyorch.runtime.callbacks import Routing

N_LAYER, N_EXPERT, N_USED = 8, 64, 6


@pytest.fixture
def model(small_moe: Path):
    with small_model(small_moe, "30%", prefetch="none") as model:
        yield model


def test_the_budget_is_never_exceeded_while_running(small_moe: Path, prompt_tokens: list[int]) -> None:
    samples, done = [], threading.Event()
    with small_model(small_moe, "15%") as model, Context(model.llama.model, n_ctx=1024, n_threads=2) as ctx:

        def sample() -> None:
            while not done.is_set():
                samples.append(model.engine.stats().used_bytes)

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            for _ in range(8):
                ctx.decode(prompt_tokens)
            while len(samples) <= 100:
                ctx.clear()
                ctx.decode(prompt_tokens)
        finally:
            done.set()
            sampler.join()
        stats = model.stats().experts
        assert max(samples) > 0
        assert max(samples) <= stats.peak_bytes <= stats.budget_bytes
        assert stats.evictions > 100


def test_the_masks_and_the_counters_tell_the_same(model: Model, prompt_tokens: list[int]) -> None:
    with Context(model.llama.model, n_threads=1) as ctx:
        ctx.decode(prompt_tokens)
    model.engine.wait_idle()
    stats = model.stats()
    assert sum(mask.sum() for mask in model.residency.values()) == stats.experts.resident_experts > 0
    uses = sum(layer.hits + layer.misses for layer in stats.layers.values())
    assert uses == stats.experts.hits + stats.experts.misses
    assert sum(layer.bytes_read for layer in stats.layers.values()) == stats.experts.bytes_read
    slot = model.map.layers[0].slot_bytes
    assert stats.experts.resident_bytes == stats.experts.resident_experts * slot <= stats.experts.used_bytes


def test_the_observer_sees_what_the_router_chose(model: Model, prompt_tokens: list[int]) -> None:
    seen: list[Routing] = []
    model.engine.set_observer(seen.append)
    with Context(model.llama.model, n_ubatch=16, n_batch=64, n_threads=1) as ctx:
        ctx.decode(prompt_tokens[:40])
    model.engine.set_observer(None)
    n_seen = len(seen)
    with Context(model.llama.model, n_threads=1) as ctx:
        ctx.decode(prompt_tokens[:4])
    assert len(seen) == n_seen, "a removed observer was called"

    assert [routing.il for routing in seen] == [*range(N_LAYER)] * 3
    assert [len(routing.experts) for routing in seen[::N_LAYER]] == [16, 16, 8]
    assert len({routing.context for routing in seen}) == 1
    for routing in seen:
        assert routing.experts.shape == routing.weights.shape == (len(routing.experts), N_USED)
        assert routing.probs.shape == (len(routing.experts), N_EXPERT)
        np.testing.assert_allclose(routing.probs.sum(-1), 1, rtol=1e-5)
        top = np.sort(np.argsort(-routing.probs, axis=-1, kind="stable")[:, :N_USED])
        np.testing.assert_array_equal(np.sort(routing.experts), top)
        # This model does not normalize: what is multiplied with the outputs are the probabilities.
        np.testing.assert_array_equal(routing.weights, np.take_along_axis(routing.probs, routing.experts, -1))


def test_the_statistics_count_what_the_observer_saw(model: Model, prompt_tokens: list[int]) -> None:
    uses = []
    model.engine.set_observer(lambda routing: uses.append(len(np.unique(routing.experts))))
    model.reset_stats()
    with Context(model.llama.model, n_threads=1) as ctx:
        for token in prompt_tokens[:10]:
            ctx.decode([token])
    stats = model.stats().experts
    assert stats.hits + stats.misses == sum(uses) == 10 * N_LAYER * N_USED
    assert stats.tokens == 10 * N_LAYER == stats.layer_passes


def test_prefetched_experts_become_resident_and_count_as_hits(model: Model, prompt_tokens: list[int]) -> None:
    chosen = set()
    model.engine.set_observer(lambda routing: routing.il == 2 and chosen.update(routing.experts.ravel().tolist()))
    with Context(model.llama.model, n_threads=1) as ctx:
        ctx.decode(prompt_tokens[:1])
    for layer in model.layers.values():
        layer.evict(range(N_EXPERT))
    assert not model.residency[2].any()
    model.reset_stats()
    model.layers[2].prefetch(sorted(chosen))
    model.engine.wait_idle()
    assert set(np.flatnonzero(model.residency[2])) == chosen
    with Context(model.llama.model, n_threads=1) as ctx:
        ctx.decode(prompt_tokens[:1])
    layer = model.layers[2].stats()
    assert (layer.hits, layer.misses, layer.prefetch_hits) == (N_USED, 0, N_USED)


def test_pinned_experts_stay_until_they_are_unpinned(model: Model, prompt_tokens: list[int]) -> None:
    pinned = frozenset({1, 5, 33})
    model.layers[4].settings = LayerSettings(pinned=pinned)
    model.engine.wait_idle()
    with Context(model.llama.model, n_ctx=512, n_threads=1) as ctx:
        for _ in range(5):
            ctx.decode(prompt_tokens)
            assert model.residency[4][list(pinned)].all()
    model.layers[4].evict(pinned)
    assert model.residency[4][list(pinned)].all()
    model.layers[4].settings = LayerSettings()
    model.layers[4].evict(pinned)
    assert not model.residency[4][list(pinned)].any()


def test_pinning_more_than_the_budget_allows_is_refused(model: Model) -> None:
    with pytest.raises(BudgetError):
        for layer in model.layers.values():
            layer.settings = LayerSettings(pinned=frozenset(range(N_EXPERT)))
    assert "".join(model.generate("import", max_tokens=4))


def test_a_layer_keeps_its_minimum_and_its_maximum(model: Model, prompt_tokens: list[int]) -> None:
    model.layers[0].settings = LayerSettings(min_experts=30)
    model.layers[7].settings = LayerSettings(max_experts=8)
    with Context(model.llama.model, n_ctx=1024, n_threads=1) as ctx:
        for _ in range(5):
            ctx.decode(prompt_tokens)
        for token in prompt_tokens[:20]:
            ctx.decode([token])
    assert model.residency[0].sum() >= 30
    assert model.residency[7].sum() <= 8


@pytest.mark.parametrize("wrong", [
    LayerSettings(min_experts=9, max_experts=8),
    LayerSettings(max_experts=N_EXPERT + 1), LayerSettings(pinned=frozenset({N_EXPERT})),
])
def test_layer_settings_out_of_range_are_refused_and_change_nothing(model: Model, wrong: LayerSettings) -> None:
    with pytest.raises(PyorchError):
        model.layers[3].settings = wrong
    assert model.layers[3].settings == LayerSettings()


def test_what_is_no_layer_settings_is_refused(model: Model) -> None:
    with pytest.raises(TypeError, match="pyorch.LayerSettings"):
        model.layers[3].settings = "lru"


def test_more_budget_means_fewer_misses(small_moe: Path, prompt_tokens: list[int]) -> None:
    misses = []
    for budget in ("15%", "30%", "60%", "100%"):
        with small_model(small_moe, budget, prefetch="none") as model, Context(model.llama.model, n_threads=1) as ctx:
            for token in prompt_tokens[:32]:
                ctx.decode([token])
            misses.append(model.stats().experts.misses)
    assert misses == sorted(misses, reverse=True) and misses[0] > 2 * misses[-1]
