"""Advice: probes of a model's shape, made-up routings, estimates, and the command."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from devices import DeviceProcess
from ggufs import write_moe_model
from processes import HANG_SECONDS

from pyorch import files
from pyorch.advise import device_estimate as where
from pyorch.advise import machine
from pyorch.advise.device_estimate import DeviceSpeed, given
from pyorch.advise.estimates import Estimator
from pyorch.advise.gains import gains
from pyorch.advise.machine import Compute
from pyorch.advise.probe import Shape, read_shape, write_probe
from pyorch.advise.routing import made_up_experts, routing_of
from pyorch.bench.job import ENGINE, Config, Job
from pyorch.bench.rounds import measure_once
from pyorch.cli import main
from pyorch.errors import PyorchError
from pyorch.runtime import devices
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.settings.settings import Settings
from pyorch.sidecars.predictor import PredictorFile
from pyorch.sizes import GiB, MiB
from pyorch.traces.recorder import profile
from pyorch.traces.replay import ReplaySettings, replay, token_bytes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def headers():
    spec = importlib.util.spec_from_file_location("model_headers", ROOT / "scripts/model_headers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Nothing was measured yet, and what is measured now is nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(machine, "N_ROUNDS", 1)
    monkeypatch.setattr(machine, "N_PROMPT", 8)
    monkeypatch.setattr(machine, "N_TOKENS", 4)
    monkeypatch.setattr(machine, "DISK_SECONDS", 0.02)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # whatever else this machine does


def estimator(model_map: ModelMap, compute: Compute, bandwidth: float, trace=None) -> Estimator:
    return Estimator(model_map, routing_of(model_map, trace), compute, bandwidth, 512, PredictorFile())


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_header_has_the_size_of_its_model_and_occupies_no_disk(name: str, headers, tmp_path: Path, capsys) -> None:
    path = tmp_path / "model.gguf"
    headers.MODELS[name](path).close()
    status = path.stat()
    published = {"olmoe-1b-7b": 4.21e9, "qwen3-30b-a3b": 18.6e9, "gpt-oss-20b": 12.1e9}[name]
    assert abs(status.st_size / published - 1) < 0.02
    assert status.st_blocks * 512 < 4 << 20
    assert files.has_holes([str(path)])
    assert main(["run", str(path), "-p", "x", "--budget", "10%"]) == 2
    assert "the file seems to be a header without weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_llama_cpp_computes_a_probe_of_a_header(name: str, headers, tmp_path: Path) -> None:
    path, probe = tmp_path / "model.gguf", tmp_path / "probe.gguf"
    headers.MODELS[name](path).close()
    with ModelMap(path) as model_map:
        shape = _with_few_words(read_shape(model_map))
    write_probe(shape, probe, 1)
    with ModelMap(probe) as model_map:
        assert model_map.info.n_layers == model_map.info.n_moe_layers == 1
        assert model_map.layers[0].n_expert > 2 * shape.n_expert_used
        assert model_map.info.file_bytes < 200 << 20
    config = Config("probe", ENGINE, Settings(budget="100%", n_threads=1), preload=True)
    failure, measured, _ = measure_once(Job(str(probe), config, None, 2, 4, 1, HANG_SECONDS))
    assert failure == ""
    assert measured.decode.n_tokens == 4 and measured.decode.misses == 0
    # Routers are random: tokens do not take the same experts again and again.
    assert measured.decode.hits == 4 * shape.n_expert_used


def _with_few_words(shape: Shape) -> Shape:
    """The tables of a large vocabulary take longer than the rest."""
    tensors = [replace(tensor, shape=(512, tensor.shape[1]), n_bytes=tensor.n_bytes // tensor.shape[0] * 512)
               if tensor.name in ("token_embd.weight", "output.weight") else tensor for tensor in shape.tensors]
    return replace(shape, tensors=tuple(tensors))


def test_an_array_of_a_model_that_has_as_many_layers_is_not_cut(tmp_path: Path) -> None:
    path, probe = tmp_path / "model.gguf", tmp_path / "probe.gguf"
    write_moe_model(path, n_layer=4)
    with ModelMap(path) as model_map:
        shape = read_shape(model_map)
    array, whole = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32
    added = [(f"dots1.{name}", [11, 11, 10, 0], array, whole) for name in ("rope.dimension_sections", "some.layers")]
    write_probe(replace(shape, metadata=(*shape.metadata, *added)), probe, 2)
    fields = gguf.GGUFReader(probe).fields
    assert fields["dots1.rope.dimension_sections"].contents() == [11, 11, 10, 0]
    assert fields["dots1.some.layers"].contents() == [11, 11]


def test_a_whole_model_is_computed_as_its_parts_say(tmp_path: Path) -> None:
    """The time of all blocks, of those of two probes."""
    write_moe_model(tmp_path / "model.gguf", n_layer=11)
    with ModelMap(tmp_path / "model.gguf") as model_map:
        shape = read_shape(model_map)
    small, large = shape.sizes()
    assert (small, large) == (2, 6)  # the first block is dense
    found = machine.extrapolated(shape, {small: (2e-3, 1e-4, 0.1), large: (6e-3, 5e-4, 0.2)})
    assert found.decode_seconds == pytest.approx(11e-3)
    assert found.prefill_seconds == pytest.approx(10e-4)


def test_a_made_up_routing_takes_different_experts_and_likes_popular_ones() -> None:
    random = np.random.default_rng(1)
    popularity = np.stack([np.r_[np.full(8, 20.0), np.ones(24)]] * 3)
    experts = made_up_experts(random, popularity, 4, 300)
    assert experts.shape == (300, 3, 4)
    assert all(len(set(chosen)) == 4 for chosen in experts.reshape(-1, 4).tolist())
    assert (experts < 8).mean() > 0.6


def test_the_assumed_routing_is_hit_about_as_often_as_a_real_one(small_moe: Path) -> None:
    """Within 3 points of what the default policy hits on this model's held-out text (docs/measurements/eviction.md)."""
    with ModelMap(small_moe) as model_map:
        assumed = routing_of(model_map, None)
        assert not assumed.observed and "assumed" in assumed.source
        for budget, measured in (("25%", 0.594), ("40%", 0.752), ("60%", 0.895)):
            settings = ReplaySettings(budget=budget, read_bandwidth=1e7, n_warm_tokens=544, as_decode=False)
            assert abs(replay(model_map, assumed.recording, settings).hit_rate - measured) < 0.03


