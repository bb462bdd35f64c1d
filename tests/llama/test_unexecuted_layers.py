"""A block that predicts the token after the next lies at the end of some models, and no decode executes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parts
import pytest
from architectures import Zoo
from batches import tokens
from devices import CountingWire, DeviceProcess
from ggufs import with_next_token_block

import pyorch
from pyorch.llama.context import Context


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Path:
    """Where the model with such a block is written."""
    return tmp_path_factory.mktemp("next-token") / "longer.gguf"


def decoded(path: Path, prefetch: str) -> tuple[np.ndarray, dict[int, pyorch.Stats], set[tuple[int, int]]]:
    """Logits of a prompt and of tokens after it, statistics by layer, and from which layer which one was predicted."""
    predicted: set[tuple[int, int]] = set()
    with pyorch.ModelMap(path) as model_map:
        budget = 2 * model_map.info.floor_bytes
    with pyorch.load(path, budget=budget, prefetch=prefetch, n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1) as model:
        parts.set_prediction_observer(model.engine, lambda found: predicted.add((found.il_from, found.il)))
        with Context(model.llama.model, n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1) as context:
            rows = [context.decode(tokens(64)), context.decode(tokens(40, seed=1))]
            for token in tokens(8, seed=2):
                rows.append(context.decode([token]))
                model.engine.wait_idle()
        parts.set_prediction_observer(model.engine, None)
        return np.concatenate(rows), {il: model.engine.stats(il) for il in model.layers}, predicted


@pytest.mark.parametrize("prefetch", ["none", "quasi-hidden:3:0", "expert-map:2:0"])
@pytest.mark.parametrize("name", ["glm4-moe"])
def test_nothing_of_it_is_read(zoo: Zoo, longer: Path, name: str, prefetch: str) -> None:
    plain = zoo.path(name, "F32")
    if not longer.exists():
        with_next_token_block(plain, longer)
    expected, without, _ = decoded(plain, prefetch)
    logits, layers, predicted = decoded(longer, prefetch)
    assert logits.tobytes() == expected.tobytes()
    last = max(layers)
    assert last == max(without) + 1
    assert (layers[last].loads, layers[last].bytes_read, layers[last].hits, layers[last].misses) == (0, 0, 0, 0)
    assert all(layers[il].loads > 0 for il in without)
    assert not any(last in pair for pair in predicted)


@pytest.mark.parametrize("longer_one", [False, True])
def test_a_device_with_all_experts_is_told_each_graph_and_gets_none_of_it(
    zoo: Zoo, longer: Path, tmp_path: Path, longer_one: bool
) -> None:
    """ggml's RPC keeps the latest graph of a device, and two contexts may ask for it again: so each has two parts."""
    plain = zoo.path("glm4-moe", "F32")
    if not longer.exists():
        with_next_token_block(plain, longer)
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    try:
        with pyorch.load(longer if longer_one else plain, budget="50%", device=wire.name, vram_budget="100%",
                         prefetch="none", n_ctx=64, n_batch=64, n_threads=1) as model:
            with Context(model.llama.model, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1) as context:
                for token in tokens(3):
                    wire.reset()
                    context.decode([token])
                assert (wire.commands[wire.COMPUTE], wire.commands[wire.RECOMPUTE]) == (2, 0)
            there = [layer.stats().device_experts for layer in model.layers.values()]
            assert there[-1] == (0 if longer_one else there[0]) and min(there[:-1]) > 0
    finally:
        wire.stop()
        process.stop()
