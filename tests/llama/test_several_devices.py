"""Several devices divide a model's layers, and what they compute are the bits of the model on the processor, whose
kernels are theirs here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import batches
import numpy as np
import pytest
from architectures import Zoo
from devices import DeviceProcess
from models import assert_same_bits, small_model

import pyorch
from pyorch.errors import DeviceError, PyorchError
from pyorch.llama import survey
from pyorch.llama.context import Context
from pyorch.llama.managed import find
from pyorch.llama.model import Model
from pyorch.runtime import fatal
from pyorch.runtime.devices import Device, find_device
from pyorch.sizes import GiB, MiB


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeviceProcess, DeviceProcess]]:
    processes = tuple(DeviceProcess(tmp_path_factory.mktemp("device") / "log") for _ in range(2))
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture(autouse=True)
def equal_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else layers would be divided by what this machine has free at two moments."""
    monkeypatch.setattr(Device, "free_bytes", lambda _: 4 * GiB)


def names(pair: tuple[DeviceProcess, DeviceProcess]) -> str:
    return ",".join(process.name for process in pair)


def context(model: Model) -> Context:
    return Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32, n_threads=1)


def decode(ctx: Context, tokens: list[int]) -> np.ndarray:
    ctx.clear()
    return np.concatenate([ctx.decode(tokens[:70]), *(ctx.decode([token]) for token in tokens[:12]),
                           ctx.decode(tokens[:5])])


@pytest.fixture(scope="module")
def expected(small_moe: Path, prompt_tokens: list[int]) -> np.ndarray:
    with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False) as model, context(model) as ctx:
        return decode(ctx, prompt_tokens)


# Each device with room for two areas, for one, for none; with whole layers, and with all of them.
@pytest.mark.parametrize(("vram_budget", "budget", "options"), [
    ("5%", "50%", {"device_misses": "upload"}),
    ("40%", "30%", {"device_misses": "upload"}),
    ("30%", "100%", {"device_misses": "upload", "prefetch": "quasi-hidden:1", "device_ahead": 2}),
    ("40%", "312KiB", {}),
    ("80%", "50%", {}),
    ("100%", "30%", {}),
])
def test_logits_are_the_same_in_contexts_side_by_side(
    small_moe: Path, pair: tuple[DeviceProcess, DeviceProcess], prompt_tokens: list[int], expected: np.ndarray,
    vram_budget: str, budget: str, options: dict[str, object],
) -> None:
    with small_model(small_moe, budget, device=names(pair), vram_budget=vram_budget, **options) as model:
        with context(model) as one, context(model) as other, ThreadPoolExecutor(2) as threads:
            for made in threads.map(decode, (one, other), (prompt_tokens, prompt_tokens)):
                assert_same_bits(made, expected)
        experts = model.stats().experts
        assert experts.device_used_bytes <= experts.device_budget_bytes and experts.peak_bytes <= experts.budget_bytes
        found = find(model.llama.model).devices
        assert len(found.each) == 2 and found.ends == (4, 8) and model.device == f"{found.each[0].name}, " + (
            found.each[1].name)
        for blocks in find(model.llama.model).plan.placement.blocks():
            assert sum(int((model.residency[il] == 2).sum()) for il in blocks) > 0, "each has some"


# The first device has all of its experts, and its first layer asks all the same; the second has areas. And the other
# way round.
@pytest.mark.parametrize("rooms", [(6, 9), (7, 9)])
def test_a_prompt_keeps_the_areas_where_a_device_before_or_behind_has_none(
    small_moe: Path, pair: tuple[DeviceProcess, DeviceProcess], prompt_tokens: list[int], rooms: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = (prompt_tokens * 8)[:500]

    def decode(ctx: Context) -> np.ndarray:
        ctx.clear()
        return np.concatenate([ctx.decode(tokens[:450]), ctx.decode(tokens[450:])])

    options = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 64, "n_threads": 1, "prefetch": "none"}
    with pyorch.load(small_moe, budget="100%", use_extra_bufts=False, **options) as model:
        with Context(model.llama.model, n_ctx=512, n_batch=512, n_ubatch=64, n_threads=1) as ctx:
            expected = decode(ctx)
    free = dict(zip((find_device(process.name) for process in pair), rooms))
    monkeypatch.setattr(Device, "total_bytes", lambda _: 300 * MiB)
    monkeypatch.setattr(Device, "free_bytes", lambda self: int((256 + free[self]) * MiB))
    options |= {"device": names(pair), "managed": True}
    with pyorch.load(small_moe, budget="100%", **options) as model, ExitStack() as use:
        contexts = [use.enter_context(Context(model.llama.model, n_ctx=512, n_batch=512, n_ubatch=64, n_threads=1))
                    for _ in range(2)]
        threads = use.enter_context(ThreadPoolExecutor(2))
        for _ in range(4):
            for made in threads.map(decode, contexts):
                assert_same_bits(made, expected)
        there = [int((model.residency[il] == 2).sum()) for il in range(8)]
        assert 64 in there and min(there) < 64, there