def test_estimates_grow_with_the_budget_and_end_at_the_resident_speed(tmp_path: Path, headers) -> None:
    path = tmp_path / "model.gguf"
    headers.MODELS["olmoe-1b-7b"](path).close()
    compute = Compute(decode_seconds=0.04, prefill_seconds=0.01, start_seconds=0.5)
    with ModelMap(path) as model_map:
        advisor = estimator(model_map, compute, bandwidth=1e9)
        low, middle, all_of_it = (advisor.estimate(budget) for budget in ("25%", "60%", "100%"))
        fast = estimator(model_map, compute, bandwidth=4e9).estimate("25%")
    assert low.decode_rate < middle.decode_rate < all_of_it.decode_rate
    assert all_of_it.decode_rate == pytest.approx(25, rel=0.01)
    assert low.hit_rate < middle.hit_rate < all_of_it.hit_rate
    assert low.first_token_seconds > 0.01 * 512 + 0.5
    # What is read takes the bytes' time at least, and no more than that beside the computing.
    reading = low.bytes_per_token / 1e9
    assert max(0.04, reading) <= 1 / low.decode_rate <= 0.04 + reading
    assert fast.decode_rate > low.decode_rate and fast.bytes_per_token == pytest.approx(low.bytes_per_token, rel=0.2)


def test_several_devices_are_one_with_the_memory_of_all(small_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"A": [12e9, 1e9, 2e9, 8e9, 40e9], "B": [6e9, 1e9, 2e9, 2e9, 10e9]}
    free = {"A": 3 * GiB, "B": GiB}

    def find(names: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, free_bytes=lambda name=name: free[name], total_bytes=lambda: 4 * GiB,
                                shares_memory=False)
                for name in names.split(",")]

    monkeypatch.setattr(where, "find_devices", find)
    monkeypatch.setattr(where, "rates_of", lambda device, *_: rates[device.name])
    with ModelMap(small_moe) as model_map:
        one, other, both = (where.measured(names, model_map, 2) for names in ("A", "B", "A,B"))
        assert (both.name, both.number, both.total_bytes, both.free_bytes) == ("A, B", 2, 8 * GiB, 4 * GiB)
        # Three quarters of the layers at the speed of the one.
        for what in ("link", "decode", "prefill"):
            seconds = [1 / getattr(device.speed, what) for device in (one, other, both)]
            assert seconds[2] == pytest.approx(0.75 * seconds[0] + 0.25 * seconds[1])
        assert (one.speed.decode, one.speed.prefill, one.speed.link) == (8, 20, 12e9)
        rates |= {"slow": [6e9, 1e9, 2e9, 5e8, 1e9], "full": rates["A"]}
        free |= {"slow": GiB, "full": 0}
        monkeypatch.setattr(where, "find_devices", lambda setting: find("A,slow" if setting == "auto" else setting))
        assert where.measured("auto", model_map, 2) == one, "what computes later than the processor is left out"
        assert where.measured("full", model_map, 2).free_bytes == 0
        monkeypatch.setattr(where, "find_devices", find)
        room = where.rest_for_experts(replace(both, free_bytes=600 * MiB), model_map, 0, 0)
        assert room == model_map.info.expert_bytes  # behind a margin of 256 MiB each
        with pytest.raises(PyorchError, match="512 MiB stay free"):
            where.rest_for_experts(replace(both, free_bytes=515 * MiB), model_map, 0, 0)


