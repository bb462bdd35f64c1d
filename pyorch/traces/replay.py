"""Replay: the cost of a recorded routing with another policy, predictor, budget or disk, in simulated time.

A replay runs the residency table, policies and predictors of the engine on the routing of a trace. It models a disk
with a bandwidth and a latency, and compute that takes a fixed time for each token. `python -m scripts.replay` prints
replays for many settings at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pyorch.errors import BudgetError, PyorchError
from pyorch.library.bindings import array, check, ffi, given, lib
from pyorch.library.choices import Needs, policies, predictors
from pyorch.llama.apply import best_predictor, check_prefetch, set_uses
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.statistics import Stats, ratio
from pyorch.settings.budget import Budget
from pyorch.settings.device_options import DEVICE_MISSES, PROCESSOR
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import AUTO, DISTANCE, NONE, Prefetch
from pyorch.settings.settings import Settings
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.predictor import PredictorFile
from pyorch.sizes import counted
from pyorch.traces.file import Trace
from pyorch.traces.recording import Recording, Schedule
from pyorch.traces.routers import read_router


@dataclass(frozen=True)
class ReplaySettings:
    """The settings and the machine of a replay.

    Attributes:
        policy: One of pyorch.library.choices.policies(). "belady" evicts the expert that is needed last.
        prefetch: As for pyorch.load, without the rule that weighs processor time; or "oracle", which guesses the true
            experts, or the forecasts that replay() gets.
        budget: As for pyorch.load, without "auto".
        read_bandwidth: Of the disk, bytes a second.
        read_latency_s: Added for each read request of at most 4 MiB.
        compute_ms: Of a decoded token when all experts are resident, divided evenly among the layers.
        route_share: The share of compute_ms before a layer's router decides. None: the dense weights' share of the
            bytes that a token reads.
        prefill_ms: Of a token of a prompt. None: as compute_ms.
        predict_ms: From a layer's router to its forecasts.
        n_warm_tokens: Tokens that are replayed before counting begins.
        batch: Requests decoded together.
        as_decode: Treat every token, of prompts too, as a decoded token.
        pause_ms: The disk pauses this long at the end of each pause_every_ms.
        pause_every_ms: The period of pauses.
        pools: As for pyorch.load, if the map has a compressed pack.
        decode_bandwidth: Of one thread that decodes experts, bytes of decoded weights a second. 0: decoding takes no
            time.
        n_decoders: Threads that decode.
        vram_budget: Memory of a device for experts, in front of the budget: a size or a share of them. 0: no device.
            The device uses the same policy.
        device_misses: As for pyorch.load.
        link_bandwidth: To the device, bytes a second. 0: uploads take no time.
        device_speed: Speed of the device relative to the processor. The device computes the dense layers too.
        device_prefill_speed: The same for prompts. None: as device_speed.
        device_ahead: As for pyorch.load.
    """

    policy: str | None = Settings().policy
    prefetch: Prefetch = Prefetch(NONE)
    budget: Budget | int | str = "40%"
    read_bandwidth: float = 1e9
    read_latency_s: float = 0.0
    compute_ms: float = 30.0
    route_share: float | None = None
    prefill_ms: float | None = None
    predict_ms: float = 0.0
    n_warm_tokens: int = 0
    batch: int = 1
    as_decode: bool = True
    pause_ms: float = 0.0
    pause_every_ms: float = 0.0
    pools: Pools = Pools()
    decode_bandwidth: float = 0.0
    n_decoders: int = 1
    vram_budget: Budget | int | str = 0
    device_misses: str = PROCESSOR
    link_bandwidth: float = 0.0
    device_speed: float = 1.0
    device_prefill_speed: float | None = None
    device_ahead: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        object.__setattr__(self, "pools", Pools.parse(self.pools))
        object.__setattr__(self, "vram_budget", Budget.parse(self.vram_budget))


# Makes forecasts for a schedule and a distance: see replay().
Forecasts = Callable[[Recording, Schedule, int], np.ndarray]

_OF_DEVICE = ("device_hits", "device_misses", "device_computed", "device_loads", "device_evictions", "device_bytes",
              "device_ahead", "device_ahead_hits", "device_ahead_late")


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The results of a replay, over the counted tokens.

    Attributes:
        hit_rate: The share of uses of experts that found the expert resident.
        tpot_ms: From one token of a request to the next. nan if no token was decoded.
        tokens_per_second: Decoded, of all requests together.
        stall_ms: The part of tpot_ms without a matrix to compute with. nan if no token was decoded.
        bytes_per_token: Read bytes.
        useful: Prefetched experts that arrived in time and were used.
        late: Prefetched experts that were used, but had not arrived.
        wasted: Prefetched experts that were not used.
        predict_wall_ms: Real time of a token's forecasts on this machine.
        disk_busy: The share of the time in which the disk reads.
        stats: The engine's statistics. Of a device, only the fields in _OF_DEVICE.
        hit_rates: float64[L], by layer.
        rank_hits: uint64[L, D, R], forecasts for a layer, d + 1 layers ahead, whose expert of rank r was used.
        rank_totals: uint64[L, D, R], all forecasts, in the same order.
        ubatch_ends: float64[n], of all ubatches, in seconds since the first began.
    """

    settings: ReplaySettings
    n_tokens: int
    n_decoded: int
    hit_rate: float
    tpot_ms: float
    tokens_per_second: float
    stall_ms: float
    bytes_per_token: float
    useful: int
    late: int
    wasted: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    predict_wall_ms: float
    seconds: float
    disk_busy: float
    stats: Stats
    n_expert_used: int
    hit_rates: np.ndarray = field(repr=False)
    rank_hits: np.ndarray = field(repr=False)
    rank_totals: np.ndarray = field(repr=False)
    ubatch_ends: np.ndarray = field(repr=False)

    @property
    def recall(self) -> np.ndarray:
        """Returns recall_at() the distance of the settings."""
        return self.recall_at(self.rank_hits.shape[1])

    def recall_at(self, distance: int) -> np.ndarray:
        """Returns by layer the share of the experts used by decoded tokens that as many forecasts named.

        float64[L]; nan for layers without forecasts at this distance.
        """
        hits, totals = self.rank_hits[:, distance - 1], self.rank_totals[:, distance - 1]
        recall = hits[:, : self.n_expert_used].sum(axis=1) / max(1, self.n_decoded * self.n_expert_used)
        return np.where(totals.any(axis=1), recall, np.nan)


