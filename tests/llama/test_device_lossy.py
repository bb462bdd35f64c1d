"""Lossy settings with experts on a device: the same slots are lost, and the rest is computed where it lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from buddy_lists import buddies_with_far_ones_first, random_buddies
from devices import CountingWire, DeviceProcess
from ghost_layers import N_EXPERT, random_ghosts
from models import assert_same_bits, small_model

from pyorch.llama.apply import apply_substitution
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.settings.substitution import Substitution

ANY_TOKENS = np.random.default_rng(0).integers(300, 2000, 220).tolist()  # so many that every expert has one to compute


def decoded(model: Model, tokens: list[int], settings: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Logits of a prompt and of single tokens, and what was done to the slots of experts with odd numbers, which
    count as absent wherever they are."""
    for il in model.layers:
        random_ghosts(1).apply(model.engine, il)
        apply_substitution(model.engine, il, Substitution.parse(settings), random_buddies(1))
        model.engine.set_cache(il, np.arange(N_EXPERT) % 2 == 0)
    model.reset_stats()
    with Context(model.llama.model, n_ctx=256, n_batch=256, n_threads=1) as context:
        logits = [context.decode(ANY_TOKENS)] + [context.decode([token]) for token in tokens[:24]]
    counts = model.engine.substitution_stats()
    return np.concatenate(logits), (counts.substituted, counts.dropped, counts.ghosts)


@pytest.mark.parametrize(("settings", "lost"), [
    ("mode=none,miss=ghost,order=weight,sacred=5,prefill=1", (False, True, True)),
    ("mode=random,sacred=2,prefill=1", (True, False, False)),
    ("mode=buddies,coverage=1,max_replaced=4,prefill=1", (True, False, False)),
    ("mode=buddies,coverage=0.9,max_replaced=2,miss=drop,sacred=1", (True, True, False)),
    ("mode=none,miss=drop,order=weight,sacred=1", (False, True, False)),
])
def test_logits_are_those_without_a_device(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], settings: str, lost: tuple[bool, ...]
) -> None:
    """The processor's kernels are the device's here."""
    with small_model(small_moe, "100%", prefetch="none") as model:
        expected, counts = decoded(model, prompt_tokens, settings)
    assert tuple(count > 0 for count in counts) == lost
    for misses in ("processor", "upload"):
        with small_model(small_moe, "50%", prefetch="none", device=device.name, vram_budget="30%",
                         device_misses=misses) as model:
            logits, those = decoded(model, prompt_tokens, settings)
            assert_same_bits(logits, expected)
            assert those == counts
            assert model.stats().experts.device_hits > 0


@pytest.mark.parametrize("settings", [None, "heaviest", "mode=none,miss=ghost"])
def test_a_prompt_of_several_ubatches_of_which_the_last_token_is_wanted(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], settings: str | None
) -> None:
    """The last layer has no token to compute in all ubatches but the last."""
    options = {"n_ctx": 256, "n_batch": 128, "n_ubatch": 32, "n_threads": 1}
    made = []
    for where in ({}, {"device": device.name, "vram_budget": "30%"}):
        with small_model(small_moe, "100%", prefetch="none", **where) as model, \
                Context(model.llama.model, **options) as ctx:
            for il in model.layers:
                random_ghosts(1).apply(model.engine, il)
                apply_substitution(model.engine, il, settings and Substitution.parse(settings), None)
            made.append(ctx.decode((prompt_tokens * 3)[:80], outputs=[79]))
    assert_same_bits(made[1], made[0])


def test_a_graph_may_have_more_tokens_than_the_largest_ubatch(small_moe: Path, device: DeviceProcess) -> None:
    """Those that a context begins with: as many of each sequence."""
    expert, row = 24576, 6 * 128 * 4
    budget = 151 * expert + (8 + 8) * row + 22000  # what no expert has room in is enough for 7 rows more
    with small_model(small_moe, "100%", prefetch="none", device=device.name, vram_budget=budget, n_batch=8,
                     n_ubatch=8) as model, \
            Context(model.llama.model, n_ctx=264, n_batch=7, n_ubatch=7, n_seq_max=3, n_threads=1) as ctx:
        assert len(ctx.decode(ANY_TOKENS[:7], [0] * 7)) == 7


@pytest.mark.parametrize(("settings", "asked"), [
    ("heaviest", 2), ("mode=none,miss=drop,max_replaced=2", 2), ("mode=none,miss=drop,min_entropy=0.5", 3),
    ("mode=cache,sacred=2", 4), ("mode=none,miss=ghost,sacred=2", 3),
])
def test_lossy_settings_ask_a_device_for_what_they_go_by(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int], settings: str, asked: int
) -> None:
    """Of each layer: the choice of experts and their weights, and what else the settings name; what other settings
    need comes from the next token on."""
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    with small_model(small_moe, "50%", device=wire.name, vram_budget="60%", device_misses="upload",
                     prefetch="none") as model:
        decode = model.llama.eval
        for il in model.layers:
            random_ghosts(1).apply(model.engine, il)
            apply_substitution(model.engine, il, Substitution.parse(settings), None)
        for token in prompt_tokens[:40]:
            decode([token])
        model.engine.wait_idle()
        model.reset_stats()
        wire.reset()
        for token in prompt_tokens[:20]:
            decode([token])
        inputs = model.stats().experts.device_misses  # a row that the processor computes needs those
        least = 20 * (asked * len(model.layers) + 1)
        assert least <= wire.commands[wire.GET] <= least + inputs
        outputs = 20 * len(model.layers) * 6 * 128 * 4  # of the experts, which stay there
        assert wire.bytes[wire.GET] < outputs
        for il in model.layers:
            apply_substitution(model.engine, il, Substitution.parse("mode=cache,miss=ghost"), None)
            model.engine.set_cache(il, np.arange(N_EXPERT) % 2 == 0)
        decode(prompt_tokens[:2])
        decode(prompt_tokens[2:3])
        assert model.engine.substitution_stats().substituted > 0
    wire.stop()
    process.stop()


def test_a_buddy_in_host_memory_is_a_hop_from_a_device(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    """hop(j) of BuddyMoE's eq. 3: a setting makes a similar buddy on the device better than a more similar one here."""
    with small_model(small_moe, "50%", prefetch="none", device=device.name, vram_budget="30%") as model, \
            Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        context.decode(prompt_tokens[:40])
        ranks = []
        for by_hops in (0, 0.5):
            model.reset_stats()
            for token in prompt_tokens[40:50]:
                model.engine.wait_idle()
                far = {il: ~model.engine.residency(il).on_device for il in model.layers}
                for il in model.layers:
                    apply_substitution(model.engine, il, Substitution(kappa=by_hops), buddies_with_far_ones_first(far))
                context.decode([token])
            counts = model.engine.substitution_stats()
            ranks.append(counts.rank_sum / counts.substituted)
        assert ranks[0] < 25 and ranks[1] > 35, ranks
