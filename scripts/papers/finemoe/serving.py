"""Measures waits of requests: for their first token, in a stream, on other machines; and the ways to search maps.

FineMoE's figures 10, 11, 13, 14a and 18: replays of the routing of held-out requests, each of which begins with a
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pyorch.settings.prefetch import Prefetch
from pyorch.sidecars.history import DISTANCE, ExpertMaps
from pyorch.traces.file import DECODE, PREFILL
from pyorch.traces.recording import Recording
from pyorch.traces.replay import Replayed, ReplaySettings
from scripts.papers.finemoe.replays import (
    FINEMOE,
    MIXTRAL_OFFLOADING,
    MOE_INFINITY,
    ON_DEMAND,
    QUASI_HIDDEN,
    Evaluation,
    Material,
    OnProgress,
    Pair,
    middle,
)

DEEPSPEED = Pair("layer-all", "lru", "DeepSpeed-Inference")
DEFAULT = Pair("quasi-hidden", "finemoe")
PAIRS = (ON_DEMAND, DEEPSPEED, MIXTRAL_OFFLOADING, MOE_INFINITY, QUASI_HIDDEN, FINEMOE, DEFAULT,
         Pair("hybrid", "finemoe"))
ON_MACHINES = (ON_DEMAND, MOE_INFINITY, FINEMOE, DEFAULT)

PROMPTS = (4, 40)  # tokens; the paper's datasets have 37 and 43
PREFILL_SHARE = 0.4  # time to compute a token of a prompt, relative to a decoded token
MACHINES = (("as given", 1, 1), ("computes 4 times as fast", 4, 1), ("reads 4 times as fast", 1, 4),
            ("does both", 4, 4))  # the second and third: factors of the speed to compute, and to read
LENGTHS = (32, 160)  # tokens of the requests of a stream
PROMPT_SHARE = 0.2  # of them
LOAD = 0.8  # share of the time that the stream keeps on-demand reading busy
PERCENTILES = (10, 25, 50, 75, 90)
STORE_CAPACITIES = (1000, 2000, 4000, 8000, 16000, 32000)


@dataclass(frozen=True)
class Served:
    """A replay of requests with prompts of n_prompt tokens, one after the other.

    ttft_ms: From the start of a request to the end of its prompt, the mean. tpot_ms: of later tokens.
    """

    pair: Pair
    machine: str
    n_prompt: int
    hit_rate: float
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Streamed:
    """Requests that arrive at random times and are served one at a time, in order, without a known past.

    latencies: From a request's arrival to its last token, seconds, ascending. busy: share of the time until the last
    arrival.
    """

    pair: Pair
    budget: str
    hit_rate: float
    busy: float
    latencies: tuple[float, ...]


@dataclass(frozen=True)
class Pattern:
    """The experts that a way to follow their use names some layers ahead.

    Attributes:
        covered: Share of the used experts, in all layers.
        n_named: Experts per token and layer.
        hit_rate: With prefetching, under the policy finemoe; nan if it cannot be replayed.
    """

    approach: str
    distance: int
    covered: float
    n_named: float
    hit_rate: float


@dataclass(frozen=True)
class StoreSize:
    """Memory of a full store of expert maps."""

    capacity: int
    mib: float


def evaluate(material: Material, evaluation: Evaluation, on_progress: OnProgress) -> Evaluation:
    """Adds the waits of requests."""
    store = material.store(material.conditions.capacity, on_progress)
    return replace(
        evaluation, served=served(material, store, on_progress), streamed=streamed(material, store, on_progress),
        patterns=patterns(material, store, on_progress), store_sizes=store_sizes(store),
    )


def served(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Served]:
    """Replays prompts of some lengths, then other machines, at the middle budget (FineMoE, figs. 10 and 13)."""
    steps = [(pair, n, MACHINES[0]) for n in PROMPTS for pair in material.available(PAIRS)]
    steps += [(pair, PROMPTS[-1], machine) for machine in MACHINES[1:] for pair in ON_MACHINES]
    rows = []
    for done, (pair, n_prompt, (name, computes, reads)) in enumerate(steps):
        on_progress("requests", done, len(steps))
        recording = prompted(material.recording, n_prompt)
        played = _replay(material, recording, store, pair, n_warm=material.n_warm, computes=computes, reads=reads)
        prompts, _ = request_seconds(recording, played.ubatch_ends)
        rows.append(Served(pair, name, n_prompt, played.hit_rate, 1e3 * float(prompts[_counted(material)].mean()),
                           played.tpot_ms))
    return rows


def streamed(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Streamed]:
    """Replays the held-out text in requests of random lengths, at random times (FineMoE, fig. 11)."""
    random = np.random.default_rng(0)
    recording = pieces(material.recording, random)
    played = {}
    pairs = material.available(PAIRS)
    for done, pair in enumerate(pairs):
        on_progress("stream", done, len(pairs))
        empty = ExpertMaps.for_model(material.map, material.conditions.capacity, min(DISTANCE, material.n_layers))
        played[pair] = _replay(material, recording, empty, pair, tuned_with=store)
    took = {pair: request_seconds(recording, outcome.ubatch_ends)[1] for pair, outcome in played.items()}
    gaps = random.exponential(took[ON_DEMAND].mean() / LOAD, len(took[ON_DEMAND]))
    come = np.cumsum(gaps)
    return [Streamed(pair, middle(material), played[pair].hit_rate, float(seconds.sum() / come[-1]),
                     tuple(np.sort(latencies(come, seconds)).tolist())) for pair, seconds in took.items()]


def patterns(material: Material, store: ExpertMaps, on_progress: OnProgress) -> list[Pattern]:
    """Compares maps by trajectory alone (T), by embeddings too (S), and as many experts as similarity asks (delta).

    FineMoE, fig. 14a, with speculation and request-level counts.
    """
    recording = material.recording
    unembedded = _with(recording, embedded=False)
    k, n_expert = recording.experts.shape[2], recording.n_expert
    approaches = (  # ranks that count; whether a replay can name exactly these
        ("speculate", "next-router", recording, k, True),
        ("hit count", "activation-matrix", recording, k, True),
        ("map (T)", "expert-map", unembedded, k, False),
        ("map (T+S)", "expert-map", recording, k, False),
        ("map (T+S+delta)", "expert-map", recording, n_expert, True),
    )
    steps = [(distance, approach) for distance in (1, 3) if distance < material.n_layers for approach in approaches]
    rows = []
    for done, (distance, (name, predictor, seen, n_ranks, whole)) in enumerate(steps):
        on_progress("patterns", done, len(steps))
        settings = ReplaySettings(prefetch=Prefetch(predictor, distance, 0.0), budget="100%", read_bandwidth=1e15,
                                  compute_ms=material.conditions.compute_ms, as_decode=False)
        guessed = material.play(seen, settings, store, n_ranks)
        hit_rate = float("nan")
        if whole:
            pair = Pair(predictor, "finemoe")
            prefetch = replace(material.prefetch(store, pair, middle(material)), distance=distance)
            hit_rate = material.replay(seen, store, pair, middle(material), prefetch, n_warm=material.n_warm).hit_rate
        rows.append(Pattern(name, distance, *_named(guessed), hit_rate))
    return rows


def store_sizes(store: ExpertMaps) -> list[StoreSize]:
    """Returns the sizes of the maps and embeddings of this model (FineMoE, fig. 18)."""
    kept = store.export()
    each = (kept.maps.nbytes + kept.embeddings.nbytes) / max(1, len(kept.maps))
    return [StoreSize(capacity, capacity * each / (1 << 20)) for capacity in STORE_CAPACITIES]


def prompted(recording: Recording, n_prompt: int) -> Recording:
    """Returns the same requests with their first n_prompt tokens as a prompt; of shorter ones, all except one."""
    begin, length = _requests(recording)
    at = np.arange(len(recording)) - np.repeat(begin, length)
    prompt = at < np.repeat(np.minimum(n_prompt, np.maximum(1, length - 1)), length)
    return _with(recording, phase=np.where(prompt, PREFILL, DECODE).astype(np.uint8))


def pieces(recording: Recording, random: np.random.Generator) -> Recording:
    """Returns the same tokens in requests of random lengths within the recording's; each begins with a prompt."""
    request, phase = [], []
    for length in _requests(recording)[1].tolist():
        while length > 0:
            n = int(random.integers(LENGTHS[0], LENGTHS[1] + 1))
            n = length if length < n + LENGTHS[0] else n
            prompt = np.arange(n) < max(1, round(PROMPT_SHARE * n))
            request.append(np.full(n, len(request)))
            phase.append(np.where(prompt, PREFILL, DECODE))
            length -= n
    return _with(recording, request=np.concatenate(request), phase=np.concatenate(phase).astype(np.uint8))


