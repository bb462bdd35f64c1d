"""Experts in the memory of a device: what is computed there are the bits of the model that is wholly there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import batches
from architectures import Zoo, types_of
from devices import DeviceProcess
from models import assert_same_bits, small_model

import pyorch
from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.settings.budget import RESIDENT


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    process = DeviceProcess(tmp_path_factory.mktemp("device") / "log")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def on_device(small_moe: Path, device: DeviceProcess) -> Iterator[Model]:
    """The whole model on the device, as llama.cpp loads it."""
    with small_model(small_moe, RESIDENT, device=device.name) as model:
        yield model


def context(model: Model) -> Context:
    return Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32, n_seq_max=2, n_threads=1)


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    """Of a prompt of a wide ubatch and a narrower one, one token after another, a few at once, two sequences at once."""
    with context(model) as it:
        made = [it.decode(tokens[:50])] + [it.decode([token]) for token in tokens[:12]] + [it.decode(tokens[:5])]
        made += [it.decode([tokens[i], tokens[-i]], [0, 1]) for i in range(1, 4)]
        return np.concatenate(made)


@pytest.fixture(scope="module")
def expected(on_device: Model, prompt_tokens: list[int]) -> np.ndarray:
    return logits(on_device, prompt_tokens)


@pytest.mark.parametrize(("vram_budget", "misses"), [
    ("5%", "upload"), ("30%", "upload"), ("100%", "upload"), ("5%", "processor"), ("40%", "processor"),
])
def test_logits_are_those_of_the_model_that_is_wholly_on_the_device(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray, vram_budget: str,
    misses: str,
) -> None:
    """The processor's kernels are the device's here, so that it does not matter who computes what."""
    with small_model(small_moe, "50%", device=device.name, vram_budget=vram_budget, device_misses=misses) as model:
        assert_same_bits(logits(model, prompt_tokens), expected)
        experts = model.stats().experts
        assert experts.device_hits > 0 and experts.device_misses > 0
        assert experts.device_used_bytes <= experts.device_budget_bytes
        scarce = experts.device_budget_bytes < model.map.info.expert_bytes
        assert (experts.device_evictions > 0) == scarce


# Memory of the device: for two areas, for one, for none. The host's: all, half, and the least that works.
@pytest.mark.parametrize(("vram_budget", "budget"), [("80%", "100%"), ("80%", "312KiB"), ("40%", "50%"), ("20%", "312KiB")])
def test_a_prompt_passes_through_the_device_whatever_fits_where(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray, vram_budget: str, budget: str
) -> None:
    with small_model(small_moe, budget, device=device.name, vram_budget=vram_budget) as model:
        assert_same_bits(logits(model, prompt_tokens), expected)
        experts = model.stats().experts
        in_slots = experts.device_loads * model.map.layers[0].expert_bytes
        through_areas = experts.device_bytes - in_slots
        assert (through_areas > model.map.info.expert_bytes / 4) == (vram_budget != "20%")
        assert experts.device_used_bytes <= experts.device_budget_bytes and experts.peak_bytes <= experts.budget_bytes


def test_two_contexts_share_a_device(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget="60%") as model, ThreadPoolExecutor(2) as threads:
        for run in [threads.submit(logits, model, prompt_tokens) for _ in range(4)]:
            assert_same_bits(run.result(), expected)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-next-fused", "deepseek-v3", "llama4", "granite-moe-hybrid"])
def test_every_layout_of_experts_is_computed_on_the_device(zoo: Zoo, device: DeviceProcess, name: str) -> None:
    """Apart, with biases, in one matrix, beside a shared one, weighted before."""
    def digests(budget: str, **options: object) -> tuple[dict[str, str], pyorch.Model]:
        path = zoo.path(name, "Q8_0" if "Q8_0" in types_of(name) else types_of(name)[0])
        arguments = {"n_ctx": 64, "n_batch": 64, "n_ubatch": batches.N_UBATCH, "device": device.name}
        with pyorch.load(path, budget=budget, **arguments | options) as model:
            with Context(model.llama.model, n_threads=1, **batches.CONTEXT) as it:
                made = batches.digests(it.decode, it.clear)
            return made, model.engine and model.engine.stats()

    expected, _ = digests("resident")
    for vram_budget, misses in (("30%", "processor"), ("60%", "upload")):
        made, experts = digests("50%", vram_budget=vram_budget, device_misses=misses)
        assert made == expected
        assert experts.device_hits > 0


def test_what_is_on_the_device_costs_no_transfer(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget="100%", device_misses="upload") as model:
        logits(model, prompt_tokens)
        model.reset_stats()
        logits(model, prompt_tokens)
        experts = model.stats().experts
        assert experts.device_hits > 0 and experts.device_bytes == experts.device_loads == experts.device_misses == 0
        assert experts.hits == experts.misses == 0, "host memory was asked for what the device has"


def test_where_each_token_is_computed_follows_from_the_tokens(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    counts = []
    for _ in range(2):
        with small_model(small_moe, "30%", device=device.name, vram_budget="20%") as model:
            logits(model, prompt_tokens)
            experts = model.stats().experts
            counts.append((experts.device_hits, experts.device_misses, experts.device_loads, experts.device_evictions))
    assert counts[0] == counts[1] and counts[0][3] > 0


def test_residency_tells_the_tiers_apart(small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget="20%") as model:
        logits(model, prompt_tokens)
        model.engine.wait_idle()
        tiers = np.concatenate([model.residency[il] for il in model.layers])
        assert set(tiers) == {0, 1, 2}
        assert (tiers == 2).sum() == sum(layer.stats().device_experts for layer in model.layers.values())
        flags = model.engine.snapshot().flags
        assert ((flags & 16) != 0).sum() == (tiers == 2).sum()


def test_quantized_experts_are_uploaded_as_the_file_has_them(
    small_moe_q4: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    with small_model(small_moe_q4, RESIDENT, device=device.name) as reference:
        expected = logits(reference, prompt_tokens)
    with small_model(small_moe_q4, "30%", device=device.name, vram_budget="30%", device_misses="upload") as model:
        assert_same_bits(logits(model, prompt_tokens), expected)
        assert model.stats().experts.device_hits > 0


def test_a_device_that_is_not_there_is_named(small_moe: Path) -> None:
    with pytest.raises(PyorchError, match="no device CUDA7"):
        small_model(small_moe, "50%", device="CUDA7")
    with pytest.raises(PyorchError, match="no device can be reached at 127.0.0.1:1"):
        small_model(small_moe, "50%", device="rpc:127.0.0.1:1")
    with pytest.raises(PyorchError, match="name it with --device"):
        small_model(small_moe, "50%", vram_budget="50%")
