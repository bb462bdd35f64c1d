"""Replay: equal to what an engine counts beside llama.cpp, and exact where time can be computed by hand."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from devices import DeviceProcess
from models import CHECKPOINT

import pyorch
from pyorch.cli import main
from pyorch.convert import pack as packing
from pyorch.errors import BudgetError, PyorchError
from pyorch.library.choices import policies
from pyorch.llama.context import Context
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.statistics import Stats
from pyorch.settings.budget import Budget
from pyorch.settings.prefetch import Prefetch
from pyorch.traces.expert_maps import maps_from_trace
from pyorch.traces.file import Trace
from pyorch.traces.recorder import profile
from pyorch.traces.recording import Recording
from pyorch.traces.replay import Replayed, ReplaySettings, replay
from pyorch.traces.routers import read_router
from scripts import replay as program

N_LAYERS, N_EXPERT, N_USED = 8, 64, 6
LAYERS = tuple(range(N_LAYERS))
TEXT = CHECKPOINT / "text-test.txt"


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory):
    process = DeviceProcess(tmp_path_factory.mktemp("device") / "log")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def trace(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 tokens of prose in requests of 100, with all that a trace can hold."""
    path = tmp_path_factory.mktemp("trace") / "small.trace"
    profile(small_moe, [TEXT], path, n_tokens=300, router="full", states=True, budget="100%", n_ctx=100, n_threads=1)
    return path


@pytest.fixture(scope="module")
def recording(trace: Path, model_map: ModelMap) -> Recording:
    return Recording.from_trace(Trace(trace), model_map)


def decode(path: Path, budget: str, policy: str, n_tokens: int = 150, **options: str) -> tuple[Stats, Recording]:
    """What an engine counts while it decodes token by token, and the routing that it sees. Its memory begins empty, as
    that of a replay does."""
    seen = []
    with pyorch.load(path, budget=budget, policy=policy, n_ctx=256, n_threads=1, warm=False,
                     **{"prefetch": "none", **options}) as model:
        tokens = model.llama.tokenize(TEXT.read_bytes(), add_bos=False)[:n_tokens]
        model.engine.set_observer(
            lambda routing: seen.append((routing.il, routing.experts[0], routing.weights[0], routing.residuals[0]))
        )
        model.reset_stats()
        with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
            for token in tokens:
                context.decode([token])
            model.engine.wait_idle()  # what is predicted from the last layer is ordered, too
        model.engine.set_observer(None)
        stats = model.engine.stats()
    assert [il for il, *_ in seen] == list(LAYERS) * n_tokens
    experts, weights, states = (np.array([one[i] for one in seen]).reshape(n_tokens, N_LAYERS, -1) for i in (1, 2, 3))
    return stats, Recording(LAYERS, N_EXPERT, experts, weights, np.zeros(n_tokens), states=states)


