"""Experts in the memory of a device: what is computed there are the bits of the model that is wholly there."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import batches
import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures import Zoo
from devices import KINDS, BackendDevice, CountingWire, DeviceProcess
from models import PROMPT, assert_same_bits, small_model
from processes import HANG_SECONDS, python
from processes import pyorch as pyorch_command
from servers import WHOLE_PROMPT, ServerProcess, pyorch_serve

import pyorch
from pyorch.cli.verify import sentence
from pyorch.errors import PyorchError
from pyorch.eval.verify import verify
from pyorch.llama import division, engine_plan, logs, measure
from pyorch.llama.context import Context
from pyorch.llama.context_plan import plan_devices
from pyorch.llama.device_placement import LEAST_PROMPT
from pyorch.llama.managed import find
from pyorch.llama.model import Model
from pyorch.runtime import fatal
from pyorch.runtime.devices import Device as RuntimeDevice
from pyorch.runtime.devices import find_device, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.statistics import Stats
from pyorch.serve import server
from pyorch.serve.llama_server import Flags
from pyorch.settings.budget import RESIDENT
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB

Device = DeviceProcess | BackendDevice

_NAMES = {"vulkan": "Vulkan0", "cuda": "CUDA0"}


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    if request.param in _NAMES:
        yield BackendDevice(_NAMES[request.param])
        return
    made = DeviceProcess(tmp_path_factory.mktemp("device") / "log")
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def prompts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through areas, however slow the device is beside this processor."""
    monkeypatch.setattr(engine_plan, "prompt_tokens_of", lambda *_: LEAST_PROMPT)
    monkeypatch.setattr(engine_plan, "misses_of", lambda settings, *_: (settings.device_misses or "processor", ""))


@pytest.fixture
def process(device: Device) -> DeviceProcess:
    """A device whose kernels are the processor's, so that it does not matter to the bits who computes what."""
    if not device.kernels_of_processor:
        pytest.skip("the processor computes what this device lacks, with other kernels")
    return device


@pytest.fixture(scope="module")
def on_device(small_moe: Path, device: Device) -> Iterator[Model]:
    """The whole model on the device, as llama.cpp loads it."""
    with small_model(small_moe, RESIDENT, device=device.name) as model:
        yield model


def context(model: Model) -> Context:
    return Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32, n_seq_max=2, n_threads=1,
                   exact="vulkan" in KINDS)  # flash attention of a software device (Mesa 22.3) ends the process


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    """Of a prompt of a wide and a narrower ubatch, one token after another, a few at once, two sequences at once."""
    with context(model) as ctx:
        made = [ctx.decode(tokens[:50])] + [ctx.decode([token]) for token in tokens[:12]] + [ctx.decode(tokens[:5])]
        made += [ctx.decode([tokens[i], tokens[-i]], [0, 1]) for i in range(1, 4)]
        return np.concatenate(made)


@pytest.fixture(scope="module")
def expected(on_device: Model, prompt_tokens: list[int]) -> np.ndarray:
    return logits(on_device, prompt_tokens)


def assert_same(actual: np.ndarray, expected: np.ndarray, device: Device, experts: Stats) -> None:
    """Bits where one kind of kernels computed all. Else values to float error, but for what a router chose otherwise
    because of it."""
    if device.kernels_of_processor or experts.device_computed == experts.device_hits + experts.device_misses:
        assert_same_bits(actual, expected)
    else:
        assert np.median(np.abs(actual - expected)) < 0.02 * expected.std()


@pytest.mark.parametrize(("vram_budget", "misses"), [
    ("5%", "upload"), ("30%", "upload"), ("100%", "upload"), ("5%", "processor"), ("40%", "processor"),
])
def test_logits_are_those_of_the_model_that_is_wholly_on_the_device(
    small_moe: Path, device: Device, prompt_tokens: list[int], expected: np.ndarray, vram_budget: str,
    misses: str,
) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget=vram_budget, device_misses=misses) as model:
        made = logits(model, prompt_tokens)
        experts = model.stats().experts
        assert_same(made, expected, device, experts)
        assert experts.device_hits > 0
        assert experts.device_used_bytes <= experts.device_budget_bytes
        scarce = experts.device_budget_bytes < model.map.info.expert_bytes
        assert (experts.device_evictions > 0) == (experts.device_misses > 0) == scarce


