"""The first promise: at every budget, in every batch shape, the logits are those of the resident model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, small_model

from pyorch.errors import BudgetError
from pyorch.llama.context import Context
from pyorch.llama.layer import LayerSettings
from pyorch.llama.model import Model
from pyorch.settings.budget import RESIDENT

BUDGETS = ["312KiB", "1MiB", "20%", "50%", "100%", "auto"]  # from the floor to all

UBATCH = 16


def context(model: Model, **shape: int) -> Context:
    return Context(
        model.llama.model, **{"n_ctx": 256, "n_batch": 128, "n_ubatch": UBATCH, "n_seq_max": 2, "n_threads": 2, **shape}
    )


def one_token_at_a_time(ctx: Context, tokens: list[int]) -> list[np.ndarray]:
    return [ctx.decode([token]) for token in tokens[:12]]


def seven_tokens(ctx: Context, tokens: list[int]) -> list[np.ndarray]:
    return [ctx.decode(tokens[:7])]


def a_prompt_longer_than_a_ubatch(ctx: Context, tokens: list[int]) -> list[np.ndarray]:
    assert len(tokens) > 2 * UBATCH
    return [ctx.decode(tokens), ctx.decode(tokens[:1])]


def two_interleaved_sequences(ctx: Context, tokens: list[int]) -> list[np.ndarray]:
    pairs = [ctx.decode(tokens[:30], [0, 1] * 15)]
    return pairs + [ctx.decode([tokens[i], tokens[-i]], [0, 1]) for i in range(1, 6)]


Shape = Callable[[Context, list[int]], list[np.ndarray]]
SHAPES: list[Shape] = [one_token_at_a_time, seven_tokens, a_prompt_longer_than_a_ubatch, two_interleaved_sequences]


def logits(model: Model, shape: Shape, tokens: list[int]) -> np.ndarray:
    return once(model, shape, tuple(tokens)) if model.engine is None else computed(model, shape, tokens)


def computed(model: Model, shape: Shape, tokens: list[int]) -> np.ndarray:
    with context(model) as ctx:
        return np.concatenate(shape(ctx, tokens))


@lru_cache
def once(model: Model, shape: Shape, tokens: tuple[int, ...]) -> np.ndarray:
    """Where nothing is managed, the answer is the same each time."""
    return computed(model, shape, list(tokens))


@pytest.mark.parametrize("budget", BUDGETS)
def test_logits_are_bit_identical_at_any_budget(
    small_moe: Path, resident: Model, prompt_tokens: list[int], budget: str
) -> None:
    with small_model(small_moe, budget) as model:
        for shape in SHAPES:
            assert_same_bits(logits(model, shape, prompt_tokens), logits(resident, shape, prompt_tokens))
        experts = model.stats().experts
        assert experts.loads > 0
        is_scarce = experts.budget_bytes < model.map.info.slots_bytes
        assert (experts.evictions > 0) == is_scarce, "the budget had no effect"


# Any two of their values meet.
@pytest.mark.parametrize(("policy", "direct_io", "reads"), [
    ("lru", True, "io_uring:4:64KiB"), ("lru", False, "threads:4"), ("lfu", True, "threads:4"),
    ("lfu", False, "io_uring:4:64KiB"),
])
def test_no_setting_changes_the_logits(
    small_moe: Path, resident: Model, prompt_tokens: list[int], policy: str, direct_io: bool, reads: str
) -> None:
    with small_model(small_moe, "15%", policy=policy, direct_io=direct_io, reads=reads) as model:
        for shape in SHAPES:
            assert_same_bits(logits(model, shape, prompt_tokens), logits(resident, shape, prompt_tokens))


def test_logits_of_quantized_experts_are_bit_identical(small_moe_q4: Path, prompt_tokens: list[int]) -> None:
    with small_model(small_moe_q4, RESIDENT) as reference, small_model(small_moe_q4, "15%") as model:
        for shape in SHAPES:
            assert_same_bits(logits(model, shape, prompt_tokens), logits(reference, shape, prompt_tokens))


def test_contexts_in_parallel_threads_do_not_disturb_each_other(
    small_moe: Path, resident: Model, prompt_tokens: list[int]
) -> None:
    expected = logits(resident, a_prompt_longer_than_a_ubatch, prompt_tokens)
    with small_model(small_moe, "40%") as model, ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(logits, model, a_prompt_longer_than_a_ubatch, prompt_tokens) for _ in range(6)]
        for run in runs:
            assert_same_bits(run.result(), expected)


def test_two_models_at_once_have_a_budget_each(small_moe: Path, resident: Model, prompt_tokens: list[int]) -> None:
    with small_model(small_moe, "15%") as small, small_model(small_moe, "60%") as large:
        for model in (small, large, small):
            assert_same_bits(
                logits(model, seven_tokens, prompt_tokens), logits(resident, seven_tokens, prompt_tokens)
            )
        assert small.stats().experts.peak_bytes < large.stats().experts.budget_bytes


def test_loading_and_unloading_again_and_again_changes_nothing(
    small_moe: Path, resident: Model, prompt_tokens: list[int]
) -> None:
    expected = logits(resident, seven_tokens, prompt_tokens)
    for _ in range(5):
        with small_model(small_moe, "20%") as model:
            assert_same_bits(logits(model, seven_tokens, prompt_tokens), expected)


def test_a_budget_that_changes_while_running_does_not_change_the_logits(
    small_moe: Path, resident: Model, prompt_tokens: list[int]
) -> None:
    expected = logits(resident, one_token_at_a_time, prompt_tokens)
    slots = resident.map.info.slots_bytes
    with small_model(small_moe, "80%") as model, context(model) as ctx:
        rows = []
        for i, token in enumerate(prompt_tokens[:12]):
            model.engine.set_budget(slots // (2 + i % 5))
            assert model.stats().experts.used_bytes <= slots // (2 + i % 5)
            rows.append(ctx.decode([token]))
    assert_same_bits(np.concatenate(rows), expected)


def test_meddling_while_running_does_not_change_the_logits(
    small_moe: Path, resident: Model, prompt_tokens: list[int]
) -> None:
    expected = {shape: logits(resident, shape, prompt_tokens) for shape in SHAPES}
    info, done = resident.map.info, threading.Event()
    counts: dict[str, int] = {}

    def meddle(model: Model) -> None:
        choose = random.Random(1)
        while not done.is_set():
            layer = choose.choice(list(model.layers.values()))
            experts = choose.sample(range(layer.n_expert), 5)
            act, arguments = choose.choice(
                [
                    (layer.prefetch, (experts,)),
                    (layer.evict, (range(layer.n_expert),)),
                    (model.engine.set_budget, (choose.randrange(info.floor_bytes, info.slots_bytes),)),
                    (model.engine.set_policy, (choose.choice(["lru", "lfu"]),)),
                    (
                        setattr,
                        (layer, "settings", LayerSettings(choose.randrange(4), 4 + choose.randrange(60), {*experts})),
                    ),
                    (setattr, (layer, "settings", LayerSettings())),
                ]
            )
            try:
                act(*arguments)
                counts[act.__name__] = counts.get(act.__name__, 0) + 1
            except BudgetError:  # more pinned than the budget of the moment allows
                pass

    with small_model(small_moe, "40%") as model, ThreadPoolExecutor(2) as threads:
        meddler = threading.Thread(target=meddle, args=(model,))
        meddler.start()
        try:
            while len(counts) < 5 or min(counts.values()) <= 10:
                assert meddler.is_alive()
                runs = [(shape, threads.submit(logits, model, shape, prompt_tokens)) for shape in SHAPES]
                for shape, run in runs:
                    assert_same_bits(run.result(), expected[shape])
        finally:
            done.set()
            meddler.join()
