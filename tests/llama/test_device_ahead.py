"""What forecasts upload to a device before its layer comes: computed there, and the same each time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from devices import DeviceProcess
from models import assert_same_bits, small_model

from pyorch.llama.context import Context
from pyorch.llama.model import Model

N_DECODED = 32


def decode(model: Model, tokens: list[int]) -> np.ndarray:
    """A prompt of a wide and a narrow ubatch, one token after another, and two sequences at once."""
    with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32, n_seq_max=2, n_threads=1) as context:
        made = [context.decode(tokens[:40])] + [context.decode([token]) for token in tokens[:N_DECODED]]
        made += [context.decode([tokens[i], tokens[-i]], [0, 1]) for i in range(1, 6)]
        model.engine.wait_idle()  # what is predicted from the last layer is ordered, too
        return np.concatenate(made)


@pytest.fixture(scope="module")
def expected(small_moe: Path, prompt_tokens: list[int]) -> np.ndarray:
    with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False) as model:
        return decode(model, prompt_tokens)


# Host memory has all experts, or lacks many of those that are forecast.
@pytest.mark.parametrize(("misses", "predictor", "budget"), [
    ("processor", "quasi-hidden:1:0", "100%"), ("upload", "quasi-hidden:2:0", "30%"),
    ("processor", "quasi-hidden:3:0", "30%"),
])
def test_the_device_computes_with_what_was_forecast_and_no_bit_changes(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray, misses: str, predictor: str,
    budget: str,
) -> None:
    with small_model(small_moe, budget, device=device.name, vram_budget="25%", prefetch=predictor, device_ahead=2,
                     device_misses=misses) as model:
        assert_same_bits(decode(model, prompt_tokens), expected)
        experts = model.stats().experts
        assert 0 < experts.device_ahead_hits < experts.device_ahead
        assert experts.device_ahead_late <= experts.device_ahead_hits <= experts.device_hits <= experts.device_computed
        assert experts.device_used_bytes <= experts.device_budget_bytes and experts.peak_bytes <= experts.budget_bytes
        assert experts.device_ahead == sum(layer.stats().device_ahead for layer in model.layers.values())
        # Guests go when their layer was computed: what is there, is there by demand.
        n_slots = experts.device_used_bytes // model.map.layers[0].expert_bytes
        assert experts.device_experts <= n_slots - 6
        # Who predicts as time allows says nothing of what is computed where.
        model.set_prefetch("auto")
        model.reset_stats()
        assert_same_bits(decode(model, prompt_tokens), expected)
        assert model.stats().experts.device_ahead == 0


def test_what_is_computed_where_follows_from_the_tokens_however_busy_the_machine_is(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    counts = []
    for busy in (False, True):
        ending = threading.Event()
        work = threading.Thread(target=lambda: [np.ones((200, 200)) @ np.ones((200, 200))
                                                for _ in iter(ending.is_set, True)])
        with small_model(small_moe, "30%", device=device.name, vram_budget="20%", prefetch="quasi-hidden:1",
                         device_ahead=2) as model:
            if busy:
                work.start()
            try:
                decode(model, prompt_tokens)
            finally:
                ending.set()
            experts = model.stats().experts
            counts.append((experts.device_hits, experts.device_misses, experts.device_computed,
                           experts.device_evictions, experts.device_ahead, experts.device_ahead_hits))
        if busy:
            work.join()
    assert counts[0] == counts[1] and counts[0][-1] > 0


def test_what_host_memory_has_does_not_say_what_the_device_computes(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    counts = []
    for read_ahead in (False, True):
        # Host memory has room for a token's experts, not for those of sixteen.
        with small_model(small_moe, "600KiB", device=device.name, vram_budget="25%", prefetch="none",
                         device_misses="upload") as model:
            with Context(model.llama.model, n_ctx=256, n_batch=16, n_ubatch=16, n_threads=1) as context:
                for begin in range(0, 96, 16):
                    if read_ahead:
                        model.engine.prefetch(model.map.layers[begin // 16].il, range(8))
                        model.engine.wait_idle()
                    context.decode(prompt_tokens[begin:begin + 16])
                    context.decode(prompt_tokens[begin:begin + 1])
            model.engine.wait_idle()
            experts = model.stats().experts
            counts.append((experts.device_hits, experts.device_computed, experts.device_evictions))
    assert counts[0] == counts[1] and counts[0][0] > 0