def test_with_forecasts_that_upload_ahead_logits_are_those_of_the_model_that_is_wholly_on_the_device(
    small_moe: Path, device: Device, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    with small_model(small_moe, "100%", device=device.name, vram_budget="30%", device_misses="upload",
                     prefetch="quasi-hidden:1", device_ahead=2) as model:
        made = logits(model, prompt_tokens)
        experts = model.stats().experts
        assert_same(made, expected, device, experts)
        assert experts.device_computed == experts.device_hits + experts.device_misses
        assert 0 < experts.device_ahead_hits < experts.device_ahead


# Memory of the device: for two areas, for one, for none. The host's: all, half, and the least that works.
@pytest.mark.parametrize(("vram_budget", "budget"), [
    ("80%", "100%"), ("80%", "312KiB"), ("40%", "50%"), ("20%", "312KiB"),
])
def test_a_prompt_passes_through_the_device_whatever_fits_where(
    small_moe: Path, device: Device, prompt_tokens: list[int], expected: np.ndarray, vram_budget: str,
    budget: str,
) -> None:
    with small_model(small_moe, budget, device=device.name, vram_budget=vram_budget) as model:
        made = logits(model, prompt_tokens)
        experts = model.stats().experts
        assert_same(made, expected, device, experts)
        in_slots = experts.device_loads * model.map.layers[0].expert_bytes
        through_areas = experts.device_bytes - in_slots
        assert (through_areas > model.map.info.expert_bytes / 4) == (vram_budget != "20%")
        assert experts.device_used_bytes <= experts.device_budget_bytes and experts.peak_bytes <= experts.budget_bytes


def test_what_a_prompt_passes_through_the_device_stays_in_free_slots(
    small_moe: Path, device: Device, prompt_tokens: list[int]
) -> None:
    with small_model(small_moe, "100%", device=device.name, vram_budget="80%") as model, context(model) as ctx:
        seen = []
        for _ in range(2):
            model.reset_stats()
            ctx.clear()
            ctx.decode(prompt_tokens[:32])
            seen.append(model.stats().experts)
    first, second = seen
    assert first.device_loads == second.device_loads == 0 and first.device_experts > 0
    assert second.device_hits > first.device_hits
    assert second.device_bytes < first.device_bytes / 2


def test_an_expert_from_disk_is_read_once_and_stays_in_one_tier(
    small_moe: Path, process: DeviceProcess, prompt_tokens: list[int]
) -> None:
    with small_model(small_moe, "25%", device=process.name, vram_budget="25%", device_misses="upload",
                     prefetch="none") as model, context(model) as ctx:
        for token in prompt_tokens[:20]:
            ctx.decode([token])
        model.reset_stats()
        in_both = 0
        for token in prompt_tokens[:12]:
            ctx.decode([token])
            in_host = sum(int((model.residency[layer] == 1).sum()) for layer in model.layers)
            in_both = max(in_both, model.stats().experts.resident_experts - in_host)
        experts = model.stats().experts
        assert experts.bytes_read == experts.misses * model.map.layers[0].expert_bytes > 0
        assert experts.misses < experts.device_loads == experts.device_misses, "some came from host memory"
        assert in_both < 0.2 * experts.resident_experts, "what came goes first"


def test_uploads_through_page_locked_memory_bring_the_same(
    small_moe: Path, device: Device, prompt_tokens: list[int], expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.kernels_of_processor:
        pytest.skip("ggml's RPC has no page-locked memory")
    monkeypatch.setenv("PYORCH_UPLOADS", "staged")
    with small_model(small_moe, "50%", device=device.name, vram_budget="60%", device_misses="upload") as model:
        assert_same_bits(logits(model, prompt_tokens), expected)
        assert model.stats().experts.device_evictions > 0


def test_rows_of_the_processor_have_room_within_the_devices_budget_or_go_with_the_graph(
    small_moe: Path, device: Device, prompt_tokens: list[int]
) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget="40%") as model, ExitStack() as contexts:
        made = []
        for _ in range(5):  # more than have room
            ctx = contexts.enter_context(context(model))
            made.append(ctx.decode(prompt_tokens[:20]))
        experts = model.stats().experts
        assert 0 < experts.device_used_bytes <= experts.device_budget_bytes
        assert experts.device_computed < experts.device_hits + experts.device_misses
        for logits in made:
            assert_same(logits, made[0], device, experts)


@pytest.mark.parametrize("vram_budget", ["60%", "100%"])
def test_two_contexts_share_a_device(
    small_moe: Path, device: Device, prompt_tokens: list[int], expected: np.ndarray, vram_budget: str
) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget=vram_budget) as model:
        with ThreadPoolExecutor(2) as threads:
            for run in [threads.submit(logits, model, prompt_tokens) for _ in range(4)]:
                assert_same(run.result(), expected, device, model.stats().experts)