def test_a_device_that_shares_memory_has_experts_where_it_is_told(
    small_moe: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, free_bytes=lambda: GiB, total_bytes=lambda: GiB, shares_memory=True)]

    monkeypatch.setattr(devices, "find_devices", find)
    monkeypatch.setattr(where, "find_devices", find)
    monkeypatch.setattr(where, "rates_of", lambda *_: [1e10, 1e9, 1e9, 7e9, 7e9])
    options = ("--compute-ms", "20:5", "--read-bandwidth", "1GB/s", "--budget", "50%", "--json")
    found = []
    for told in ((), ("--vram-budget", "30%")):
        assert main(["advise", str(small_moe), *options, "--memory", "4GiB", "--device", "Vulkan0", *told]) == 0
        found.append([(estimate["budget_bytes"], estimate["vram_bytes"])
                      for estimate in json.loads(capsys.readouterr().out)["estimates"]])
    with ModelMap(small_moe) as model_map:
        experts, half, all_of_them = model_map.info.expert_bytes, *(
            Budget.parse(share).resolve(model_map.info) for share in ("50%", "100%"))
    assert found[0][1:] == [(half, 0), (all_of_them, 0)]
    assert found[0][0] == found[1][0] == (all_of_them, 0), "without it"
    some = pytest.approx(experts * 0.3, abs=1)
    assert found[1][1:] == [(half, some), (all_of_them, some)]


def test_estimates_with_a_device_say_where_experts_are_and_how_fast_the_device_makes_it(small_moe: Path) -> None:
    compute = Compute(decode_seconds=0.04, prefill_seconds=0.01, start_seconds=0.5)
    with ModelMap(small_moe) as model_map:
        fast, slow, asked = (
            Estimator(model_map, routing_of(model_map, None), compute, 1e9, 64, PredictorFile(),
                      DeviceSpeed(link, 8.0, 8.0, "given", layer_seconds))
            for link, layer_seconds in ((1e10, 0.0), (1e5, 0.0), (1e10, 0.001)))
        alone = fast.estimate("40%")
        some, more, all_of_it = (fast.estimate("40%", vram_budget) for vram_budget in ("20%", "60%", "100%"))
        behind_a_slow_link, with_trips = slow.estimate("40%", "20%"), asked.estimate("40%", "100%")
        assert asked.estimate("40%").decode_rate == alone.decode_rate  # without the device there are none
        bandwidth = 8 * sum(token_bytes(model_map)) / 0.04
        assert given(None, 1e9, bandwidth, model_map, compute).speed.decode == pytest.approx(8)
    assert alone.on_device == alone.vram_bytes == 0 and alone.in_memory == alone.hit_rate
    for estimate in (alone, some, more, all_of_it):
        assert estimate.on_device + estimate.in_memory + estimate.read == pytest.approx(1)
    assert 0 < some.on_device < more.on_device < all_of_it.on_device
    assert alone.read > some.read > more.read
    assert alone.decode_rate < some.decode_rate < more.decode_rate < all_of_it.decode_rate
    assert all_of_it.decode_rate == pytest.approx(8 / 0.04, rel=0.1)
    assert 1 / with_trips.decode_rate - 1 / all_of_it.decode_rate == pytest.approx(8 * 0.001)  # of eight layers
    assert alone.first_token_seconds > all_of_it.first_token_seconds > 0.5 + 64 * 0.01 / 8
    assert behind_a_slow_link.decode_rate < some.decode_rate and behind_a_slow_link.on_device == some.on_device