def replay(
    model_map: ModelMap, recording: Recording, settings: ReplaySettings, maps: ExpertMaps | None = None,
    predictor_file: PredictorFile | None = None, n_ranks: int | None = None, uses: np.ndarray | None = None,
    forecasts: Forecasts | None = None,
) -> Replayed:
    """Replays a recording. The same arguments give the same result.

    Args:
        model_map: The model's map.
        recording: The routing.
        settings: The settings and the machine.
        maps: The history that expert-map begins with; it is not changed. None: an empty history.
        predictor_file: Default vectors and estimator for predictors that use them.
        n_ranks: Ranks of forecasts to count. Default: twice the experts that a token uses.
        uses: The initial ranks of pools, float64[n_layers, n_expert] (Engine.set_uses). None: no ranks.
        forecasts: Makes the oracle's guesses, which are otherwise the truth: int16[n_tokens, n_layers, distance, n].
            Index d of `distance` has the experts that are forecast d + 1 layers ahead for a token's layer, the most
            probable first, filled up with -1.

    Raises:
        BudgetError: The budget is below the floor.
        PyorchError: A setting is impossible, or the recording lacks data that the predictor needs.
    """
    prefetch = _checked(model_map, recording, settings, predictor_file, forecasts)
    distance = min(prefetch.distance, len(model_map.layers))
    n_ranks = n_ranks or min(2 * recording.experts.shape[2], recording.n_expert)
    schedule = recording.schedule(settings.batch, settings.as_decode)
    counts = np.zeros((2, len(recording.layers), distance, n_ranks), np.uint64)
    ends = np.zeros(len(schedule.decode))
    with Engine(model_map, settings.budget, settings.policy, simulated=True, pools=settings.pools) as engine:
        set_uses(engine, model_map, uses)
        needs = predictors()[prefetch.predictor].needs
        if Needs.ROUTERS & needs:
            for layer in model_map.layers:
                engine.set_router(layer.il, read_router(model_map, layer.il))
            if predictor_file is not None:
                predictor_file.apply(engine)
        if Needs.HISTORY & needs:
            engine.set_history(_copy(maps) if maps is not None else ExpertMaps.for_model(model_map, distance=distance))
        engine.set_prefetch(prefetch.predictor, distance, prefetch.min_precision)
        foreseen = (forecasts or truth)(recording, schedule, distance) if Needs.FUTURE & needs else None
        result = _play(engine, recording, schedule, settings, prefetch, foreseen, model_map, counts, ends)
        stats = dataclasses.replace(engine.stats(), **{name: getattr(result, name) for name in _OF_DEVICE})
        by_layer = [engine.stats(layer.il) for layer in model_map.layers]
    sizes = [layer.expert_bytes for layer in model_map.layers]
    late_bytes = sum(layer.prefetch_late * size for layer, size in zip(by_layer, sizes))
    n_steps = int(schedule.decode[_warm_ubatches(schedule, settings.n_warm_tokens) :].sum())
    return Replayed(
        settings=settings, n_tokens=result.n_tokens, n_decoded=result.n_decoded, seconds=result.seconds,
        hit_rate=stats.hit_rate, tpot_ms=ratio(1000 * result.decode_seconds, n_steps),
        tokens_per_second=ratio(result.n_decoded, result.decode_seconds),
        stall_ms=ratio(1000 * result.stall_seconds, n_steps),
        bytes_per_token=ratio(stats.bytes_read, result.n_tokens),
        disk_busy=ratio(result.read_seconds, result.seconds),
        useful=stats.prefetch_hits - stats.prefetch_late, late=stats.prefetch_late, wasted=stats.prefetch_wasted,
        useful_bytes=sum(layer.prefetch_hits * size for layer, size in zip(by_layer, sizes)) - late_bytes,
        late_bytes=late_bytes, wasted_bytes=sum(layer.prefetch_wasted * size for layer, size in zip(by_layer, sizes)),
        predict_wall_ms=ratio(1000 * result.predict_wall_seconds, len(recording)),
        stats=stats, n_expert_used=recording.experts.shape[2],
        hit_rates=np.array([layer.hit_rate for layer in by_layer[: len(recording.layers)]]),
        rank_hits=counts[0], rank_totals=counts[1], ubatch_ends=ends,
    )