def request_seconds(recording: Recording, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the time of each request's prompt, and of the whole. ends: of ubatches, one request at a time."""
    schedule = recording.schedule(1, as_decode=False)
    took = np.diff(ends, prepend=0.0)
    request = recording.request[schedule.order[schedule.begin[:-1]]]
    index = np.cumsum(np.diff(request, prepend=request[0]) != 0)
    return np.bincount(index, np.where(schedule.decode, 0.0, took)), np.bincount(index, took)


def latencies(come: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns latencies of requests with these arrivals, ascending, and durations, served in order."""
    done = np.empty(len(come))
    free = 0.0
    for i, (at, took) in enumerate(zip(come, seconds)):
        free = max(free, at) + took
        done[i] = free
    return done - come


def _named(guessed: Replayed) -> tuple[float, float]:
    """Returns the share of used experts that were named, and the named experts per token and layer.

    A layer nearer to the first one is forecast from the first.
    """
    n_layers, n_distances, _ = guessed.rank_hits.shape
    hits, named = 0, 0
    for layer in range(n_layers):
        reached = [d for d in range(n_distances) if guessed.rank_totals[layer, d].any()]
        if reached:
            hits += int(guessed.rank_hits[layer, reached[-1]].sum())
            named += int(guessed.rank_totals[layer, reached[-1]].sum())
    n = max(1, guessed.n_decoded * n_layers)
    return hits / (n * guessed.n_expert_used), named / n


def _replay(
    material: Material, recording: Recording, store: ExpertMaps, pair: Pair, n_warm: int = 0, computes: float = 1,
    reads: float = 1, tuned_with: ExpertMaps | None = None,
) -> Replayed:
    budget, conditions = middle(material), material.conditions
    settings = ReplaySettings(
        policy=pair.policy, prefetch=material.prefetch(tuned_with or store, pair, budget), budget=budget,
        read_bandwidth=conditions.read_bandwidth * reads, compute_ms=conditions.compute_ms / computes,
        prefill_ms=PREFILL_SHARE * conditions.compute_ms / computes, n_warm_tokens=n_warm, as_decode=False,
    )
    return material.play(recording, settings, store)


def _counted(material: Material) -> np.ndarray:
    """Returns the requests after those that fill the cache; at least the last one."""
    begin, _ = _requests(material.recording)
    counted = begin >= material.n_warm
    counted[-1] = True
    return counted


def _requests(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and length of each request."""
    begin = np.flatnonzero(np.diff(recording.request, prepend=recording.request[0] + 1) != 0)
    return begin, np.diff(begin, append=len(recording))


def _with(recording: Recording, request=None, phase=None, embedded: bool = True) -> Recording:
    """Returns the recording with the given changes."""
    return Recording(
        recording.layers, recording.n_expert, recording.experts, recording.weights,
        recording.request if request is None else request, recording.phase if phase is None else phase,
        recording.probs, lambda: recording.states,
        (lambda: recording.embeddings) if embedded else None,
    )