def test_what_is_measured_is_kept_until_it_is_asked_for_again(tmp_path: Path, cache: Path, quick) -> None:
    write_moe_model(tmp_path / "model.gguf", n_layer=2)  # one layer with experts: one probe
    steps: list[str] = []
    with ModelMap(tmp_path / "model.gguf") as model_map:
        def compute(again: bool = False) -> Compute:
            return machine.Machine(model_map, 1, lambda step, done, total: steps.append(step), again).compute()

        first = compute()
        n_steps = len(steps)
        assert n_steps == 1 and compute() == first and len(steps) == n_steps
        assert compute(again=True) != first
    assert list(tmp_path.glob(".pyorch-probe*")) == []


def test_what_was_measured_beside_other_work_is_measured_again_on_a_quieter_machine(
    tmp_path: Path, cache: Path, quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_moe_model(tmp_path / "model.gguf", n_layer=2)
    steps: list[str] = []
    with ModelMap(tmp_path / "model.gguf") as model_map:
        def compute(load: float) -> Compute:
            monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
            return machine.Machine(model_map, 1, lambda step, done, total: steps.append(step)).compute()

        busy = compute(4.0)
        assert busy.load == 4.0 and len(steps) == 1
        assert compute(2.5) == compute(5.0) == busy and len(steps) == 1
        assert compute(1.0).load == 1.0 and len(steps) == 2
        quiet = compute(0.1)
        assert quiet.load == 0.1 and compute(0.0) == compute(9.0) == quiet and len(steps) == 3


def test_what_a_killed_command_left_of_a_probe_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".pyorch-probe.abcdefgh.part").mkdir()
    with machine._directory_for_probes(tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory]
    assert list(tmp_path.iterdir()) == []


def test_a_second_shape_that_reads_weights_as_fast_is_measured_in_one_round(
    tmp_path: Path, cache: Path, quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "N_ROUNDS", 2)

    def rounds(n_expert: int, similar: float, again: bool = False) -> int:
        monkeypatch.setattr(machine, "SIMILAR", similar)
        steps: list[str] = []
        path = tmp_path / f"{n_expert}.gguf"
        write_moe_model(path, n_layer=2, n_expert=n_expert)
        with ModelMap(path) as model_map:
            machine.Machine(model_map, 1, lambda step, done, total: steps.append(step), again).compute()
        return len(steps)

    as_fast, never = 1e9, 0.0
    assert rounds(6, as_fast) == 2  # nothing to compare with
    assert rounds(7, never) == 2
    assert rounds(8, as_fast) == 1
    assert rounds(8, as_fast, again=True) == 2


def test_what_is_said_of_computing_is_not_measured(
    small_moe: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.Machine, "compute", None)
    given = ("--read-bandwidth", "1GB/s", "--memory", "4GiB", "--budget", "30%", "--json")
    assert main(["advise", str(small_moe), "--compute-ms", "20:5", *given]) == 0
    compute = json.loads(capsys.readouterr().out)["compute"]
    assert (compute["decode_seconds"], compute["prefill_seconds"]) == (0.02, 0.005)
    assert main(["advise", str(small_moe), "--compute-ms", "20:x", *given]) == 2
    assert '"x" is not a number above 0' in capsys.readouterr().err


def test_a_native_pack_spares_the_repacking_that_waiting_does_not_hide(
    tmp_path: Path, headers, small_moe: Path, small_moe_q4: Path
) -> None:
    for model in (small_moe, small_moe_q4):
        with ModelMap(model) as model_map:
            repacked = any(role.layout != "plain" for role in model_map.layers[0].roles)
            assert (machine.Machine(model_map, 1, print).repacking() > 0) == repacked
    path = tmp_path / "model.gguf"
    headers.MODELS["olmoe-1b-7b"](path).close()
    with ModelMap(path) as model_map:
        advisor = estimator(model_map, Compute(0.04, 0.01, 0.5), bandwidth=1e12)  # nothing is waited for
        base = advisor.estimate("25%")
        advisor.fastest_seconds = lambda vram_budget: 0.02
        rates = [gains(model_map, advisor, base, 1e12, seconds / base.bytes_per_token, 2)[0].decode_rate
                 for seconds in (0.0, 0.02)]
    assert rates[0] == pytest.approx(base.decode_rate)
    assert 1 / rates[0] - 1 / rates[1] == pytest.approx(0.01, rel=0.05)  # of two cores