# Those that a software device computes, which takes long: the others are like them, or BF16, which ends the process
# there (Mesa 22.3), with pyorch and without.
ON_SOFTWARE = {
    ("gpt-oss-mxfp4", "MXFP4"), ("qwen3-next-fused", "Q8_0"), ("deepseek-v3", "Q4_0"), ("llama4", "Q8_0"),
    ("glm4-moe", "F32"),
}
# Where its backend makes one operation of several, so that those behind the experts are computed otherwise where both
# ways lie before them: a bit may differ.
FUSED = {"llama4"}


@pytest.mark.parametrize(("name", "type_name"), [
    ("mixtral", "Q8_0"), ("mixtral", "Q4_K"), ("gpt-oss", "Q8_0"), ("gpt-oss-mxfp4", "MXFP4"),
    ("qwen3-next-fused", "Q8_0"), ("deepseek-v3", "Q8_0"), ("deepseek-v3", "Q4_0"), ("llama4", "Q8_0"),
    ("granite-moe-hybrid", "BF16"), ("glm4-moe", "F32"), ("jamba", "MXFP4"), ("qwen3-moe", "Q4_K"),
])
def test_every_layout_of_experts_is_computed_on_the_device(zoo: Zoo, device: Device, name: str, type_name: str) -> None:
    """Apart, with biases, in one matrix, beside a shared one, weighted before; in all batch shapes."""
    software = not device.kernels_of_processor
    if software and (name, type_name) not in ON_SOFTWARE:
        pytest.skip("software devices take long")

    def computed(budget: str, **options: object) -> tuple[np.ndarray, Stats | None]:
        arguments = {"n_ctx": 64, "n_batch": 64, "n_ubatch": batches.N_UBATCH, "device": device.name}
        rows = []
        with pyorch.load(zoo.path(name, type_name), budget=budget, **arguments | options) as model:
            with Context(model.llama.model, n_threads=1, exact=software, **batches.CONTEXT) as ctx:
                for shape in batches.SHAPES:
                    ctx.clear()
                    rows += shape(ctx.decode)
            return np.concatenate(rows), model.engine and model.engine.stats()

    expected, _ = computed("resident")
    for vram_budget, misses in (("30%", "processor"), ("60%", "upload")):
        made, experts = computed("50%", vram_budget=vram_budget, device_misses=misses)
        assert experts.device_hits > 0
        assert misses != "upload" or experts.device_computed == experts.device_hits + experts.device_misses
        if software and misses == "upload" and name in FUSED:
            np.testing.assert_allclose(made, expected, atol=1e-5 * expected.std())
        else:
            assert_same(made, expected, device, experts)


def test_a_context_that_only_computes_prompts_leaves_the_areas_to_others(
    small_moe: Path, process: DeviceProcess, prompt_tokens: list[int], on_device: Model
) -> None:
    """One that says something of each token never comes to a layer that is too narrow for an area."""
    prompt = prompt_tokens[:32]
    with context(on_device) as ctx:
        expected = ctx.decode(prompt)
    with small_model(small_moe, "50%", device=process.name, vram_budget="80%") as model:
        with context(model) as one, context(model) as other:
            for each in (one, other, one):
                model.reset_stats()
                assert_same_bits(each.decode(prompt), expected)
                model.engine.wait_idle()
                each.clear()
                experts = model.stats().experts
                assert experts.device_computed == experts.device_hits + experts.device_misses > 0


def test_what_is_on_the_device_costs_no_transfer(
    small_moe: Path, device: Device, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget="100%", device_misses="upload") as model:
        logits(model, prompt_tokens)
        experts = model.stats().experts
        assert experts.loads > 0 == experts.hits == experts.misses, "what is read first is no use of it"
        model.reset_stats()
        made = logits(model, prompt_tokens)
        experts = model.stats().experts
        assert_same_bits(made, expected)
        assert experts.device_hits > 0 and experts.device_bytes == experts.device_loads == experts.device_misses == 0
        assert experts.hits == experts.misses == 0, "host memory was asked for what the device has"
        assert experts.device_computed == experts.device_hits


