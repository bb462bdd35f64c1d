"""What is decided where nobody says it: whether a device is used, and how much of the dense layers lies there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from devices import DeviceProcess
from models import assert_same_bits, small_model

from pyorch.cli import main
from pyorch.cli.settings import with_device
from pyorch.errors import BudgetError
from pyorch.llama import managed, memory, survey
from pyorch.llama.context import Context
from pyorch.llama.device_parameters import header_of
from pyorch.llama.device_placement import Placement
from pyorch.llama.interception import find
from pyorch.llama.model import Model
from pyorch.runtime import devices
from pyorch.runtime.devices import Device, Devices, find_device, find_devices
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.llama_server import DEVICE, Flags
from pyorch.serve.server import planned
from pyorch.settings.budget import RESIDENT, Budget
from pyorch.settings.settings import Settings
from pyorch.sizes import GiB, MiB, format_bytes

FASTER, SLOWER = [1e10, 1e9, 1e9, 7e9, 7e9], [1e10, 1e9, 1e9, 5e8, 5e8]  # than the processor


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=64, n_threads=1) as context:
        return np.concatenate([context.decode(tokens[:40]), *(context.decode([token]) for token in tokens[:8])])


@pytest.fixture(scope="module")
def expected(small_moe: Path, prompt_tokens: list[int]) -> np.ndarray:
    with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False) as model:
        return logits(model, prompt_tokens)


@pytest.fixture
def only_device(device: DeviceProcess, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Of this machine, as ggml would find a GPU."""
    found = find_device(device.name)
    monkeypatch.setattr(survey, "find_devices", lambda name: [found] if name == "auto" else find_devices(name))
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes, each time anew."""
    lines: list[str] = []
    monkeypatch.setattr(managed.fatal, "notice", lines.append)
    monkeypatch.setattr(managed, "_noted", set())
    return lines


@pytest.mark.parametrize(("rates", "used"), [(FASTER, True), (SLOWER, False)])
def test_a_gpu_is_used_where_it_computes_experts_sooner_and_a_line_says_what_was_chosen(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch, rates: list[float], used: bool,
    said: list[str],
) -> None:
    monkeypatch.setattr(survey, "rates_of", lambda *_: rates)
    with small_model(small_moe, "50%", device="auto", vram_budget="50%") as model:
        assert model.device == (only_device.name if used else "")
    assert len(said) == 1
    assert ("7 times as fast as the processor: it is used" if used else "0.5 of the processor's speed") in said[0]


def test_a_gpu_is_the_default_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    for told in ({"device": "none"}, {"budget": RESIDENT}):  # of which llama.cpp would put all experts there
        assert with_device(told) == told
    for there_is_one in (False, True):
        monkeypatch.setattr(devices, "has_gpu", lambda: there_is_one)
        assert with_device({"budget": "50%"}) == {"budget": "50%", **({"device": "auto"} if there_is_one else {})}


def test_experts_are_the_processors_where_a_device_shares_its_memory_unless_it_is_told(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int],
    expected: np.ndarray, said: list[str],
) -> None:
    shared = replace(only_device, shares_memory=True)
    monkeypatch.setattr(survey, "find_devices", lambda _: [shared])
    monkeypatch.setattr(survey, "rates_of", lambda *_: FASTER)
    with ModelMap(small_moe) as model_map:
        given = Budget.parse("50%").resolve(model_map.info)
    for told, computes in (({}, False), ({"vram_budget": "50%"}, True)):
        with small_model(small_moe, "50%", device="any", **told) as model:
            assert model.device == shared.name
            assert model.stats().experts.budget_bytes == find(model.llama.model).budget_bytes() == given
            assert_same_bits(logits(model, prompt_tokens), expected)
            experts = model.stats().experts
            assert (experts.device_computed > 0) == (experts.device_used_bytes > 0) == computes
            assert experts.hits + experts.misses > 0
        assert ["the processor the experts, unless --vram-budget" in line for line in said[:1]] == [True]
    # What other servers are promised is in host memory.
    with planned(str(small_moe), Settings(budget="50%", device="any", n_threads=1), Flags([]), True) as record:
        assert record.budget_bytes() == given and record.plan.division.devices == (0,)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_model_is_llama_cpps_where_it_fits_into_memory_that_is_the_devices_own(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch, shares_memory: bool
) -> None:
    monkeypatch.setattr(survey, "find_devices", lambda _: [replace(only_device, shares_memory=shares_memory)])
    with small_model(small_moe, "50%", device="any", prefetch="none") as model:
        assert (find(model.llama.model).engine is None) == (not shares_memory)


@pytest.mark.parametrize(("rates", "told", "uploads"), [
    (FASTER, {}, True), (SLOWER, {}, False), ([1.6e9, 1e9, 1e9, 7e9, 7e9], {}, False),
    (FASTER, {"device_misses": "processor"}, False), (SLOWER, {"device_misses": "upload"}, True),
])
def test_what_a_device_lacks_is_uploaded_where_that_is_clearly_sooner(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int],
    expected: np.ndarray, said: list[str], rates: list[float], told: dict[str, str], uploads: bool,
) -> None:
    monkeypatch.setattr(survey, "rates_of", lambda *_: rates)
    for is_remote in (False, True):  # what comes over a network is not measured
        monkeypatch.setattr(survey, "find_devices", lambda _: [replace(only_device, is_remote=is_remote)])
        with small_model(small_moe, "50%", device="any", vram_budget="50%", **told) as model:
            assert_same_bits(logits(model, prompt_tokens), expected)
            experts = model.stats().experts
        all_there = experts.device_computed == experts.device_hits + experts.device_misses
        assert all_there == (uploads and (not is_remote or bool(told))), is_remote
    assert len(said) == (uploads and not told)


def test_a_prompt_that_the_processor_computes_sooner_passes_through_no_area(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int],
) -> None:
    monkeypatch.setattr(survey, "find_devices", lambda _: [replace(only_device, is_remote=False)])

    def decode(**options: object) -> tuple[np.ndarray, bool]:
        """And whether the device computed all experts."""
        with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False, **options) as model, \
                Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=64, n_threads=1) as context:
            made = context.decode(prompt_tokens[:64])
            experts = model.stats().experts
            return made, experts.device_computed == experts.device_hits + experts.device_misses

    expected, _ = decode()
    found = []
    for rates in ([1e9, 2e9, 8e9, 9e10, 9e10], [1e9, 4e9, 8e10, 9e10, 9e11]):
        monkeypatch.setattr(survey, "rates_of", lambda *_: rates)
        made, by_device = decode(device="any", vram_budget="50%", device_misses="processor")
        assert_same_bits(made, expected)
        found.append(by_device)
    assert found == [True, False]


def test_memory_that_a_device_shares_is_counted_once(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int],
    expected: np.ndarray,
) -> None:
    def budget_of(shares_memory: bool, rest: int) -> tuple[int, int]:
        """The host's for experts, where so much is free beside a margin; and what the context takes."""
        limit = memory.MemoryLimit("test", 256 * MiB, 0)
        limit = replace(limit, free_bytes=limit.margin_bytes + rest)
        monkeypatch.setattr(memory, "memory_limit", lambda: limit)
        monkeypatch.setattr(survey, "find_devices", lambda _: [replace(only_device, shares_memory=shares_memory)])
        with small_model(small_moe, "auto", device="any", vram_budget="30%", device_misses="upload") as model:
            record = find(model.llama.model)
            found = model.stats().experts.budget_bytes, sum(record.contexts.values())
            assert_same_bits(logits(model, prompt_tokens), expected)
        return found

    with ModelMap(small_moe) as model_map:
        slots, floor, experts = (model_map.info.slots_bytes, model_map.info.floor_bytes,
                                 model_map.info.expert_bytes)
    there = Budget.parse("30%").amount.of(experts)
    (alone, beside), (shared, with_its) = budget_of(False, 128 * MiB), budget_of(True, 128 * MiB)
    assert alone == slots and shared == slots - there + floor, "an expert lies once"
    assert with_its > beside, "what a context takes of the device is this memory, too"
    rest = slots * 8 // 10
    assert budget_of(True, with_its + rest)[0] == rest - there
    assert budget_of(False, beside + rest)[0] == rest