def test_one_that_shares_the_processors_memory_gets_no_experts_and_the_other_does(
    small_moe: Path, pair: tuple[DeviceProcess, DeviceProcess], prompt_tokens: list[int], expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (find_device(process.name) for process in pair)
    monkeypatch.setattr(survey, "find_devices", lambda _: [replace(one, shares_memory=True), other])
    with small_model(small_moe, "50%", device="any", managed=True) as model, context(model) as ctx:
        assert_same_bits(decode(ctx, prompt_tokens), expected)
        there = [int((model.residency[il] == 2).sum()) for il in range(8)]
        assert there == [0] * 4 + [64] * 4


def test_one_device_is_not_named_twice(small_moe: Path, pair: tuple[DeviceProcess, DeviceProcess]) -> None:
    """It would wait for itself."""
    name = pair[0].name
    with pytest.raises(PyorchError, match="twice, by another name"):
        small_model(small_moe, "50%", device=f"{name},{name.replace('127.0.0.1', 'localhost')}")


def test_where_all_fits_llama_cpp_keeps_the_model_on_both(
    small_moe: Path, pair: tuple[DeviceProcess, DeviceProcess], prompt_tokens: list[int], expected: np.ndarray
) -> None:
    with small_model(small_moe, "50%", device=names(pair)) as model, context(model) as ctx:
        assert model.engine is None and len(model.device.split(", ")) == 2
        assert_same_bits(decode(ctx, prompt_tokens), expected)


def test_layers_are_divided_as_memory_allows(
    small_moe: Path, pair: tuple[DeviceProcess, DeviceProcess], prompt_tokens: list[int], expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said to be so much: what they have is the processor's. A budget is the same share of each one's experts."""
    first = find_device(pair[0].name)
    monkeypatch.setattr(Device, "total_bytes", lambda _: 4 * GiB)
    monkeypatch.setattr(Device, "free_bytes", lambda self: (5 * GiB // 4 if self == first else 13 * GiB // 4))
    with small_model(small_moe, "50%", device=names(pair), vram_budget="40%") as model, context(model) as ctx:
        plan = find(model.llama.model).plan
        assert plan.placement.ends == (2, 8) and plan.division.devices[1] == 3 * plan.division.devices[0]
        assert_same_bits(decode(ctx, prompt_tokens), expected)
        assert 0 < sum(int((model.residency[il] == 2).sum()) for il in range(2)) < 64
    # What one of them lacks beside its part of the context is not taken from the other.
    said = []
    monkeypatch.setattr(fatal, "notice", said.append)
    monkeypatch.setattr(Device, "free_bytes", lambda self: (3 * MiB if self == first else 4 * GiB))
    with small_model(small_moe, "50%", device=names(pair), vram_budget="40%") as model, context(model) as ctx:
        assert_same_bits(decode(ctx, prompt_tokens), expected)
        assert len(find(model.llama.model).devices.each) == 1 and said == [], "it would have no layer"


def test_one_that_is_lost_fails_the_decode(small_moe: Path, tmp_path: Path, prompt_tokens: list[int]) -> None:
    pair = DeviceProcess(tmp_path / "one"), DeviceProcess(tmp_path / "other")
    with small_model(small_moe, "50%", device=names(pair), vram_budget="40%") as model, context(model) as ctx:
        ctx.decode(prompt_tokens[:40])
        pair[1].stop()
        with pytest.raises(DeviceError, match=f"one of the devices {names(pair)} is lost"):
            ctx.decode(prompt_tokens[:1])
    pair[0].stop()


@pytest.mark.parametrize(("name", "type_name", "ends"), [
    ("deepseek-v3", "Q8_0", (3, 5)), ("gpt-oss-mxfp4", "MXFP4", (2, 4)), ("qwen3-next-fused", "Q8_0", (2, 4)),
])
def test_layouts_of_experts_are_divided(
    zoo: Zoo, pair: tuple[DeviceProcess, DeviceProcess], name: str, type_name: str, ends: tuple[int, int]
) -> None:
    """A block without experts before the others; biases, of which both sides have copies; recurrent layers."""
    made = []
    for budget, options in (("resident", {"device": pair[0].name}),
                            ("50%", {"device": names(pair), "vram_budget": "60%"})):
        arguments = {"n_ctx": 64, "n_batch": 64, "n_ubatch": batches.N_UBATCH, **options}
        with pyorch.load(zoo.path(name, type_name), budget=budget, **arguments) as model:
            with Context(model.llama.model, n_threads=1, **batches.CONTEXT) as ctx:
                made.append(np.concatenate([row for shape in batches.SHAPES for row in shape(ctx.decode)]))
            if budget != "resident":
                assert find(model.llama.model).devices.ends == ends and model.stats().experts.device_hits > 0
    assert_same_bits(made[1], made[0])