@pytest.mark.parametrize(("vram_budget", "misses"), [("100%", "upload"), ("50%", "processor")])
def test_a_layer_asks_the_device_for_its_choice_of_experts_and_for_the_inputs_of_those_it_lacks(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int], vram_budget: str, misses: str
) -> None:
    process = DeviceProcess(tmp_path / "log")  # of its own: such a device serves one connection at a time
    wire = CountingWire(process)
    with small_model(small_moe, "50%", device=wire.name, vram_budget=vram_budget, device_misses=misses,
                     prefetch="none") as model, \
            context(model) as ctx:
        for token in prompt_tokens[:40]:
            ctx.decode([token])
        model.engine.wait_idle()
        model.reset_stats()
        wire.reset()
        reused = llama.llama_perf_context(ctx.handle).n_reused
        for token in prompt_tokens[:20]:
            ctx.decode([token])
        assert llama.llama_perf_context(ctx.handle).n_reused == reused + 20, "graphs are built anew"
        experts = model.stats().experts
        asking = 1 if vram_budget == "100%" else len(model.layers)  # wholly there: one, on RPC
        least = 20 * (asking + 1)  # and the logits
        assert least <= wire.commands[wire.GET] <= least + (experts.device_misses if misses == "processor" else 0)
        assert experts.device_hits > 0 and (experts.device_computed > 0 or misses == "processor")

        # Who looks is shown all of it, from the next token on.
        seen = []
        model.engine.set_observer(lambda routing: seen.append((routing.weights, routing.inputs.std())))
        ctx.decode(prompt_tokens[:1])
        model.engine.set_observer(None)
        assert len(seen) == len(model.layers) and all(weights.min() > 0 and std > 0 for weights, std in seen)
        wire.reset()
        ctx.decode(prompt_tokens[1:2])
        assert wire.commands[wire.GET] <= len(model.layers) * 2 + 1
    wire.stop()
    process.stop()


def test_lossy_settings_ask_nothing_where_no_expert_can_be_absent(
    small_moe: Path, process: DeviceProcess, tmp_path: Path, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    counted = DeviceProcess(tmp_path / "log")
    wire = CountingWire(counted)
    with small_model(small_moe, "50%", device=wire.name, vram_budget="100%", substitution="heaviest") as model:
        assert_same_bits(logits(model, prompt_tokens), expected)
        with context(model) as ctx:
            for token in prompt_tokens[:3]:
                wire.reset()
                ctx.decode([token])
            assert wire.commands[wire.GET] == 2, "the choice of the layer that asks, and the logits"
    wire.stop()
    counted.stop()


@pytest.mark.parametrize("n_tokens", [1, 20, 64])
def test_what_the_device_computed_of_a_batch_stays_there(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int], n_tokens: int
) -> None:
    """There is memory for the processor's rows of the largest batch, though the first graphs are of one token."""
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    with small_model(small_moe, "50%", device=wire.name, vram_budget="60%", prefetch="none") as model:
        model.llama.eval(prompt_tokens[:n_tokens])
        wire.reset()
        model.llama.eval(prompt_tokens[:n_tokens])
        outputs = n_tokens * len(model.layers) * 6 * 128 * 4
        assert wire.bytes[wire.GET] - 2048 * 4 * n_tokens < outputs / 2, "the choice of experts, inputs, and logits"
        assert model.stats().experts.device_hits > 0
    wire.stop()
    process.stop()