@pytest.mark.parametrize("budget", ["25%", "50%"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_replay_counts_what_an_engine_counts(small_moe: Path, model_map: ModelMap, policy: str, budget: str) -> None:
    real, routing = decode(small_moe, budget, policy)
    simulated = replay(model_map, routing, ReplaySettings(policy, budget=budget)).stats
    for name in ("hits", "misses", "loads", "evictions", "bytes_read", "tokens", "layer_passes", "resident_experts"):
        assert getattr(simulated, name) == getattr(real, name), name
    assert 0.3 < simulated.hit_rate < 0.95


# Forecasts: host memory may lack what they name, and then nothing is uploaded before the layer comes.
@pytest.mark.parametrize(("policy", "budget", "vram_budget", "misses", "ahead"), [
    ("lru", "50%", "20%", "processor", 0), ("learned", "50%", "20%", "processor", 2),
    ("lfu", "25%", "30%", "upload", 0), ("lfu", "100%", "30%", "upload", 2),
    ("finemoe", "100%", "40%", "upload", 0), ("lru", "100%", "100%", "processor", 0),
])
def test_replay_counts_what_an_engine_with_a_device_counts(
    small_moe: Path, model_map: ModelMap, device: DeviceProcess, policy: str, budget: str, vram_budget: str,
    misses: str, ahead: int,
) -> None:
    options = {"vram_budget": vram_budget, "device_misses": misses, "device_ahead": ahead,
               "prefetch": Prefetch.parse("quasi-hidden:1:0" if ahead else "none")}
    # An engine that lacks experts keeps a sixteenth for rows of the processor.
    size = Budget.parse(vram_budget).amount.of(model_map.info.expert_bytes)
    all_of = model_map.info.expert_bytes  # where all have slots, each is read before the first token
    with_rows = size if size == all_of else size + size // 15
    real, routing = decode(small_moe, budget, policy, 60, device=device.name, **{**options, "vram_budget": with_rows})
    simulated = replay(model_map, routing, ReplaySettings(policy, budget=budget, **options)).stats
    # What is uploaded behind a layer is held in host memory until it is there, and something else may have to go.
    exact = misses == "upload" or budget == "100%"
    # What is uploaded for nothing, and of what host memory is asked too late, depends on how long uploads take; what
    # host memory reads ahead, on how long reads do.
    moved = ("device_loads", "device_bytes", *(("hits",) if exact else ()))
    for name in ("device_hits", "device_misses", "device_computed", "device_evictions", "device_ahead",
                 "device_ahead_hits", *(moved if not ahead else ()),
                 *(("misses", "loads", "evictions", "bytes_read") if exact and not ahead and size != all_of else ())):
        assert getattr(simulated, name) == getattr(real, name), name
    assert simulated.device_hits > 0 and (simulated.device_loads > 0) == (size != all_of)
    assert (0 < simulated.device_ahead_hits < simulated.device_ahead) == (ahead > 0)


def test_prompts_pass_through_areas_and_leave_slots_as_they_are(model_map: ModelMap, recording: Recording) -> None:
    options = dict(policy="lru", budget="100%", as_decode=False)
    wide, narrow = (
        replay(model_map, recording, ReplaySettings(vram_budget=size, **options)).stats for size in ("80%", "20%"))
    assert wide.device_bytes == wide.device_misses * model_map.layers[0].expert_bytes > 0
    assert wide.device_computed == wide.device_misses == narrow.device_misses
    assert wide.device_hits == wide.device_loads == narrow.device_bytes == narrow.device_computed == 0


def test_an_upload_takes_the_time_of_the_link(model_map: ModelMap) -> None:
    """Two tokens as below, read in no time. A router takes 4 ms, computing in a layer 4, an upload 1 ms for each
    expert. Token 1: both are uploaded and computed: 4 + 2 + 4. Token 2: one is."""
    expert_bytes = model_map.layers[0].expert_bytes
    replayed = replay(model_map, two_tokens(), ReplaySettings(
        "lru", budget="50%", compute_ms=8, route_share=0.5, read_bandwidth=math.inf, vram_budget=10 * expert_bytes,
        device_misses="upload", link_bandwidth=1000 * expert_bytes))
    assert replayed.seconds == pytest.approx(0.010 + 0.009)
    assert (replayed.stats.device_hits, replayed.stats.device_misses, replayed.stats.device_bytes) == (
        1,
        3,
        3 * expert_bytes,
    )


@pytest.mark.parametrize(("misses", "expected_ms"), [
    ("processor", 1 + 4 + 1 + 2),   # it computes both experts, then one, while the device computes the other
    ("upload", 1 + 1 + 1 + 1),      # the device computes all
])
def test_both_sides_compute_at_once_each_at_its_speed(model_map: ModelMap, misses: str, expected_ms: float) -> None:
    """Two tokens as below, read and uploaded in no time. On a device that is four times as fast as the processor: its
    part before the router takes 1 ms of 4, and an expert half a millisecond of 2."""
    replayed = replay(model_map, two_tokens(), ReplaySettings(
        "lru", budget="50%", compute_ms=8, route_share=0.5, read_bandwidth=math.inf, device_misses=misses,
        vram_budget=10 * model_map.layers[0].expert_bytes, device_speed=4))
    assert replayed.seconds == pytest.approx(expected_ms / 1000)


# Time


def two_tokens() -> Recording:
    """In the first layer alone, each of two experts: 3 and 5, then 1 and 3."""
    experts = np.array([[[5, 3]], [[3, 1]]])
    return Recording((0,), N_EXPERT, experts, np.full(experts.shape, 0.5), np.zeros(2))


def by_hand(model_map: ModelMap, prefetch: str, **disk: float) -> Replayed:
    settings = ReplaySettings("lru", Prefetch.parse(prefetch), "50%", compute_ms=8, route_share=0.5, **disk)
    return replay(model_map, two_tokens(), settings)


@pytest.mark.parametrize("disk", ["bandwidth", "latency"])
def test_time_is_what_it_is_by_hand(model_map: ModelMap, disk: str) -> None:
    """A matrix takes 1 ms to read and 2/3 ms to compute with, a router 4 ms.

    Token 1: routed at 4; its matrices arrive at 5, 6, .. 10, in the order of the kernels, each before the one before
    it was computed with: 10 + 2/3. Token 2: routed at 14 2/3; expert 3 is there, the matrices of expert 1 arrive at
    15 2/3, 16 2/3 and 17 2/3. Expert 3 goes first, so only the first of them is waited for, 1/3 ms: 19.
    """
    one_ms = model_map.layers[0].expert_bytes / 3 * 1000
    replayed = by_hand(model_map, "none", **(
        dict(read_bandwidth=one_ms) if disk == "bandwidth" else dict(read_bandwidth=math.inf, read_latency_s=0.001)))
    assert replayed.seconds == pytest.approx(0.019) and replayed.tpot_ms == pytest.approx(9.5)
    assert replayed.stall_ms == pytest.approx((1 + 5 / 3 + 1 / 3) / 2)
    assert replayed.disk_busy == pytest.approx(9 / 19)
    assert (replayed.stats.hits, replayed.stats.misses, replayed.n_decoded) == (1, 3, 2)


def test_a_disk_that_stands_still_reads_as_late_as_by_hand(model_map: ModelMap) -> None:
    """It stands still from 6 to 8, 14 to 16 and 22 to 24 ms. Token 1, routed at 4: its matrices arrive at 5, 6, 9,
    10, 11
    and 12: 12 2/3. Token 2, routed at 16 2/3: those of expert 1 arrive at 17 2/3, which is waited for, and on: 21."""
    replayed = by_hand(
        model_map, "none", read_bandwidth=model_map.layers[0].expert_bytes / 3 * 1000, pause_ms=2, pause_every_ms=8
    )
    assert replayed.seconds == pytest.approx(0.021)


def test_what_is_read_ahead_is_there_as_early_as_by_hand(model_map: ModelMap) -> None:
    """Before the first router, 3 is read until 3 ms, and 5 until 6 ms, a matrix each before it is needed."""
    replayed = by_hand(model_map, "oracle:1", read_bandwidth=model_map.layers[0].expert_bytes / 3 * 1000)
    assert replayed.seconds == pytest.approx(0.016) and replayed.stall_ms == 0
    assert (replayed.useful, replayed.late, replayed.wasted) == (2, 1, 0)  # 5 was on its way when it was needed
    assert (replayed.stats.hits, replayed.stats.misses) == (3, 1)
    assert (replayed.stats.prefetch_loads, replayed.stats.prefetch_hits, replayed.stats.useful_share) == (3, 3, 1)
    assert replayed.useful_bytes == 2 * replayed.late_bytes == 2 * model_map.layers[0].expert_bytes
    assert replayed.recall == pytest.approx([1.0])


def test_a_forecast_that_takes_long_comes_late(model_map: ModelMap) -> None:
    disk = dict(read_bandwidth=model_map.layers[0].expert_bytes / 3 * 1000)
    soon, never = (by_hand(model_map, "oracle:1", predict_ms=ms, **disk) for ms in (1, 5))
    assert 16 < 1000 * soon.seconds < 1000 * never.seconds
    # The first came after its layer, for which it was of no use; the second too, and names what is there by then.
    assert never.seconds == pytest.approx(by_hand(model_map, "none", **disk).seconds) and never.useful == 0


def test_stalls_grow_as_the_disk_slows(model_map: ModelMap, recording: Recording) -> None:
    stalls = [replay(model_map, recording, ReplaySettings(budget="25%", read_bandwidth=rate)).stall_ms
              for rate in (math.inf, 1e9, 1e8, 1e7)]
    assert stalls[0] == 0 and stalls == sorted(stalls) and stalls[2] < stalls[3] / 5


def test_the_oracle_hides_what_the_disk_can_read_meanwhile(model_map: ModelMap, recording: Recording) -> None:
    disk = ReplaySettings(budget="100%", read_bandwidth=1e8, route_share=0.5)
    oracle = replay(model_map, recording, replace(disk, prefetch=Prefetch("oracle", 2)))
    assert oracle.stall_ms == 0 and oracle.hit_rate == 1 and oracle.wasted == 0
    assert oracle.tpot_ms == pytest.approx(disk.compute_ms)
    assert replay(model_map, recording, disk).stall_ms > 0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("read_ms", "pauses"), [(0.5, (0, 0)), (6.4, (0, 0)), (6.4, (100, 500)), (50, (0, 0))])
def test_reading_ahead_loses_on_no_disk(
    model_map: ModelMap, recording: Recording, read_ms: float, pauses: tuple[float, float], batch: int
) -> None:
    """An expert takes so many ms to read, a token 30 to compute."""
    for budget in ("25%", "60%"):
        settings = ReplaySettings(
            budget=budget, read_bandwidth=1000 * model_map.layers[0].expert_bytes / read_ms, batch=batch,
            pause_ms=pauses[0], pause_every_ms=pauses[1])
        none, auto = (
            replay(model_map, recording, replace(settings, prefetch=Prefetch(name))) for name in ("none", "auto")
        )
        assert auto.seconds <= 1.01 * none.seconds
        assert auto.seconds < 0.97 * none.seconds or read_ms != 6.4 or batch > 1


# Policies and predictors


@pytest.mark.parametrize("budget", ["20%", "50%"])
def test_no_policy_hits_more_often_than_beladys(model_map: ModelMap, recording: Recording, budget: str) -> None:
    rates = {policy: replay(model_map, recording, ReplaySettings(policy, budget=budget)).hit_rate
             for policy in policies()}
    assert rates.pop("belady") > max(rates.values()) + 0.02


def test_routers_of_the_file_are_those_of_the_graph(small_moe: Path, model_map: ModelMap) -> None:
    with pyorch.load(small_moe, budget="50%", prefetch="none", n_ctx=64, n_threads=1) as model:
        with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
            context.decode([1])
        for il in LAYERS:
            graph, file = model.engine.router(il), read_router(model_map, il)
            assert graph.arrays().keys() == file.arrays().keys()
            assert (graph.eps, graph.gating, graph.n_used) == (file.eps, file.gating, file.n_used)
            for name, array in graph.arrays().items():
                assert np.array_equal(array, file.arrays()[name])


def test_maps_are_searched_and_left_as_they_were(model_map: ModelMap, recording: Recording, trace: Path) -> None:
    maps = maps_from_trace(Trace(trace), model_map, capacity=1000)
    settings = ReplaySettings(prefetch=Prefetch("expert-map", 2, 0.2), budget="50%")
    known = replay(model_map, recording, settings, maps)
    unknown = replay(model_map, recording, settings)
    assert np.nanmean(known.recall) > np.nanmean(unknown.recall) > 0
    assert maps.n_maps == 300
    # A store that has this very iteration finds it by its embedding or its first layers.
    again = replay(model_map, recording, ReplaySettings(prefetch=Prefetch("expert-map", 1, 0.2)), maps)
    assert np.nanmean(again.recall) > 0.8


def test_a_replay_is_the_same_each_time(model_map: ModelMap, recording: Recording) -> None:
    settings = ReplaySettings("finemoe", Prefetch("quasi-hidden", 2, 0.4), "30%", 1e8, batch=2)
    a, b = (replay(model_map, recording, settings) for _ in range(2))
    assert (a.seconds, a.stall_ms, a.useful, a.late, a.wasted) == (b.seconds, b.stall_ms, b.useful, b.late, b.wasted)
    assert a.useful > 0 and a.wasted > 0 and np.array_equal(a.rank_hits, b.rank_hits)
    assert replace(a.stats, read_ns=0) == replace(b.stats, read_ns=0)


# What is played


def test_a_schedule_plays_each_token_once_and_requests_side_by_side() -> None:
    request = np.repeat([4, 5, 6], [600, 4, 3])
    phase = np.r_[np.zeros(598), 1, 1, 0, 1, 1, 1, 1, 1, 1]
    recording = Recording((0,), 8, np.zeros((607, 1, 2)), np.ones((607, 1, 2)), request, phase)

    def ubatches(batch: int, as_decode: bool) -> list[tuple[list[int], bool]]:
        plan = recording.schedule(batch, as_decode)
        return [(plan.order[a:b].tolist(), bool(d)) for a, b, d in zip(plan.begin, plan.begin[1:], plan.decode)]

    assert ubatches(1, True) == [([t], True) for t in range(607)]
    prompt = [(list(range(512)), False), (list(range(512, 598)), False)]
    assert ubatches(1, False) == [*prompt, ([598], True), ([599], True), ([600], False),
                                  *(([t], True) for t in range(601, 607))]
    assert ubatches(2, False) == [*prompt, ([600], False), ([598, 601], True), ([599, 602], True), ([603, 604], True),
                                  ([605], True), ([606], True)]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_recording_is_divided_where_requests_that_go_together_are(batch: int) -> None:
    request = np.repeat([4, 5, 6, 7], [9, 4, 3, 6])
    n = len(request)
    recording = Recording((0,), 30, np.arange(n).reshape(n, 1, 1), np.ones((n, 1, 1)), request)
    steps = recording.schedule(batch)
    for n_first in range(n):
        first, rest = recording.divided(n_first, batch)
        assert len(first) <= n_first < len(first) + batch and sorted([*first.experts, *rest.experts]) == list(range(n))
        at = int(np.flatnonzero(steps.begin == len(first))[0])
        played = rest.schedule(batch)
        assert np.array_equal(rest.experts[played.order].ravel(), steps.order[len(first) :])
        assert np.array_equal(played.begin, steps.begin[at:] - len(first))
    assert recording.n_requests == 4


def test_prompts_are_played_as_prompts_if_asked(model_map: ModelMap, recording: Recording) -> None:
    replayed = replay(model_map, recording, ReplaySettings(as_decode=False, prefill_ms=2.0, read_bandwidth=math.inf))
    assert replayed.n_decoded == 0 and replayed.n_tokens == len(recording) and replayed.seconds == pytest.approx(0.6)
    assert math.isnan(replayed.tpot_ms) and replayed.stats.layer_passes == 3 * N_LAYERS


def test_a_prompt_whose_layers_do_not_fit_is_streamed(model_map: ModelMap, recording: Recording) -> None:
    floor = model_map.info.floor_bytes
    stats = replay(model_map, recording, ReplaySettings(as_decode=False, budget=floor)).stats
    assert stats.loads == stats.misses > 13 * stats.layer_passes, "more than the budget holds"
    assert stats.bytes_read == stats.misses * model_map.layers[0].expert_bytes
    assert stats.peak_bytes <= floor


def test_what_is_warmed_up_is_not_counted(model_map: ModelMap, recording: Recording) -> None:
    whole = replay(model_map, recording, ReplaySettings(budget="100%"))
    rest = replay(model_map, recording, ReplaySettings(budget="100%", n_warm_tokens=100))
    assert rest.n_tokens == 200 and rest.hit_rate > whole.hit_rate and rest.stats.tokens == 200 * N_LAYERS


def test_several_requests_share_the_experts_of_a_step(model_map: ModelMap, recording: Recording) -> None:
    settings = ReplaySettings(budget="100%", read_bandwidth=math.inf, route_share=0.0)
    replayed = replay(model_map, recording, replace(settings, batch=3))
    distinct = [len(np.unique(recording.experts[[t, 100 + t, 200 + t], layer])) for t in range(100) for layer in LAYERS]
    assert replayed.stats.layer_passes == 100 * N_LAYERS and replayed.stats.hits + replayed.stats.misses == sum(
        distinct
    )
    assert replayed.tpot_ms == pytest.approx(settings.compute_ms * np.mean(distinct) / N_USED)
    assert replayed.tokens_per_second == pytest.approx(3000 / replayed.tpot_ms)


def test_compressed_experts_are_decoded_in_their_time_and_stay_in_pools(
    small_moe: Path, recording: Recording, trace: Path, tmp_path: Path, capsys
) -> None:
    model = Path(shutil.copy(small_moe, tmp_path / "model.gguf"))
    command = [str(model), str(trace), "--policy", "lfu", "--budget", "40%", "--read-bandwidth", "1GB/s",
               "--decode-bandwidth", "10MB/s"]
    assert program.main(command) == 2
    assert "has no compressed pack: make one with `pyorch pack" in capsys.readouterr().err
    pack = packing.pack(model, codec="table").path
    at_once = ReplaySettings("lfu", budget="40%", read_bandwidth=math.inf)
    slow = replace(at_once, decode_bandwidth=1e7)
    with ModelMap(model) as packed:
        packed.attach_pack(pack)
        results = [replay(packed, recording, settings) for settings in (
            at_once, slow, replace(slow, n_decoders=2), replace(slow, pools="0.6,0.4,0,0"))]
    waited = [result.seconds - results[0].seconds for result in results]
    decoded = results[1].stats.decoded_bytes
    assert waited[1] == pytest.approx(decoded / slow.decode_bandwidth, rel=0.5) and 0 < waited[2] < waited[1]
    full, pools = results[1].stats, results[3].stats
    assert 0 < pools.compressed_hits < pools.misses and full.compressed_hits == 0
    n_read = pools.misses - pools.compressed_hits
    assert pools.bytes_read / n_read == pytest.approx(full.bytes_read / full.misses, rel=0.02), "nothing else is read"
    assert all(result.stats.peak_bytes <= result.stats.budget_bytes for result in results)
    assert program.main([*command, "--pools", "0.6,0.4,0,0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pools"] == "0.6,0.4,0,0" and report["decode_bandwidth"] == 1e7
    assert report["rows"][0]["part_rate"] == pytest.approx(pools.compressed_hits / (pools.hits + pools.misses))
    assert program.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "compressed pack: pools 1,0,0,0; decoded with 0.01 GB/s by each of" in "\n".join(lines[:5])
    assert lines[-1].endswith("0.0%")


def test_tokens_of_a_batch_that_share_an_expert_share_its_recovery(
    small_moe: Path, recording: Recording, tmp_path: Path
) -> None:
    model = Path(shutil.copy(small_moe, tmp_path / "model.gguf"))
    pack = packing.pack(model, codec="table").path
    one = recording.part(slice(100))
    alike = Recording(LAYERS, N_EXPERT, np.tile(one.experts, (3, 1, 1)), np.tile(one.weights, (3, 1, 1)),
                      np.repeat([0, 1, 2], 100))
    settings = ReplaySettings("lfu", budget="40%", pools="0.1,0.9,0,0", read_bandwidth=1e9, decode_bandwidth=1e9)
    with ModelMap(model) as packed:
        packed.attach_pack(pack)
        alone = replay(packed, one, settings).stats
        together = replay(packed, alike, replace(settings, batch=3)).stats
        apart = replay(packed, recording, replace(settings, batch=3)).stats
    assert together.decoded_bytes == alone.decoded_bytes > 0 and together.bytes_read == alone.bytes_read
    assert together.compressed_hits == alone.compressed_hits > 0
    assert apart.compressed_hits > apart.misses / 4, "layers have what several sequences need at once"
    assert apart.peak_bytes <= apart.budget_bytes


# Errors and the command


@pytest.mark.parametrize("settings, error, sentence", [
    (dict(policy="random"), PyorchError, 'policy "random" is not known'),
    (dict(budget="1%"), BudgetError, "is below the floor"),
    (dict(budget="auto"), BudgetError, "needs a size or a share"),
    (dict(pause_ms=5.0, pause_every_ms=5.0), PyorchError, "pauses shorter than their period"),
    (dict(prefetch=Prefetch("oracle", 9)), PyorchError, "distance 9 is not from 1 to 8"),
    (dict(prefetch=Prefetch("hybrid", 1)), PyorchError, "needs an estimator"),
    (dict(read_bandwidth=0.0), PyorchError, "a bandwidth above 0"),
    (dict(batch=0), PyorchError, "0 requests together"),
    (dict(n_warm_tokens=300), PyorchError, "leave none to count"),
])
def test_settings_that_cannot_be_are_refused(
    model_map: ModelMap, recording: Recording, settings, error, sentence
) -> None:
    with pytest.raises(error, match=sentence):
        replay(model_map, recording, ReplaySettings(**settings))


def test_recordings_that_do_not_fit_are_refused(model_map: ModelMap, recording: Recording) -> None:
    experts, weights, request = recording.experts, recording.weights, recording.request
    bare = Recording(LAYERS, N_EXPERT, experts, weights, request)
    with pytest.raises(PyorchError, match="record it with --states"):
        replay(model_map, bare, ReplaySettings(prefetch=Prefetch("quasi-hidden", 1)))
    with pytest.raises(PyorchError, match="record it with --router full"):
        replay(model_map, bare, ReplaySettings(prefetch=Prefetch("expert-map", 1)))
    with pytest.raises(PyorchError, match="other layers"):
        replay(model_map, Recording((1, 2), N_EXPERT, experts[:, :2], weights[:, :2], request), ReplaySettings())
    with pytest.raises(PyorchError, match="experts beyond 63"):
        replay(model_map, Recording(LAYERS, N_EXPERT, experts + 64, weights, request), ReplaySettings())


def test_an_engine_that_runs_a_model_knows_no_future(model_map: ModelMap, small_moe: Path, capsys) -> None:
    with Engine(model_map, "50%") as engine:
        with pytest.raises(PyorchError, match="only a replay does"):
            engine.set_policy("belady")
        with pytest.raises(PyorchError, match='"marking" is there to be compared with: only a replay takes it'):
            engine.set_policy("marking")
        with pytest.raises(PyorchError, match="only a replay does"):
            engine.set_prefetch("oracle")
    assert main(["run", str(small_moe), "-p", "x", "--prefetch", "oracle", "--budget", "50%"]) == 2
    assert "needs to know the future: only a replay does" in capsys.readouterr().err


def test_the_command_prints_all_combinations(small_moe: Path, trace: Path, capsys) -> None:
    command = [str(small_moe), str(trace), "--policy", "lru,belady", "--prefetch", "none,oracle:1",
               "--budget", "25%,40%", "--read-bandwidth", "100MB/s", "--compute-ms", "10"]
    assert program.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 + 8 and "0.10 GB/s (given)" in lines[1]
    assert [line.split()[:3] for line in lines[5:]] == [
        [policy, predictor, budget]
        for budget in ("25%", "40%") for policy in ("lru", "belady") for predictor in ("none", "oracle:1")
    ]
    assert program.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["rows"]) == 8 and report["rows"][0]["recall"][0] is None and report["rows"][1]["recall"] == [1.0]
    assert f"{report['rows'][0]['tpot_ms']:.1f}" in lines[5]


def test_the_command_prints_what_a_device_has_and_gets(small_moe: Path, trace: Path, capsys) -> None:
    command = [str(small_moe), str(trace), "--policy", "lfu", "--budget", "40%", "--read-bandwidth", "1GB/s",
               "--vram-budget", "20%", "--device-misses", "upload", "--link-bandwidth", "10GB/s",
               "--device-speed", "8", "--compute-ms", "30"]
    assert program.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "device: room for 20% of the experts, misses: upload, uploads with 10 GB/s, computing 8 times" in lines[2]
    assert program.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = report["rows"][0]
    assert report["device_misses"] == "upload" and 0 < row["device_hit_rate"] < 1 and row["uploaded_bytes"] > 0
    assert lines[-1].split()[-2] == f"{row['device_hit_rate']:.1%}"
    assert program.main([*command, "--device-ahead", "1", "--prefetch", "oracle:1:0", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["rows"][0]
    assert known["ahead_precision"] == 1 and row["ahead_precision"] is None
    assert known["device_hit_rate"] > row["device_hit_rate"] + 0.05
    assert program.main([*command, "--device-ahead", "1", "--prefetch", "none,auto"]) == 2
    assert "auto does as time allows: name a predictor" in capsys.readouterr().err


def test_the_command_measures_the_disk_if_it_is_not_told(small_moe: Path, trace: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("scripts.replay.PROBE_SECONDS", 0.05)
    assert program.main([str(small_moe), str(trace), "--budget", "50%"]) == 0
    assert "GB/s (measured)" in capsys.readouterr().out


def test_the_command_refuses_what_cannot_be(
    small_moe: Path, small_moe_q4: Path, trace: Path, tmp_path: Path, capsys
) -> None:
    rate = ["--read-bandwidth", "1GB/s"]
    for arguments, sentence in (
        ([small_moe_q4, trace], "was recorded with another model"),
        ([small_moe, tmp_path / "absent.trace"], "cannot be read"),
        ([small_moe, trace, "--budget", "2%"], "is below the floor"),
        ([small_moe, trace, "--policy", "mru"], 'policy "mru" is not known'),
        ([small_moe, trace, "--prefetch", "quasi-hidden:x"], "is not a predictor"),
        ([small_moe, trace, "--vram-budget", "lots"], '--vram-budget "lots" is not understood'),
        ([small_moe, trace, "--vram-budget", "auto"], "needs a size or a share as the memory of a device"),
        ([small_moe, trace, "--device-speed", "8"], "say its memory with --vram-budget"),
        ([small_moe, trace, "--link-bandwidth", "1GB/s"], "say its memory with --vram-budget"),
        ([small_moe, trace, "--vram-budget", "9%", "--device-misses", "auto"], "must be processor or upload"),
        ([small_moe, trace, "--read-bandwidth", "fast"], '--read-bandwidth: "fast" is not understood'),
    ):
        assert program.main([*rate, *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("replay: error: ") and sentence in error and error.count("\n") == 1


def test_layers_that_nothing_forecasts_keep_their_experts(model_map: ModelMap, recording: Recording) -> None:
    """Nothing forecasts the first layer from routers: eviction by forecasts treats it as eviction by frequency does."""
    def hit_rate(policy: str) -> float:
        played = replay(model_map, recording, ReplaySettings(policy, Prefetch("quasi-hidden", 1, 0.0), "25%"))
        return played.hit_rates[0]

    assert hit_rate("finemoe") > 0.9 * hit_rate("lfu")


def test_forecasts_tell_what_to_keep(model_map: ModelMap, recording: Recording) -> None:
    """Guesses are read with either policy; eviction by forecasts also keeps those of them that are there already."""
    def hit_rate(policy: str) -> float:
        return replay(model_map, recording, ReplaySettings(policy, Prefetch("quasi-hidden", 2, 0.3), "25%")).hit_rate

    assert hit_rate("finemoe") > hit_rate("lfu") + 0.01
