"""What goes wrong while experts are brought to a device: it fails what needs them, and nothing else."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from devices import DeviceProcess
from faulty_source import FaultySource
from models import assert_same_bits, small_model
from processes import pyorch as pyorch_command

from pyorch import LayerSettings
from pyorch.errors import ExpertReadError, PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sizes import MiB

N_PROMPT = 40  # as wide as areas want it, and a rest


def context(model: Model, n_ctx: int = 256) -> Context:
    return Context(model.llama.model, n_ctx=n_ctx, n_batch=128, n_ubatch=32, n_threads=1)


def decode(ctx: Context, tokens: list[int]) -> np.ndarray:
    ctx.clear()
    return np.concatenate([ctx.decode(tokens[:N_PROMPT]), *(ctx.decode([token]) for token in tokens[:8])])


@pytest.fixture(scope="module")
def expected(small_moe: Path, prompt_tokens: list[int]) -> np.ndarray:
    with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False) as model, context(model) as ctx:
        return decode(ctx, prompt_tokens)


@pytest.mark.parametrize(("vram_budget", "misses"), [("80%", "processor"), ("15%", "upload")])
def test_an_expert_that_cannot_be_read_fails_one_decode_on_a_device_and_spares_those_of_all_contexts(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray, vram_budget: str,
    misses: str,
) -> None:
    """On its way to an area, and to a slot that it passes through or stays in."""
    source = FaultySource(small_moe)
    with small_model(small_moe, "30%", source=source, prefetch="none", device=device.name, vram_budget=vram_budget,
                     device_misses=misses) as model, context(model) as one, context(model) as other:
        for tokens in (prompt_tokens[:N_PROMPT], prompt_tokens[:1]):  # a prompt, and a single token
            source.fault = "EIO"
            one.clear()
            with pytest.raises(ExpertReadError, match="cannot read expert"):
                for _ in range(9):
                    one.decode(tokens)
                    tokens = [(token * 7 + 11) % 2000 for token in tokens]  # others' experts
            model.engine.wait_idle()  # what was ordered before the fault ends may still fail
            source.fault = ""
            for entry in (other, one):
                assert_same_bits(decode(entry, prompt_tokens), expected)
        experts = model.stats().experts
        assert experts.device_computed > 0
        assert misses != "upload" or experts.device_computed >= experts.device_hits
        assert experts.device_used_bytes <= experts.device_budget_bytes and experts.peak_bytes <= experts.budget_bytes
        model.reset_stats()
        other.clear()
        other.decode(prompt_tokens[:32])  # the areas are nobody's, so that the device computes a prompt
        experts = model.stats().experts
        assert vram_budget != "80%" or experts.device_computed == experts.device_hits + experts.device_misses > 0


def test_experts_that_cannot_be_read_before_the_first_token_come_when_they_are_wanted(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    source = FaultySource(small_moe)
    source.fault = "EIO"
    with small_model(small_moe, "30%", source=source, prefetch="none", device=device.name, vram_budget="100%") as model:
        with context(model) as ctx:
            with pytest.raises(ExpertReadError, match="cannot read expert"):
                ctx.decode(prompt_tokens[:N_PROMPT])
            model.engine.wait_idle()
            source.fault = ""
            assert_same_bits(decode(ctx, prompt_tokens), expected)
        assert model.stats().experts.device_misses > 0


def test_a_context_for_which_the_device_has_no_memory_is_refused_and_spares_the_first(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    small = DeviceProcess(tmp_path / "log", memory=24 * MiB)
    try:
        with small_model(small_moe, "50%", prefetch="none", device=small.name, vram_budget="30%",
                         device_misses="upload", n_ubatch=32) as model, context(model) as ctx:
            assert_same_bits(decode(ctx, prompt_tokens), expected)
            with pytest.raises(PyorchError, match="refuses this context: failed to allocate RPC0"):
                context(model, n_ctx=16384)
            assert_same_bits(decode(ctx, prompt_tokens), expected)
            with context(model) as another:
                assert_same_bits(decode(another, prompt_tokens), expected)
    finally:
        small.stop()


def test_limits_and_policies_may_change_while_layers_are_computed(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    rng, policies = np.random.default_rng(0), ("lru", "lfu", "learned", "finemoe")
    for vram_budget, misses in (("15%", "upload"), ("80%", "processor")):
        with small_model(small_moe, "30%", prefetch="none", device=device.name, vram_budget=vram_budget,
                         device_misses=misses) as model, context(model) as ctx, ThreadPoolExecutor(1) as thread:
            decode(ctx, prompt_tokens)  # the device's memory is taken
            run = thread.submit(decode, ctx, prompt_tokens)
            while not wait([run], timeout=0.002).done:
                least = int(rng.integers(0, 2))
                model.layers[int(rng.integers(8))].settings = LayerSettings(
                    min_on_device=least, max_on_device=int(rng.integers(least, 64)))
                model.engine.set_policy(str(rng.choice(policies)))
            assert_same_bits(run.result(), expected)
            experts = model.stats().experts
            assert experts.device_loads > 0 and experts.device_evictions > 0


@pytest.mark.parametrize(("vram_budget", "why"), [
    ("1KiB", "the budget in RPC0's memory has no room for an expert"),
    ("0.6%", "the experts of block 0 stay off the device: there is room for [1-5] of them, and a token uses 6"),
])
def test_a_budget_without_room_for_the_experts_of_a_token_is_said_once_and_the_processor_computes(
    small_moe: Path, device: DeviceProcess, vram_budget: str, why: str
) -> None:
    done = pyorch_command("run", small_moe, "-p", "import os", "-n", 4, "--ctx", 256, "--budget", "50%", "--device",
                          device.name, "--vram-budget", vram_budget, "--json")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(why, done.stderr)) == done.stderr.count("note:") == 1, done.stderr
    experts = json.loads(done.stdout)["stats"]["experts"]
    assert experts["device_computed"] == 0 < experts["hits"] + experts["misses"]
    assert (experts["device_used_bytes"] == 0) == (vram_budget == "1KiB")