def _checked(
    model_map: ModelMap, recording: Recording, settings: ReplaySettings, predictor_file: PredictorFile | None,
    forecasts: Forecasts | None,
) -> Prefetch:
    """Returns the prefetch to set, with its distance."""
    prefetch = settings.prefetch
    name = prefetch.predictor
    if name == AUTO:
        name = best_predictor(predictor_file or PredictorFile())
    distance = prefetch.distance or (predictor_file.distance if predictor_file else None) or DISTANCE
    needs = predictors().choose(name, in_replay=True).needs
    prefetch = Prefetch(name, distance, 0.0 if Needs.FUTURE & needs and forecasts is None else prefetch.min_precision)
    check_prefetch(prefetch, len(model_map.layers), in_replay=True)
    if tuple(layer.il for layer in model_map.layers[: len(recording.layers)]) != tuple(recording.layers):
        raise PyorchError(f"the recording has other layers than the {len(model_map.layers)} of {model_map.path} with "
                          "routed experts")
    if Needs.STATES & needs and not recording.has_states:
        raise PyorchError(f"the predictor {name} computes with the states before the routers, which the trace does not "
                          "have: record it with --states")
    if Needs.DISTRIBUTIONS & needs and recording.probs is None:
        raise PyorchError(f"the predictor {name} compares distributions of the routers, which the trace does not have: "
                          "record it with --router full")
    if Needs.ESTIMATOR & needs and (predictor_file is None or predictor_file.estimator is None):
        raise PyorchError(f"the predictor {name} needs an estimator, and {model_map.path} has none next to it: "
                          "make one with pyorch train-predictor")
    if settings.batch < 1 or settings.n_warm_tokens < 0:
        raise PyorchError(f"a replay of {counted(settings.batch, 'request')} together after "
                          f"{counted(settings.n_warm_tokens, 'token')} is impossible: use 1 or more, and 0 or more")
    if settings.n_warm_tokens >= len(recording):
        raise PyorchError(f"the recording has {len(recording)} tokens: {settings.n_warm_tokens} to begin with leave "
                          "none to count")
    if settings.vram_budget.amount is None:
        raise BudgetError("a replay needs a size or a share as the memory of a device")
    if settings.budget.amount is None:
        raise BudgetError('a replay needs a size or a share as its budget, not "auto"')
    return prefetch


