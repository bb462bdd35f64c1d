"""Ghosts in an engine: what they give, where their outputs go, and what is counted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import parts
import pytest
from ghost_layers import N_EMBD, N_EXPERT, outputs_of, random_ghosts

import pyorch
from pyorch.errors import PyorchError
from pyorch.llama import logs
from pyorch.llama.apply import apply_substitution
from pyorch.llama.context import Context
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.ghosts import Ghosts, LayerGhosts

TEXT = "def read(path):\n    with open(path) as file:\n        return file.readlines()\n"
N_PROMPT = 8


@pytest.fixture(scope="module")
def model(small_moe: Path):
    with pyorch.load(small_moe, budget="100%", n_ctx=512, n_threads=2) as model:
        yield model


def decode(model, n_prompt: int = N_PROMPT, n_threads: int = 1) -> np.ndarray:
    """Logits of a prompt, then of one token after the other."""
    tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)
    with Context(model.llama.model, n_ctx=256, n_threads=n_threads) as context:
        logits = [context.decode(tokens[:n_prompt])] + [context.decode([token]) for token in tokens[n_prompt:]]
    return np.concatenate(logits)


def set_ghosts(model, ghosts: Ghosts, substitution: str | None, absent: np.ndarray | None) -> None:
    """absent: bool[n_expert] of every layer."""
    settings = None if substitution is None else Substitution.parse(substitution)
    for il in model.layers:
        ghosts.apply(model.engine, il)
        apply_substitution(model.engine, il, settings, None)
        model.engine.set_cache(il, None if absent is None else ~absent)
    model.reset_stats()


def same(factor: float) -> Ghosts:
    """Every expert gives the same for every input: factor in each value."""
    none = np.zeros((0, N_EMBD), np.float32)
    ones = np.ones(N_EXPERT, np.float32)
    layer = LayerGhosts(
        np.zeros(N_EXPERT, np.int32), np.full((N_EXPERT, N_EMBD), factor, np.float32), none, none, ones, ones
    )
    return Ghosts(dict.fromkeys(range(8), layer), 1, 0)


def test_graphs_have_a_node_for_ghosts_where_settings_use_them(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")  # a graph is printed when it is built
    absent = np.arange(N_EXPERT) % 2 == 0
    with logs.collect() as lines, Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        for settings in (None, "mode=none,miss=ghost", "mode=none,miss=drop"):
            set_ghosts(model, random_ghosts(1), settings, absent)
            lines.clear()
            context.decode([3])
            names = re.findall(r"CUSTOM\): +(pyorch_\w+)-\d+ \(", "".join(lines))
            by_ghosts = settings == "mode=none,miss=ghost"
            assert names.count("pyorch_release") == len(model.layers)
            assert names.count("pyorch_ghosts") == (len(model.layers) if by_ghosts else 0)
            assert (model.engine.substitution_stats().ghosts > 0) == by_ghosts
    set_ghosts(model, random_ghosts(1), None, None)


def test_ghosts_give_what_numpy_computes(model) -> None:
    ghosts = random_ghosts(1)
    rng = np.random.default_rng(0)
    for il, layer in ghosts.layers.items():
        ghosts.apply(model.engine, il)
        experts = rng.choice(np.flatnonzero(layer.rank >= 0), 30)
        inputs = rng.normal(size=(30, N_EMBD)).astype(np.float32)
        expected = np.concatenate([outputs_of(layer, e, x[None]) for e, x in zip(experts, inputs)])
        given = parts.apply_ghosts(model.engine, il, inputs, experts, N_EMBD)
        assert np.abs(given - expected).max() < 0.02 * np.abs(expected).max(), "numbers have 8 bits"


def test_what_a_ghost_gives_does_not_depend_on_what_is_computed_with_it(model) -> None:
    """So threads may share the slots in any way: the same bits."""
    random_ghosts(2).apply(model.engine, 3)
    rng = np.random.default_rng(0)
    experts = rng.choice(np.flatnonzero(random_ghosts(2).layers[3].rank >= 0)[:4], 100)  # more slots than one job has
    inputs = rng.normal(size=(100, N_EMBD)).astype(np.float32)
    together = parts.apply_ghosts(model.engine, 3, inputs, experts, N_EMBD)
    for i in range(100):
        assert (
            parts.apply_ghosts(model.engine, 3, inputs[i : i + 1], experts[i : i + 1], N_EMBD).tobytes()
            == together[i].tobytes()
        )


def test_an_expert_without_a_ghost_is_refused_by_name(model) -> None:
    ghosts = random_ghosts(1)
    ghosts.apply(model.engine, 0)
    without = int(np.flatnonzero(ghosts.layers[0].rank < 0)[0])
    for expert in (without, -1, N_EXPERT):
        with pytest.raises(PyorchError, match=f"expert {expert} of layer 0 has no ghost"):
            parts.apply_ghosts(model.engine, 0, np.zeros((1, N_EMBD)), [expert], N_EMBD)


@pytest.mark.parametrize("change, why", [
    ({"rank": np.full(N_EXPERT, N_EMBD + 1)}, "cannot have the rank 129"),
    ({"rank": np.full(N_EXPERT, -2)}, "cannot have the rank -2"),
    ({"rank": np.full(N_EXPERT, 1)}, "sum up to 64 cannot have"),
    ({"mean": np.full((N_EXPERT, N_EMBD), np.inf)}, "do not hold numbers only"),
    ({"mean": np.zeros((N_EXPERT, 32)), "up": np.zeros((0, 32)), "down": np.zeros((0, N_EMBD)),
      "rank": np.zeros(N_EXPERT)}, "make 128 values of 128, their ghosts 32 of 128"),
    ({"mean": np.zeros((3, N_EMBD)), "rank": np.zeros(3)}, "layer 0 has 64 experts, not 3"),
    ({"rank": np.zeros(3)}, "do not fit together"),
])
def test_ghosts_that_cannot_be_are_refused(model, change: dict, why: str) -> None:
    with pytest.raises(PyorchError, match=why):
        arrays = {name: getattr(random_ghosts(1).layers[0], name) for name in ("rank", "mean", "down", "up")}
        model.engine.set_ghosts(0, **{**arrays, **change})


@pytest.mark.parametrize("rest", ["", ",sacred=2", ",sacred=2,max_replaced=1"])
def test_ghosts_change_nothing_where_nothing_is_absent_or_they_are_off(model, rest: str) -> None:
    set_ghosts(model, random_ghosts(1), None, None)
    lossless = decode(model)
    set_ghosts(model, random_ghosts(1), f"mode=none,miss=ghost{rest}", np.zeros(N_EXPERT, bool))
    assert decode(model).tobytes() == lossless.tobytes()
    assert model.engine.substitution_stats().ghosts == 0
    set_ghosts(model, random_ghosts(1), "mode=none,miss=fetch", np.ones(N_EXPERT, bool))
    assert decode(model).tobytes() == lossless.tobytes()


def test_prompts_are_left_alone_unless_asked(model) -> None:
    everything = np.ones(N_EXPERT, bool)
    set_ghosts(model, random_ghosts(1), None, None)
    lossless = decode(model)
    set_ghosts(model, random_ghosts(1), "mode=none,miss=ghost", everything)
    assert decode(model)[:N_PROMPT].tobytes() == lossless[:N_PROMPT].tobytes()
    set_ghosts(model, random_ghosts(1), "mode=none,miss=ghost,prefill=1", everything)
    assert decode(model)[:N_PROMPT].tobytes() != lossless[:N_PROMPT].tobytes()


def test_ghosts_that_give_nothing_are_slots_of_weight_zero(model) -> None:
    """The rows of ghosts are written, whatever lay there: with other experts computing, and with none."""
    for absent in (np.arange(N_EXPERT) % 2 == 0, np.ones(N_EXPERT, bool)):
        set_ghosts(model, same(0.0), "mode=none,miss=ghost,prefill=1", absent)
        zero = decode(model)
        assert np.isfinite(zero).all()
        counts = model.engine.substitution_stats()
        assert counts.ghosts > 0 and counts.dropped == 0 and counts.changed == counts.ghosts
        set_ghosts(model, same(-0.0), "mode=none,miss=ghost,prefill=1", absent)
        assert np.abs(decode(model) - zero).max() < 1e-3
        set_ghosts(model, same(0.5), "mode=none,miss=ghost,prefill=1", absent)
        assert np.abs(decode(model) - zero).max() > 0.01


def test_a_prompt_at_once_gives_what_single_tokens_give_with_any_number_of_threads(model) -> None:
    """In a prompt some tokens wait for an expert, others have it estimated; alone, each has rows of its own."""
    absent = np.random.default_rng(3).random(N_EXPERT) < 0.7
    ghosts = random_ghosts(2)
    set_ghosts(model, ghosts, "mode=none,miss=ghost,sacred=2,prefill=1", absent)
    single = decode(model, n_prompt=1)
    counts = model.engine.substitution_stats()
    for n_prompt, n_threads in ((40, 1), (40, 2), (1, 2)):
        set_ghosts(model, ghosts, "mode=none,miss=ghost,sacred=2,prefill=1", absent)
        logits = decode(model, n_prompt, n_threads)
        assert model.engine.substitution_stats().ghosts == counts.ghosts
        assert np.abs(logits - single).max() < 0.02 * np.abs(single).max()


def test_mean_outputs_are_those_of_experts_and_not_of_ghosts(model) -> None:
    def means() -> list[np.ndarray]:
        with model.engine.calibrating():
            decode(model)
        return [vectors for il in model.layers for vectors in model.engine.mean_outputs(il, N_EMBD)]

    set_ghosts(model, random_ghosts(1), None, None)
    expected = means()
    set_ghosts(model, random_ghosts(1), "mode=none,miss=ghost,prefill=1", np.arange(N_EXPERT) % 2 == 0)
    assert all(np.array_equal(*pair) for pair in zip(means(), expected))


def test_a_real_cache_reads_what_ghosts_computed_behind_everything_else(small_moe: Path) -> None:
    with pyorch.load(small_moe, budget="30%", n_ctx=256, n_threads=1, prefetch="none") as model:
        set_ghosts(model, same(0.5), "mode=none,miss=ghost,prefill=1", None)
        with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
            for token in model.llama.tokenize(TEXT.encode(), add_bos=False)[:12]:
                context.decode([token])
                model.engine.wait_idle()
        counts, stats = model.engine.substitution_stats(), model.engine.stats()
        # The reader of an estimated expert may evict an expert between the mask that a layer reads and its hold.
        assert counts.ghosts > 0 and stats.misses < counts.ghosts / 10, "layers do not wait for experts"
        assert stats.loads > N_EXPERT and stats.resident_experts > N_EXPERT


def test_what_is_left_out_gives_nothing_whatever_lay_in_its_rows(model) -> None:
    """A weight of 0 makes nothing of a number, but not of an infinite one."""
    tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)[:6]
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        set_ghosts(model, same(3e38), "mode=none,miss=ghost", np.ones(N_EXPERT, bool))
        spoiled = [context.decode([token]) for token in tokens]
        context.clear()
        set_ghosts(model, same(0.0), "mode=none,miss=drop", np.ones(N_EXPERT, bool))
        assert not np.isfinite(spoiled).all()
        assert all(np.isfinite(context.decode([token])).all() for token in tokens)


def test_what_ghosts_compute_counts_towards_a_limit_over_all_layers(model) -> None:
    limited = "mode=none,miss=ghost,max_replaced_per_token=8,max_replaced=3,prefill=1"
    set_ghosts(model, same(0.5), limited, np.ones(N_EXPERT, bool))
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        for token in model.llama.tokenize(TEXT.encode(), add_bos=False)[:3]:
            model.reset_stats()
            context.decode([token])
            assert [model.engine.substitution_stats(il).ghosts for il in range(4)] == [3, 3, 2, 0]