def test_a_server_counts_the_layers_that_are_to_lie_in_memory_that_a_device_shares(
    small_moe: Path, only_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: memory.MemoryLimit("test", GiB, 128 * MiB))
    with ModelMap(small_moe) as model_map:
        header = header_of(model_map)
    host, there = header.host_bytes, sum(Placement(-1, (only_device,), (8,)).device_dense(header))
    for shares_memory, here in ((False, host), (True, host + there)):
        monkeypatch.setattr(survey, "find_devices", lambda _: [replace(only_device, shares_memory=shares_memory)])
        with (pytest.raises(BudgetError, match=f"{format_bytes(here, round_up=True)} for dense weights"),
              planned(str(small_moe), Settings(device="any", managed=True, n_threads=1), Flags([]), False)):
            pass
    assert there > 0


def test_as_many_dense_layers_are_on_a_device_as_fit_beside_the_context(
    small_moe: Path, device: DeviceProcess, monkeypatch: pytest.MonkeyPatch, prompt_tokens: list[int],
    expected: np.ndarray, said: list[str],
) -> None:
    """Its memory is said to be so much: what it has is the processor's."""
    with ModelMap(small_moe) as model_map:
        info, blocks = model_map.info, [model_map.dense_bytes(il) for il in range(model_map.info.n_layers)]
        assert all(model_map.dense_bytes(il) == 0 for il in (-1, info.n_layers))
        assert min(blocks) > 0 and sum(blocks) < info.dense_bytes
    monkeypatch.setattr(Device, "total_bytes", lambda _: 4 * GiB)
    found = []
    for free in range(264, 276, 2):  # MiB, of which 256 stay free
        managed._noted.clear()
        monkeypatch.setattr(Device, "free_bytes", lambda _: free * MiB)
        with small_model(small_moe, "50%", device=device.name, vram_budget="90%", device_misses="upload") as model:
            assert_same_bits(logits(model, prompt_tokens), expected)
        number = re.search(r"room for (\d+) of 8 layers", said.pop() if said else "")
        found.append(int(number[1]) if number else None)
    some = [n for n in found if n is not None]
    assert some == sorted(some) and 0 < some[0] < 8 and found[-1] is None, found