def _play(
    engine: Engine, recording: Recording, schedule: Schedule, settings: ReplaySettings, prefetch: Prefetch,
    forecasts: np.ndarray | None, model_map: ModelMap, counts: np.ndarray, ends: np.ndarray,
):
    """Returns the pyorch_replay_result, and fills counts, uint64[2, L, D, R], and ends, float64[n_ubatches]."""
    n_tokens, _, n_used = recording.experts.shape
    predictor = predictors()[prefetch.predictor]
    wanted = predictor.needs | predictor.uses
    probs = recording.probs if Needs.DISTRIBUTIONS & wanted else None
    states = recording.states if Needs.STATES & wanted else None
    embeddings = recording.embeddings if Needs.EMBEDDINGS & wanted else None
    raw = given(
        "pyorch_recording", n_tokens=n_tokens, n_layers=len(recording.layers), n_expert=recording.n_expert,
        n_used=n_used, n_ubatches=len(schedule.decode),
        n_distances=forecasts.shape[2] if forecasts is not None else 0,
        n_forecast=forecasts.shape[3] if forecasts is not None else 0,
        n_embd=next((values.shape[-1] for values in (states, embeddings) if values is not None), 0),
        experts=array("uint16_t", recording.experts), weights=array("float", recording.weights),
        probs=array("float", probs), states=array("float", states), embeddings=array("float", embeddings),
        request=array("uint32_t", recording.request), forecasts=array("int16_t", forecasts),
        begin=array("int64_t", schedule.begin), order=array("int64_t", schedule.order),
        decode=array("uint8_t", schedule.decode),
    )
    prefill_ms = settings.compute_ms if settings.prefill_ms is None else settings.prefill_ms
    share = default_route_share(model_map) if settings.route_share is None else settings.route_share
    config = given(
        "pyorch_replay_config", read_bytes_per_second=settings.read_bandwidth, read_seconds=settings.read_latency_s,
        compute_seconds=settings.compute_ms / 1000, route_share=share, prefill_seconds=prefill_ms / 1000,
        predict_seconds=settings.predict_ms / 1000, n_warm=_warm_ubatches(schedule, settings.n_warm_tokens),
        pause_seconds=settings.pause_ms / 1000, period_seconds=settings.pause_every_ms / 1000,
        decode_bytes_per_second=settings.decode_bandwidth, n_decoders=settings.n_decoders,
        device_bytes=settings.vram_budget.amount.of(model_map.info.expert_bytes),
        link_bytes_per_second=settings.link_bandwidth, device_misses=DEVICE_MISSES.index(settings.device_misses),
        device_speed=settings.device_speed,
        device_prefill_speed=settings.device_prefill_speed or settings.device_speed,
        device_ahead=settings.device_ahead,
    )
    if settings.policy is not None:
        config.device_policy = policies().choose(settings.policy, True).value
    result = ffi.new("pyorch_replay_result *")
    hits, totals = (array("uint64_t", of) for of in counts)
    check(lib.pyorch_replay(engine.handle, raw, config, result, *counts.shape[2:], hits, totals, array("double", ends)))
    return result


def compute_time(given: float | None, trace: Trace, sidecars: Sidecars) -> tuple[float | None, str]:
    """Returns the milliseconds of computing a decoded token, and their source.

    The source is "given" by the user, the "trace", "calibrated" (the predictor file next to the model), or "unknown".

    Raises:
        FormatError: The predictor file is needed, and is damaged or belongs to another model.
    """
    if given is not None:
        return given, "given"
    if trace.header.compute_ms is not None:
        return trace.header.compute_ms, "trace"
    calibrated = sidecars.predictor.compute_ms
    return calibrated, "unknown" if calibrated is None else "calibrated"


def _warm_ubatches(schedule: Schedule, n_tokens: int) -> int:
    """Counts the ubatches that hold the first tokens."""
    return int(np.searchsorted(schedule.begin, n_tokens))


def default_route_share(model_map: ModelMap) -> float:
    """Returns the dense weights' share of the bytes of weights that a decoded token reads."""
    dense, experts = token_bytes(model_map)
    return dense / (dense + experts)


def token_bytes(model_map: ModelMap) -> tuple[int, int]:
    """Returns the bytes of weights that a decoded token reads: of dense layers, and of experts."""
    info = model_map.info
    try:
        model_map.tensor_range("output.weight")
        table = model_map.tensor_range("token_embd.weight").size  # a token reads one row of it
    except PyorchError:
        table = 0
    return max(0, info.dense_bytes - table), sum(
        layer.expert_bytes * layer.n_expert_used for layer in model_map.layers)


def truth(recording: Recording, schedule: Schedule, distance: int) -> np.ndarray:
    """Returns forecasts that equal the used experts, for decoded tokens."""
    decoded = np.zeros(len(recording), bool)
    decoded[schedule.order] = np.repeat(schedule.decode != 0, np.diff(schedule.begin))
    experts = np.where(decoded[:, None, None], recording.experts.astype(np.int16), np.int16(-1))
    return np.repeat(experts[:, :, None], distance, axis=2)


def _copy(maps: ExpertMaps) -> ExpertMaps:
    """Returns a copy that may grow. All contents fit, so nothing is replaced."""
    copied = ExpertMaps(maps.n_layers, maps.n_expert, maps.n_embd, maps.capacity, maps.distance)
    contents = maps.export()
    for embedding, map in zip(contents.embeddings, contents.maps):
        copied.add(map, embedding)
    return copied
