"""Replays all predictors and policies on one recorded routing: their guesses, their residents, the time of a token.

Past requests fill the stores of maps and of counts; held-out ones are replayed (FineMoE, section 6.1). Their first
quarter fills the cache, and finds for each pair of predictor and policy the best distance and precision, at each
budget; the rest counts. So each pair has its own best settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pyorch.errors import PyorchError
from pyorch.library.choices import policies, predictors
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.prefetch import NONE, Prefetch
from pyorch.sidecars.history import CAPACITY, DISTANCE, ExpertMaps, token_embeddings
from pyorch.sidecars.predictor import PredictorFile
from pyorch.sizes import counted
from pyorch.traces.expert_maps import maps_from_trace
from pyorch.traces.file import DECODE, PREFILL, Trace, TraceHeader
from pyorch.traces.recording import Recording
from pyorch.traces.replay import Replayed, ReplaySettings, replay
from pyorch.traces.routers import read_router
from scripts.papers.finemoe.compared import COMPARED, Compared
from scripts.papers.finemoe.predictability import Entropy, StateCosine, entropies, state_cosines
from scripts.papers.finemoe.similarity import Similarity, cosines, similarities, trajectory_cosines

DISTANCES = (1, 2, 3, 4)
SWEPT_PREDICTORS = ("next-router", "quasi-hidden", "expert-map")
CAPACITIES = (50, 100, 200, 500, 1000, 2000, 4000)
BATCHES = (1, 2, 4, 8)
REQUEST_TOKENS = 256  # of each piece of a text that becomes a request
SAMPLE = 400  # iterations of each side for similarities, in all pairs

_HELD_OUT = (2, 5, 8)  # of ten requests
_TUNED = 1500  # tokens of the first quarter, at most, that find settings
_UNRANKED = (NONE, "layer-all")  # they do not rank experts
_NOT_TUNED = (*_UNRANKED, "previous-token", "oracle")  # they prefetch all guesses, or none

OnProgress = Callable[[str, int, int], None]  # step, done, total


@dataclass(frozen=True)
class Pair:
    """A predictor and an eviction policy. known_as: its publication."""

    predictor: str
    policy: str
    known_as: str = ""

    @property
    def name(self) -> str:
        return f"{self.predictor} + {self.policy}"

    @property
    def is_bound(self) -> bool:
        return self.predictor in predictors().foreseeing or self.policy in policies().foreseeing


ON_DEMAND = Pair(NONE, "lru", "on demand")
ON_DEMAND_LFU = Pair(NONE, "lfu")
MIXTRAL_OFFLOADING = Pair("next-router", "lru", "Mixtral-Offloading")
MOE_INFINITY = Pair("activation-matrix", "lfu", "MoE-Infinity")
FINEMOE = Pair("expert-map", "finemoe", "FineMoE")
QUASI_HIDDEN = Pair("quasi-hidden", "lru", "Speculating Experts")

PAIRS = (
    ON_DEMAND, ON_DEMAND_LFU, Pair("previous-token", "lru"), Pair("layer-all", "lru", "DeepSpeed-Inference"),
    MIXTRAL_OFFLOADING, MOE_INFINITY, QUASI_HIDDEN, Pair("hybrid", "lru", "Speculating Experts"),
    Pair("expert-map", "lru"), Pair("expert-map", "lfu"), FINEMOE,
    Pair("quasi-hidden", "finemoe"), Pair("hybrid", "lfu"), Pair("hybrid", "finemoe"),
    Pair(NONE, "belady", "bound"), Pair("oracle", "lru", "bound"), Pair("oracle", "belady", "bound"),
)
BATCHED = (ON_DEMAND, MIXTRAL_OFFLOADING, MOE_INFINITY, FINEMOE, QUASI_HIDDEN)


@dataclass(frozen=True)
class Conditions:
    """The common conditions of replays.

    Attributes:
        read_bandwidth: Bytes a second.
        compute_ms: Of a token with all experts resident.
        distances, min_precisions: Of Prefetch; each pair uses the best ones.
        capacity: Of the map store, in iterations.
    """

    budgets: tuple[str, ...] = ("25%", "40%", "60%")
    read_bandwidth: float = 1e9
    compute_ms: float = 30.0
    distances: tuple[int, ...] = (1, 2, 3)
    min_precisions: tuple[float, ...] = (0.0, 0.3, 0.6)
    capacity: int = CAPACITY


class Material:
    """A model with its sidecars, requests of its past, and held-out requests.

    Attributes:
        missing: Unavailable predictors, each with a sentence.

    Raises:
        FormatError: A trace belongs to another model.
        PyorchError: A trace lacks data that predictors need.
    """

    def __init__(
        self, model_map: ModelMap, past: Trace | TracePart, present: Trace | TracePart, conditions: Conditions
    ) -> None:
        for trace in (past, present):
            if trace.header.router != "full" or not trace.header.states:
                raise PyorchError(f"{trace.path} does not have what predictors compute with: record it with "
                                  "--router full --states")
        present = _shuffled(present)
        self.map, self.past, self.present, self.conditions = model_map, past, present, conditions
        self.recording = Recording.from_trace(present, model_map)
        # Only the first token of a request is its prompt: the others are decoded.
        first = np.diff(self.recording.request, prepend=self.recording.request[0] + 1) != 0
        self.recording.phase = np.where(first, PREFILL, DECODE).astype(np.uint8)
        sidecar = model_map.sidecars().get("predictor")
        self.file = PredictorFile.read(sidecar, model_map) if sidecar is not None else PredictorFile()
        self.missing = _missing(self.file, model_map)
        self.n_layers = len(model_map.layers)
        self.n_warm = len(self.recording) // 4
        self.first = _head(self.recording, min(_TUNED, max(1, self.n_warm)))
        self._settings: dict[tuple[Pair, str], Prefetch] = {}
        self._compared = Compared(model_map, past)

    def store(self, capacity: int, on_progress: OnProgress | None = None) -> ExpertMaps:
        """Returns the past as maps."""
        distance = min(DISTANCE, self.n_layers)
        return maps_from_trace(self.past, self.map, capacity, distance, on_progress=on_progress)

    def prefetch(self, store: ExpertMaps, pair: Pair, budget: str) -> Prefetch:
        """Returns the fastest prefetch for a pair at a budget, on the tokens that do not count."""
        if pair.predictor in _NOT_TUNED:
            return Prefetch(pair.predictor, 1, 0.0)
        if (pair, budget) not in self._settings:
            settings = [Prefetch(pair.predictor, distance, precision) for distance in self.conditions.distances
                        for precision in self.conditions.min_precisions if distance <= self.n_layers]
            self._settings[pair, budget] = min(
                settings, key=lambda prefetch: self.replay(self.first, store, pair, budget, prefetch).tpot_ms)
        return self._settings[pair, budget]

    def replay(
        self, recording: Recording, store: ExpertMaps, pair: Pair, budget: str, prefetch: Prefetch, batch: int = 1,
        n_warm: int = 0,
    ) -> Replayed:
        settings = ReplaySettings(
            policy=pair.policy, prefetch=prefetch, budget=budget, read_bandwidth=self.conditions.read_bandwidth,
            compute_ms=self.conditions.compute_ms, n_warm_tokens=n_warm, batch=batch, as_decode=False,
        )
        return self.play(recording, settings, store)

    def play(
        self, recording: Recording, settings: ReplaySettings, store: ExpertMaps, n_ranks: int | None = None
    ) -> Replayed:
        """Replays a recording. The oracle gets the forecasts of the predictors in COMPARED."""
        forecasts = None
        if settings.prefetch.predictor in COMPARED:
            forecasts = self._compared.forecasts(settings.prefetch.predictor)
            settings = replace(settings, prefetch=replace(settings.prefetch, predictor="oracle"))
        return replay(self.map, recording, settings, store, self.file, n_ranks, forecasts=forecasts)

    def available(self, pairs: Iterable[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair.predictor not in self.missing]


class TracePart(Trace):
    """Some requests of a trace, in memory."""

    def __init__(self, path: Path, header: TraceHeader, records: np.ndarray) -> None:
        self.path, self.header, self.records = path, header, records


@dataclass(frozen=True)
class Recall:
    """The share of the experts used by tokens in a layer that was guessed `distance` layers ahead.

    Attributes:
        by_layer: Of the first n_expert_used guesses; nan without guesses.
        by_rank: [layer][rank], how often the guess of that rank was used.
        mean: Over the layers with `distance` layers before them.
    """

    predictor: str
    distance: int
    layers: tuple[int, ...]
    by_layer: tuple[float, ...]
    by_rank: tuple[tuple[float, ...], ...]
    mean: float


@dataclass(frozen=True)
class Played:
    """A replay, per token. useful_mib, wasted_mib: of prefetched experts. predict_ms: real time on this machine."""

    predictor: str
    policy: str
    known_as: str
    budget: str
    distance: int
    min_precision: float
    batch: int
    capacity: int
    hit_rate: float
    tpot_ms: float
    stall_ms: float
    read_mib: float
    useful_mib: float
    wasted_mib: float
    predict_ms: float

    @property
    def pair(self) -> Pair:
        return Pair(self.predictor, self.policy, self.known_as)


@dataclass(frozen=True)
class Distance:
    """Recall and its effects, a row for each prefetch distance."""

    played: Played
    recall: float


@dataclass(frozen=True)
class Capacity:
    """n_maps: iterations in the store. Scores: the mean of the best cosine in it, by embedding and by known layers."""

    played: Played
    n_maps: int
    semantic: float
    trajectory: float


@dataclass(frozen=True)
class Evaluation:
    """All results. notes: missing parts, and the reasons."""

    n_past: int
    n_present: int
    conditions: Conditions
    notes: tuple[str, ...]
    recalls: list[Recall]
    similarities: list[Similarity]
    budgets: list[Played]
    distances: list[Distance]
    capacities: list[Capacity]
    batches: list[Played]
    entropies: list[Entropy] = field(default_factory=list)
    cosines: list[StateCosine] = field(default_factory=list)
    curve: tuple[tuple[float, float], ...] = ()  # of the estimator's training, as in PredictorFile
    served: list = field(default_factory=list)  # of serving.Served
    streamed: list = field(default_factory=list)  # of serving.Streamed
    patterns: list = field(default_factory=list)  # of serving.Pattern
    store_sizes: list = field(default_factory=list)  # of serving.StoreSize
    contexts: list = field(default_factory=list)  # of measure.Iteration
    overheads: list = field(default_factory=list)  # of measure.Overhead


def evaluate(material: Material, on_progress: OnProgress) -> Evaluation:
    """Evaluates everything that needs no running model."""
    conditions = material.conditions
    store = material.store(conditions.capacity, on_progress)
    notes = [*material.missing.values()]
    if material.file.default_vectors is None:
        notes.append(f"quasi-hidden predicts without default vectors: {material.map.path} has none beside it, "
                     "`pyorch calibrate` measures them")
    return Evaluation(
        n_past=len(material.past),
        n_present=len(material.present),
        conditions=conditions,
        notes=tuple(notes),
        recalls=recalls(material, store, on_progress),
        similarities=similarity(material),
        budgets=budgets(material, store, on_progress),
        distances=distances(material, store, on_progress),
        capacities=capacities(material, on_progress),
        batches=batches(material, store, on_progress),
        entropies=entropies(material.recording.probs, material.recording.request),
        cosines=cosines_of_states(material),
        curve=tuple(map(tuple, material.file.curve.tolist())) if material.file.curve is not None else (),
    )


def split(trace: Trace) -> tuple[TracePart, TracePart]:
    """Returns seven of ten requests as the past, and three held out. PyorchError: there are fewer than three."""
    request = trace.records["request"]
    numbers, index = np.unique(request, return_inverse=True)
    if len(numbers) < 3:
        raise PyorchError(f"{trace.path} has {counted(len(numbers), 'request')}: with three or more some can be held "
                          "out; give more text, or a past with --history or --history-trace")
    held_out = np.isin(index % 10, _HELD_OUT)
    return (TracePart(trace.path, trace.header, trace.records[~held_out]),
            TracePart(trace.path, trace.header, trace.records[held_out]))


def recalls(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Recall]:
    """Measures recall one layer ahead (Speculating Experts, figs. 4, 5 and 10)."""
    found = []
    left_out = {*_UNRANKED, *predictors().foreseeing, *material.missing}
    ranked = [name for name in (*COMPARED, *predictors()) if name not in left_out]
    for done, predictor in enumerate(ranked):
        on_progress("recall", done, len(ranked))
        found.append(_recall(material, _guessed(material, store, predictor, 1), predictor, 1))
    return found


def cosines_of_states(material: Material) -> list[StateCosine]:
    """Returns the cosines of all held-out tokens."""
    recording, vectors = material.recording, material.file.default_vectors
    return state_cosines(
        recording.states, recording.experts, recording.weights,
        [read_router(material.map, il) for il in recording.layers],
        {i: vectors.vectors[il] for i, il in enumerate(recording.layers)} if vectors is not None else {},
    )


def similarity(material: Material) -> list[Similarity]:
    """Compares all pairs of a sample of past and present iterations (FineMoE, figs. 8 and 9)."""
    sides = []
    for trace in (material.past, material.present):
        records = trace.records[np.linspace(0, len(trace) - 1, min(SAMPLE, len(trace))).astype(np.int64)]
        sides += [
            token_embeddings(material.map, records["token"]),
            records["router"].astype(np.float32),
            records["experts"],
        ]
    return similarities(*sides, distance=min(DISTANCE, material.n_layers - 1))


def budgets(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Played]:
    """Replays all pairs at all budgets (FineMoE, figs. 12 and 14)."""
    pairs = material.available(PAIRS)
    steps = [(budget, pair) for budget in material.conditions.budgets for pair in pairs]
    played = []
    for done, (budget, pair) in enumerate(steps):
        on_progress("budgets", done, len(steps))
        played.append(_play(material, store, pair, budget))
    return played


def distances(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Distance]:
    """Replays distances (FineMoE, fig. 15), at the middle budget."""
    pairs = material.available((MIXTRAL_OFFLOADING, QUASI_HIDDEN, FINEMOE))
    steps = [(pair, distance) for pair in pairs for distance in DISTANCES if distance <= material.n_layers]
    rows = []
    for done, (pair, distance) in enumerate(steps):
        on_progress("distances", done, len(steps))
        guessed = _guessed(material, store, pair.predictor, distance)
        rows.append(Distance(_play(material, store, pair, middle(material), distance=distance),
                             _recall(material, guessed, pair.predictor, distance).mean))
    return rows


def capacities(material: Material, on_progress: OnProgress) -> list[Capacity]:
    """Replays capacities (FineMoE, fig. 16a), at the middle budget, up to the iterations of the past."""
    sizes = [n for n in CAPACITIES if n <= len(material.past)] or [len(material.past)]
    distance = min(DISTANCE, material.n_layers - 1)
    records = material.present.records[
        np.linspace(0, len(material.present) - 1, min(SAMPLE, len(material.present))).astype(np.int64)
    ]
    embeddings, maps = token_embeddings(material.map, records["token"]), records["router"].astype(np.float32)
    rows = []
    for done, n in enumerate(sizes):
        on_progress("capacities", done, len(sizes))
        store = material.store(n)
        kept = store.export()
        known = trajectory_cosines(maps, kept.maps)[: material.n_layers - distance]
        rows.append(Capacity(
            replace(_play(material, store, FINEMOE, middle(material)), capacity=n), store.n_maps,
            float(cosines(embeddings, kept.embeddings).max(axis=1).mean()), float(known.max(axis=2).mean()),
        ))
    return rows


def batches(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Played]:
    """Replays batches (FineMoE, fig. 16b), at the middle budget, up to the number of held-out requests."""
    n_requests = len(np.unique(material.recording.request))
    sizes = [n for n in BATCHES if n <= n_requests]
    steps = [(batch, pair) for batch in sizes for pair in material.available(BATCHED)]
    rows = []
    for done, (batch, pair) in enumerate(steps):
        on_progress("batches", done, len(steps))
        rows.append(_play(material, store, pair, middle(material), batch=batch))
    return rows


def _play(
    material: Material, store: ExpertMaps, pair: Pair, budget: str, distance: int | None = None, batch: int = 1
) -> Played:
    prefetch = material.prefetch(store, pair, budget)
    prefetch = replace(prefetch, distance=distance or prefetch.distance)
    done = material.replay(material.recording, store, pair, budget, prefetch, batch, material.n_warm)
    mib_per_token = 1 / (1 << 20) / max(1, done.n_tokens)
    return Played(
        pair.predictor, pair.policy, pair.known_as, budget, prefetch.distance, prefetch.min_precision, batch,
        store.capacity, done.hit_rate, done.tpot_ms, done.stall_ms, done.bytes_per_token / (1 << 20),
        (done.useful_bytes + done.late_bytes) * mib_per_token, done.wasted_bytes * mib_per_token, done.predict_wall_ms,
    )


def _guessed(material: Material, store: ExpertMaps, predictor: str, distance: int) -> Replayed:
    """Replays a predictor, counting all its guesses, without any read."""
    settings = ReplaySettings(prefetch=Prefetch(predictor, distance, 0.0), budget="100%", read_bandwidth=1e15,
                              compute_ms=material.conditions.compute_ms, as_decode=False)
    return material.play(material.recording, settings, store, n_ranks=material.recording.experts.shape[2])


def _recall(material: Material, replayed: Replayed, predictor: str, distance: int) -> Recall:
    by_layer = replayed.recall_at(distance)
    hits, totals = replayed.rank_hits[:, distance - 1], replayed.rank_totals[:, distance - 1]
    by_rank = np.where(totals > 0, hits / np.maximum(totals, 1), np.nan)
    return Recall(predictor, distance, material.recording.layers, tuple(by_layer.tolist()),
                  tuple(map(tuple, by_rank.tolist())), _mean(by_layer[distance:]))


def middle(material: Material) -> str:
    """Returns the budget of measurements that use only one."""
    return material.conditions.budgets[len(material.conditions.budgets) // 2]


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _missing(file: PredictorFile, model_map: ModelMap) -> dict[str, str]:
    if file.estimator is not None:
        return {}
    return {"hybrid": f"hybrid is left out: {model_map.path} has no estimator beside it, `pyorch train-predictor` "
                      "makes one"}


def _shuffled(trace: Trace | TracePart) -> TracePart:
    """Returns the requests in another order, so that each part has requests of all files."""
    records = np.array(trace.records)
    numbers, index = np.unique(records["request"], return_inverse=True)
    records["request"] = np.random.default_rng(0).permutation(len(numbers))[index]
    return TracePart(trace.path, trace.header, records)


def _head(recording: Recording, n: int) -> Recording:
    """Returns the first tokens."""
    return Recording(
        recording.layers,
        recording.n_expert,
        recording.experts[:n],
        recording.weights[:n],
        recording.request[:n],
        recording.phase[:n],
        recording.probs[:n],
        lambda: recording.states[:n],
        lambda: recording.embeddings[:n],
    )