def test_the_disk_of_a_header_is_measured_on_a_file_that_has_bytes(tmp_path: Path, cache: Path, quick, headers) -> None:
    header = headers.Header(tmp_path / "model.gguf", "olmoe", 2, 256, 4, 4, 512)
    header.experts(8, 2, 256)
    headers.around(header, 256, 256, headers.Types.F16, headers.Types.F16)
    for il in range(2):
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            header.add(f"blk.{il}.{name}.weight", headers.Types.F32, 256)
        for name in ("q", "k", "v", "output"):
            header.add(f"blk.{il}.attn_{name}.weight", headers.Types.F16, 256, 256)
        headers.experts(header, il, 8, 256, 256, headers.Types.F16, headers.Types.F16)
    header.close()
    with ModelMap(tmp_path / "model.gguf") as model_map:
        found = machine.Machine(model_map, 1, lambda *_: None).disk()
    assert found.how == "probe" and found.bytes_per_second > 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["model.gguf"]


def test_command_advises_from_a_trace_and_draws(
    small_moe: Path, tmp_path: Path, cache: Path, quick, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "pyorch/sizes.py").read_text()[:1500])
    trace = tmp_path / "some.trace"
    profile(small_moe, [text], trace, states=True, budget="100%", n_threads=1)
    begin = ["advise", str(small_moe), "--trace", str(trace), "--threads", "1"]
    assert main([*begin, "--budget", "30%,60%", "--plot", str(tmp_path / "pictures"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["budget"] for one in said["estimates"][:2]] == ["30%", "60%"]
    assert 0 < said["estimates"][0]["hit_rate"] < said["estimates"][1]["hit_rate"] < 1
    assert said["routing"].startswith(str(trace))
    assert {gain["sidecar"] for gain in said["gains"]} == {"pack", "predictor", "maps", "buddies"}
    assert said["command"].startswith(f"pyorch run {small_moe}")
    assert any("a load of 3.0" in note for note in said["notes"])
    assert (tmp_path / "pictures/advice.png").stat().st_size > 10_000
    assert main([*begin, "--read-bandwidth", "1GB/s", "--memory", "4GiB"]) == 0
    out = capsys.readouterr().out
    assert "a load of 3.0" in out  # then, and not now
    assert "1.00 GB/s (as given)" in out and "4096 MiB free (as given)" in out
    assert "run it with: pyorch run" in out and "--budget" in out.splitlines()[-1]
    tables = out[out.index("\nbudget  ") :].splitlines()[: 2 * 6]  # that of budgets, that of sidecars
    assert any(line.startswith("sidecar") for line in tables) and max(map(len, tables)) <= 80

    # What does not fit is not recommended, either.
    assert main([*begin, "--read-bandwidth", "1GB/s", "--memory", "8MiB"]) == 0
    out = capsys.readouterr().out
    assert "note: the model does not fit into the memory that is free" in out and "run it with" not in out

    # What gains nothing is not recommended, what gains much is.
    for bandwidth, worth in (("100GB/s", False), ("1MB/s", True)):
        assert main([*begin, "--budget", "30%", "--read-bandwidth", bandwidth]) == 0
        out = capsys.readouterr().out
        for command in ("pyorch pack", "pyorch buddies", "worth making", "pyorch prepare"):
            assert (command in out) == worth, (command, bandwidth)
        assert "tok/s at 30%" in out and "%)" in out and "1000%" not in out

    # With devices that are measured, and with one that is only said to be there.
    pair = [DeviceProcess(tmp_path / f"device-{i}.log") for i in range(2)]
    try:
        names = ",".join(device.name for device in pair)
        assert main([*begin, "--budget", "30%", "--device", names, "--vram-budget", "20%,1MiB", "--json"]) == 0
    finally:
        for device in pair:
            device.stop()
    said = json.loads(capsys.readouterr().out)
    assert said["device"]["name"].count("RPC") == said["device"]["number"] == 2
    assert said["device"]["speed"]["how"] == "measured"
    assert [one["vram_budget"] for one in said["estimates"]] == [None, "20%", "20%", "1MiB", "1MiB"]
    assert said["budget_names"] == ["auto", "30%", "auto", "30%", "auto"]
    # With so small experts trips take more than the device could save.
    assert "--device" not in said["command"] and any("the device gains nothing" in note for note in said["notes"])
    assert any("device of another process" in note for note in said["notes"])
    assert main([*begin, "--budget", "30%", "--vram", "1GiB", "--link-bandwidth", "12GB/s", "--vram-bandwidth",
                 "100GB/s", "--compute-ms", "400"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("\nVRAM ") :].splitlines()[1:5]
    assert [row.split()[:2] for row in table] == [["VRAM", "budget"], ["none", "auto"], *[["12", "MiB"]] * 2]
    assert "device of another process" not in out and out.endswith("--device auto -p TEXT\n")
    assert "uploads 12 GB/s" in out and "(given)" in out and max(map(len, table)) <= 80
    assert main([*begin, "--budget", "30%", "--device", "none", "--vram-budget", "50%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] is None
    assert main([*begin, "--budget", "30%", "--vram", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "uploads 25 GB/s" in out and "(assumed)" in out and "(PCIe 4 with 16 lanes), weights read at 250 GB/s" in out
    assert "e+" not in out and "each layer is assumed to cost another 0.25 ms on the device" in out
    assert main([*begin, "--vram", "200MiB", "--link-bandwidth", "1GB/s", "--vram-bandwidth", "1GB/s"]) == 2
    assert "200 MiB of device memory leave nothing for experts" in capsys.readouterr().err


@pytest.mark.parametrize("options, sentence", [
    (["--memory", "much"], '--memory: "much" is not understood'),
    (["--read-bandwidth", "fast"], '--read-bandwidth: "fast" is not understood'),
    (["--trace", "nowhere.trace"], "nowhere.trace cannot be read"),
    (["--budget", "1%"], "is below the floor"),
    (["--compute-ms", "0"], "is not a number above 0"),
    (["--vram", "much", "--link-bandwidth", "1GB/s"], '--vram: "much" is not understood'),
    (["--vram", "8GiB", "--vram-budget", "4GiB"], "give one of them"),
    (["--vram", "8GiB", "--link-bandwidth", "pcie9"], '--link-bandwidth: "pcie9" is not understood'),
    (["--link-bandwidth", "1GB/s"], "of which device?"),
    (["--device", "CUDA7"], "there is no device CUDA7"),
    (["--vram-budget", "auto"], "is known of a device that --device names"),
])
def test_mistakes_are_told_before_anything_is_measured(
    small_moe: Path, options: list[str], sentence: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", str(small_moe), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not cache.exists()


def test_the_memory_of_a_context_is_what_llama_cpp_says_and_its_log_is_not_shown(small_moe: Path) -> None:
    """In a process in which nothing else has read llama.cpp's log."""
    program = (
        "import sys\nfrom pyorch.advise.memory import context_bytes\nfrom pyorch.runtime.model_map import ModelMap\n"
        "with ModelMap(sys.argv[1]) as model_map:\n"
        "    print(context_bytes(model_map, 512, 1) - model_map.kv_bytes(512))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(small_moe)], capture_output=True, text=True,
                          timeout=HANG_SECONDS)
    assert done.stderr == "" and int(done.stdout) > 1 << 20  # compute buffers, beside the cache


def test_a_dense_model_is_refused_in_a_sentence(dense_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(dense_model)]) == 2
    assert "is a dense model" in capsys.readouterr().err


def test_script_of_headers_writes_what_inspect_reads(tmp_path: Path) -> None:
    path = tmp_path / "qwen3.gguf"
    subprocess.run([sys.executable, str(ROOT / "scripts/model_headers.py"), "qwen3-30b-a3b", "-o", str(path)],
                   check=True, timeout=HANG_SECONDS, env=os.environ)
    with ModelMap(path) as model_map:
        assert (len(model_map.layers), model_map.layers[0].n_expert, model_map.info.n_expert_used) == (48, 128, 8)


def test_a_pack_of_nibbles_is_expected_to_hold_more_and_to_read_less(headers, tmp_path: Path) -> None:
    header = headers.Header(tmp_path / "model.gguf", "olmoe", 2, 256, 4, 4, 512)
    header.experts(64, 4, 256)
    headers.around(header, 256, 256, headers.Types.F16, headers.Types.F16)
    for il in range(2):
        headers.experts(header, il, 64, 256, 256, headers.Types.BF16, headers.Types.BF16)
    header.close()
    with ModelMap(tmp_path / "model.gguf") as model_map:
        advisor = estimator(model_map, Compute(1e-6, 1e-6, 0.5), bandwidth=1e8)
        base = advisor.estimate("40%")
        pack = gains(model_map, advisor, base, 1e8, 0.0, 2)[0]
    assert pack.command.endswith("--codec auto") and "are read and kept in 77% of the bytes" in pack.why
    assert pack.decode_rate > base.decode_rate / 0.77  # more hits beside fewer bytes