def test_a_prompt_through_areas_asks_for_its_choice_of_experts_alone(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """No inputs for the processor, which computes none of its rows, and none for predictors, which look at tokens."""
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    with small_model(small_moe, "50%", device=wire.name, vram_budget="60%", prefetch="quasi-hidden") as model:
        for number in range(2):
            with context(model) as ctx:
                ctx.decode(prompt_tokens[:32], outputs=[31])
                ctx.clear()
                wire.reset()
                ctx.decode(prompt_tokens[:32], outputs=[31])
                # Of each layer its choice, then the logits; the last layer's one row may be predicted.
                questions = len(model.layers) + 1
                assert questions <= wire.commands[wire.GET] <= questions + 2, number
                # Slots go there for each layer, and which of them its area is made of, beside six inputs of the graph;
                # numbers of rows that the processor computed do not: its way is not in the graph.
                assert wire.small_sets < 3 * (len(model.layers) - 1) + 6, number
                # The choice alone, not all experts in its order.
                logits = model.llama.n_vocab() * 4
                assert wire.bytes[wire.GET] - logits <= questions * 32 * 6 * 4, number
                # What has slots is put together in one step.
                assert model.stats().experts.device_hits > 0 and wire.commands[wire.COPY] == 0, number
    wire.stop()
    process.stop()


def test_no_layer_asks_the_host_where_the_device_holds_the_whole_model(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """llama.cpp keeps it there then, unless settings want an engine."""
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    asked, made = {}, {}
    for budget in ("resident", "50%"):
        with small_model(small_moe, budget, device=wire.name) as model, context(model) as ctx:
            assert model.engine is None and ("fits into the memory of" in model.note) == (budget == "50%")
            made[budget] = ctx.decode(prompt_tokens[:40])
            wire.reset()
            for token in prompt_tokens[:20]:
                made[budget] = np.concatenate([made[budget], ctx.decode([token])])
            asked[budget] = dict(wire.commands)
    assert asked["50%"] == asked["resident"] and asked["50%"][wire.GET] == 20, "the logits and nothing else"
    assert_same_bits(made["50%"], made["resident"])
    for wanting in ({"managed": True}, {"vram_budget": "100%"}, {"substitution": "heaviest"}, {"n_gpu_layers": 3}):
        with small_model(small_moe, "50%", device=wire.name, **wanting) as model:
            assert model.engine is not None and model.note == ""
    wire.stop()
    process.stop()


@pytest.mark.parametrize("n_tokens", [1, 32])
def test_a_layer_that_is_wholly_on_the_device_asks_the_host_nothing(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int], n_tokens: int
) -> None:
    """Where most experts have slots, some layers have them all; and what asks for their routing is shown it."""
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    with small_model(small_moe, "resident", device=wire.name) as model, context(model) as ctx:
        expected = np.concatenate([ctx.decode(prompt_tokens[:64]), ctx.decode(prompt_tokens[:n_tokens])])
    with small_model(
        small_moe, "50%", device=wire.name, vram_budget="99%", device_misses="upload", prefetch="none"
    ) as model:
        with context(model) as ctx:
            made = ctx.decode(prompt_tokens[:64])
            whole = [il for il in model.layers if (model.residency[il] == 2).all()]
            assert whole == [0]
            wire.reset()
            model.reset_stats()
            made = np.concatenate([made, ctx.decode(prompt_tokens[:n_tokens])])
            # Choices, logits, and behind a prompt's last layer a number, which says that its areas are free.
            assert wire.commands[wire.GET] == len(model.layers) - len(whole) + (1 if n_tokens == 1 else 2)
        assert_same_bits(made, expected)
        counted = model.stats().experts
        assert counted.tokens == n_tokens * len(model.layers), "those of whole layers too"
        assert n_tokens > 1 or counted.device_hits + counted.device_misses == 6 * len(model.layers), "the same"
        assert counted.device_computed == counted.device_hits + counted.device_misses > 0
        with pytest.raises(pyorch.PyorchError, match="with all its experts"):
            model.layers[0].settings = pyorch.LayerSettings(max_on_device=5)
        seen = set()
        model.engine.set_observer(lambda routing: seen.add(routing.il))
        with context(model) as ctx:
            assert_same_bits(ctx.decode(prompt_tokens[:64]), expected[:64])
        assert seen == set(model.layers)
    wire.stop()
    process.stop()


@pytest.mark.parametrize("name", ["small", "gpt-oss"])  # whose experts have biases, which both sides read
def test_the_processor_begins_while_the_device_computes(
    small_moe: Path, zoo: Zoo, device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    path = small_moe if name == "small" else zoo.path(name, "Q8_0")
    with small_model(path, "50%", device=device.name, vram_budget="50%") as model, logs.collect() as lines, \
            context(model) as ctx:
        lines.clear()
        ctx.decode([3])
        # Parts of graphs, each with the inputs that it takes from elsewhere: the scheduler waits for the device before
        # a part without any, and for who makes an input, if that is not one of the graph.
        graph = "".join(lines).split("## SPLIT #")
        parts = [part for part in graph if re.search(r"\): +ffn_moe_(gate|up|down|gate_up)-", part)]
        inputs = [re.findall(r"\[(\S+) \(", part.splitlines()[0]) for part in parts]
        assert len(parts) == len(model.layers)
        assert all(len(names) == 1 and names[0].startswith("pyorch_beside-") for names in inputs), inputs


def test_where_each_token_is_computed_follows_from_the_tokens(
    small_moe: Path, device: Device, prompt_tokens: list[int]
) -> None:
    counts = []
    for _ in range(2):
        with small_model(small_moe, "30%", device=device.name, vram_budget="20%") as model:
            logits(model, prompt_tokens)
            experts = model.stats().experts
            counts.append((experts.device_hits, experts.device_misses, experts.device_loads, experts.device_evictions))
    assert counts[0] == counts[1] and counts[0][3] > 0


def test_the_speed_of_a_device_is_measured_once_and_kept(
    small_moe: Path, process: DeviceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = find_device(process.name)
    with ModelMap(small_moe) as model_map:
        rates = [rates_of(device, model_map, n_threads=1) for _ in range(2)]
        kept = list((tmp_path / "pyorch").glob("device-*.json"))
        assert len(kept) == 1 and rates[0] == rates[1] == json.loads(kept[0].read_text())
        kept[0].write_text("[1.0, 2.0, NaN, 4.0, 5.0]")
        again = rates_of(device, model_map, n_threads=1)
        assert len(again) == 5 and min(again) > 100


def test_a_layer_has_limits_on_the_device(
    small_moe: Path, process: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    def there(model: Model) -> list[int]:
        assert_same_bits(logits(model, prompt_tokens), expected)
        return [layer.stats().device_experts for layer in model.layers.values()]

    with small_model(small_moe, "50%", device=process.name, vram_budget="30%") as model:
        before = there(model)
        model.layers[3].settings = pyorch.LayerSettings(max_on_device=5)
        assert model.layers[3].stats().device_experts == 5 < before[3]
        model.layers[4].settings = pyorch.LayerSettings(min_on_device=before[4])
        after = there(model)
        assert after[3] <= 5 and after[4] >= before[4]
        with pytest.raises(PyorchError, match="leaves none of .* slots"):
            for il in (5, 6, 7):
                model.layers[il].settings = pyorch.LayerSettings(min_on_device=64)
        with pytest.raises(PyorchError, match="must be 0 <= min <= max <= 64"):
            model.layers[5].settings = pyorch.LayerSettings(max_on_device=65)
    with small_model(small_moe, "50%") as model, pytest.raises(PyorchError, match="made without a device"):
        model.layers[3].settings = pyorch.LayerSettings(max_on_device=5)
    with small_model(small_moe, "50%", device=process.name, vram_budget="100%", device_ahead=1,
                     prefetch="quasi-hidden") as model:
        model.layers[3].settings = pyorch.LayerSettings(max_on_device=2)  # nobody else computes
        there(model)


def test_residency_tells_the_tiers_apart(small_moe: Path, device: Device, prompt_tokens: list[int]) -> None:
    with small_model(small_moe, "50%", device=device.name, vram_budget="20%") as model:
        logits(model, prompt_tokens)
        model.engine.wait_idle()
        tiers = np.concatenate([model.residency[il] for il in model.layers])
        assert set(tiers) == {0, 1, 2}
        assert (tiers == 2).sum() == sum(layer.stats().device_experts for layer in model.layers.values())
        flags = model.engine.snapshot().flags
        assert ((flags & 16) != 0).sum() == (tiers == 2).sum()


def test_quantized_experts_are_uploaded_as_the_file_has_them(
    small_moe_q4: Path, device: Device, prompt_tokens: list[int]
) -> None:
    with small_model(small_moe_q4, RESIDENT, device=device.name) as reference:
        expected = logits(reference, prompt_tokens)
    with small_model(small_moe_q4, "30%", device=device.name, vram_budget="30%", device_misses="upload") as model:
        made = logits(model, prompt_tokens)
        experts = model.stats().experts
        assert_same(made, expected, device, experts)
        assert experts.device_hits > 0


def test_verify_says_who_computed(small_moe: Path, process: DeviceProcess) -> None:
    """In budgets of both memories, with all experts on the device and with some."""
    shared, alone = (
        next(verify(small_moe, ["50%"], n_tokens=4, n_threads=1, device=process.name, vram_budget=vram_budget,
                    device_misses=misses))
        for vram_budget, misses in (("20%", "processor"), ("100%", "upload"))
    )
    assert shared.identical and alone.identical and shared.device == alone.device != ""
    assert shared.by_processor > 0 and alone.by_processor == 0
    assert "the processor computed" in sentence(shared) and "computed all experts" in sentence(alone)


def test_a_server_computes_on_the_device(small_moe: Path, tmp_path: Path) -> None:
    device = DeviceProcess(tmp_path / "device.log")  # of its own: such a device serves one process at a time
    options = ("--budget", "50%", "--device", device.name, "--vram-budget", "40%", "--threads", "1", "--", "-np", "1")
    serving = ServerProcess(pyorch_serve(small_moe, *options), tmp_path / "server.log")
    try:
        text = serving.complete(PROMPT, extra_body=WHOLE_PROMPT)
        with urllib.request.urlopen(serving.url + "/metrics", timeout=HANG_SECONDS) as answer:
            metrics = answer.read().decode()
        seen = serving.get("/residency")
    finally:
        serving.stop()
        device.stop()
    hits, used, uploading = (re.search(rf"^pyorch_device_{name} (\S+)$", metrics, re.MULTILINE)
                             for name in ("hits_total", "used_bytes", "upload_seconds_total"))
    assert float(hits[1]) > 0 and float(used[1]) == seen["totals"]["device_used_bytes"] and float(uploading[1]) > 0
    assert seen["totals"]["device_hits"] == float(hits[1]) == sum(layer["device_hits"] for layer in seen["layers"])
    there = [sum(int(state, 32) & 16 > 0 for state in layer["states"]) for layer in seen["layers"]]
    assert there == [layer["device_experts"] for layer in seen["layers"]] and sum(there) > 0
    assert seen["settings"]["device"].startswith("RPC")
    assert "pyorch: device: hit rate " in serving.log.read_text()
    with small_model(small_moe, "50%") as model:
        assert text == "".join(model.generate(PROMPT, max_tokens=16, temperature=0))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the memory of a process as Linux does")
def test_a_device_without_memory_for_all_gets_fewer_and_says_so_once(small_moe: Path, tmp_path: Path) -> None:
    device = DeviceProcess(tmp_path / "log", memory=12 * MiB)  # what the experts need, and there is more to come
    try:
        done = pyorch_command("run", small_moe, "-p", "import os", "-n", 2, "--ctx", 256, "--ubatch", 64,
                              "--budget", "50%", "--device", device.name, "--vram-budget", "100%", "--json")
    finally:
        device.stop()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no memory for 12 MiB of experts") == 1
    said = json.loads(done.stdout)
    assert said["device"].startswith("RPC") and 0 < said["stats"]["experts"]["device_used_bytes"] < 12 * MiB


def test_a_device_that_is_lost_fails_the_decode_and_spares_the_process(
    small_moe: Path, prompt_tokens: list[int], resident: Model, tmp_path: Path
) -> None:
    lost = DeviceProcess(tmp_path / "log")
    with small_model(small_moe, "50%", device=lost.name, vram_budget="50%") as model:
        with context(model) as ctx:
            ctx.decode(prompt_tokens[:40])
            lost.stop()
            for _ in range(2):
                with pytest.raises(pyorch.DeviceError, match="is lost"):
                    ctx.decode(prompt_tokens[:1])
        with pytest.raises(pyorch.DeviceError, match="is lost"):
            list(model.generate("import os", max_tokens=2))
    with small_model(small_moe, "50%") as model:
        assert len(logits(model, prompt_tokens)) == len(logits(resident, prompt_tokens))
    with pytest.raises(PyorchError, match="no device can be reached"):
        small_model(small_moe, "50%", device=lost.name)


def test_a_process_ends_that_has_not_closed_its_model_on_a_device_that_is_lost(small_moe: Path) -> None:
    """And did not notice: it computes nothing any more."""
    script = """if True:
        import sys
        from pathlib import Path
        from devices import DeviceProcess
        from models import small_model
        device = DeviceProcess(Path(sys.argv[2]))
        model = small_model(sys.argv[1], "50%", device=device.name, vram_budget="50%")
        device.stop()
        print("ends")
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    done = python("-c", script, small_moe, small_moe.with_name("device.log"), env=os.environ | {"PYTHONPATH": paths})
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_the_memory_plan_has_room_for_the_buffers_of_both_ways(small_moe: Path, process: DeviceProcess) -> None:
    def buffers(vram_budget: str) -> tuple[float, float]:
        with logs.collect() as lines, pyorch.load(small_moe, budget="50%", n_ctx=512, n_batch=512, n_ubatch=512,
                                                  device=process.name, vram_budget=vram_budget) as model:
            planned = find(model.llama.model).plan.header.chain_bytes(512) / MiB
        found = re.findall(r"reserve: .*compute buffer size = +([0-9.]+) MiB", "\n".join(lines))
        assert len(found) == 2
        return sum(map(float, found)), planned

    (alone, planned), (both, _) = buffers("0"), buffers("40%")
    assert planned / 4 < both - alone < planned


def test_what_a_context_takes_on_the_device_is_not_taken_from_experts_in_host_memory(
    small_moe: Path, process: DeviceProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_device(process.name)
    second = DeviceProcess(tmp_path / "log")  # whose buffers have another name than the device itself
    planned, context_sizes = [], measure.context_sizes
    monkeypatch.setattr(measure, "context_sizes", lambda *given: planned.append(context_sizes(*given)) or planned[-1])
    options = {"n_ctx": 4096, "n_batch": 64, "n_ubatch": 64, "device": second.name}
    with pyorch.load(small_moe, budget="auto", managed=True, **options) as model:
        work = measure.work_bytes(model.map, 64)
    with logs.collect() as lines, pyorch.load(small_moe, budget="50%", vram_budget="0", **options) as model:
        made = measure.reported_sizes(lines, find(model.llama.model).devices)
    assert made.devices[0] > 8 * MiB > made.host > 0  # the KV cache is there
    for sizes in planned:
        assert sizes.host - work == pytest.approx(made.host, abs=0.1 * MiB)
        assert sizes.devices == (pytest.approx(made.devices[0], abs=0.1 * MiB),)
    second.stop()


def test_the_devices_share_is_planned_for_the_ubatch_that_the_context_has(
    small_moe: Path, process: DeviceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "_widest_ubatch", lambda *_: 64)  # as where memory is short
    with pyorch.load(small_moe, budget="auto", n_ctx=512, n_batch=128, device=process.name, managed=True) as model:
        divided = find(model.llama.model).division
        assert divided.n_ubatch == llama_cpp.llama_n_ubatch(model.llama.ctx) == 64 and divided.is_final
        assert model.stats().experts.device_used_bytes > 0


def test_a_budget_that_leaves_no_room_for_the_context_is_made_smaller_and_that_is_said_once(
    small_moe: Path, process: DeviceProcess, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int]
) -> None:
    """As far as the device says what it has free, which this one, with the memory of the machine, does not."""
    said = []
    monkeypatch.setattr(fatal, "notice", said.append)
    monkeypatch.setattr(RuntimeDevice, "free_bytes", lambda _: 12 * MiB)
    with small_model(small_moe, "50%", n_ubatch=32, device=process.name, vram_budget="100%") as model:
        with context(model) as ctx:
            ctx.decode(prompt_tokens[:8])
        in_python = model.stats().experts.device_budget_bytes
        planned = find(model.llama.model).plan
        dense = planned.header.info.dense_bytes - planned.placement.host_dense(planned.header)
    assert len(said) == 1 and "for experts, not 12 MiB" in said[0]
    assert 0 < in_python < 12 * MiB
    # A server's dense layers are not there yet when it plans; its context is as wide as it will be.
    planned = []
    monkeypatch.setattr(server, "plan_devices", lambda managed, params, is_loaded: (
        planned.append(params.n_ubatch), plan_devices(managed, params, is_loaded)))
    settings = Settings(budget="50%", device=process.name, vram_budget="100%")
    with server.planned(str(small_moe), settings, Flags(["-c", "256", "-np", "1", "-ub", "32"]), False) as ctx:
        assert 0 < ctx.engine.stats().device_budget_bytes <= 12 * MiB - dense
    with server.planned(str(small_moe), settings, Flags(["-c", "2048", "-np", "1"]), False) as ctx:
        assert ctx.engine.stats().device_budget_bytes == 0
    assert planned == [32, 2048]


def test_a_device_that_is_not_there_is_named(small_moe: Path) -> None:
    with pytest.raises(PyorchError, match="no device CUDA7"):
        small_model(small_moe, "50%", device="CUDA7")
    with pytest.raises(PyorchError, match="no device can be reached at 127.0.0.1:1"):
        small_model(small_moe, "50%", device="rpc:127.0.0.1:1")
    with pytest.raises(PyorchError, match="must be the names of devices"):
        small_model(small_moe, "50%", device="\udcff")
    with pytest.raises(PyorchError, match="no device CUDA0"):
        small_model(small_moe, "50%", device="CUDA0,CUDA1")
    for several, why in (("CUDA0, CUDA0", "names CUDA0 twice"), ("none,CUDA0", "beside none, which stands alone"),
                         (",".join(f"CUDA{n}" for n in range(17)), "more than 16 devices")):
        with pytest.raises(PyorchError, match=why):
            small_model(small_moe, "50%", device=several)
    with pytest.raises(PyorchError, match="name it with --device"):
        small_model(small_moe, "50%", vram_budget="50%")


def test_no_predictor_is_told_where_both_memories_together_have_nearly_all(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """Neither of them alone has room for that."""
    process = DeviceProcess(tmp_path / "log")
    wire = CountingWire(process)
    asked = {}
    for prefetch in ("none", "quasi-hidden"):
        with small_model(small_moe, "70%", device=wire.name, vram_budget="70%", prefetch=prefetch) as model:
            with context(model) as ctx:
                ctx.decode(prompt_tokens[:40])
                for complete in (False, True):
                    if complete:
                        for il in model.layers:
                            model.engine.prefetch(il, np.flatnonzero(model.residency[il] == 0).tolist())
                        model.engine.wait_idle()
                        ctx.decode([prompt_tokens[40]])  # the graph is made anew
                    wire.reset()
                    ctx.decode([prompt_tokens[41]])
                    asked[prefetch, complete] = wire.bytes[wire.GET]
    weights = len(model.layers) * 6 * 4
    assert asked["quasi-hidden", False] >= asked["none", False] + weights, "of what routers chose, and what they saw"
    assert asked["quasi-hidden", True] == asked["none", True]
    wire.stop()
    process.stop()