def test_a_gpu_without_room_for_a_layer_is_left_out_unless_it_was_named(
    small_moe: Path, only_device: Device, device: DeviceProcess, monkeypatch: pytest.MonkeyPatch, said: list[str],
    prompt_tokens: list[int], expected: np.ndarray,
) -> None:
    monkeypatch.setattr(survey, "rates_of", lambda *_: FASTER)
    monkeypatch.setattr(Device, "free_bytes", lambda _: 0)
    for name, used in (("auto", False), (device.name, True)):
        with small_model(small_moe, "50%", device=name, use_extra_bufts=False) as model:
            assert (model.device != "") == used
            assert_same_bits(logits(model, prompt_tokens), expected)
    assert len([line for line in said if "has no room for a layer" in line]) == 1


@pytest.mark.parametrize(("given", "n_layers", "told"), [
    ((), -1, "all"), ((), 3, "3"), (("-ngl", "5"), 5, "5"), (("-ngl", "all"), -1, "all"),
])
def test_llama_server_is_told_how_many_layers_were_planned(
    only_device: Device, given: tuple[str, ...], n_layers: int, told: str
) -> None:
    flags = Flags(given)
    assert (flags.n_gpu_layers > 1000) == (given[1:] == ("all",)) and (flags.n_gpu_layers == 5) == (n_layers == 5)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = n_layers
    flags.place("auto", Devices((only_device,), (8,)), params)
    assert flags.arguments[flags.arguments.index("-ngl") + 1] == told and flags.arguments.count("-ngl") == 1


def test_llama_server_is_told_of_another_process_before_its_device_is_named(only_device: Device) -> None:
    flags = Flags(["-dev", "none"])
    flags.place("rpc:127.0.0.1:1", Devices((only_device,), (8,)), llama.llama_model_default_params())
    assert flags.arguments.index("--rpc") < flags.arguments.index("-dev") and flags.value(DEVICE) == only_device.name


def test_what_has_room_for_no_expert_computes_none_and_verify_says_so(
    small_moe: Path, device: DeviceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(small_moe), "--device", device.name, "--vram-budget", "0%", "--threads", "1"]) == 0
    assert "the processor computed all experts; 0 uploads" in capsys.readouterr().out


def test_without_a_device_no_layer_is_planned_for_one_whatever_llama_server_is_told(small_moe: Path) -> None:
    flags = Flags(["-ngl", "3"])
    with planned(str(small_moe), Settings(budget="50%", n_threads=1), flags, False) as record:
        assert (record.params.n_gpu_layers, record.devices) == (0, None)
    assert flags.value(DEVICE) == "none"
