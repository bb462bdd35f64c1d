"""Statistics of a trace: evenness, certainty and cacheability of a model's routing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.traces.file import DECODE, PREFILL, Trace
from pyorch.traces.routing_statistics import activation_counts, coactivation, margin, token_activating_entropy

# Shares of a layer's experts in a cache for which hit rates are reported.
CACHE_RATES = tuple(eighth / 8 for eighth in range(1, 9))
PERCENTILES = (5, 10, 15, 20, 50, 85, 95)
TAE_BINS = 50

PHASES = {"all": None, "prefill": PREFILL, "decode": DECODE}

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics of one layer. Percentiles are those in PERCENTILES, hit rates those at CACHE_RATES.

    Attributes:
        activations: Uses of each expert (BuddyMoE, fig. 6).
        busiest, idlest: Uses of the most and the least used expert, relative to an even share.
        gini: 0 for even use.
        unused: Experts that were never selected.
        strongest_peer: Share of the strongest peer in an expert's co-activations, the mean over experts.
        tae: BuddyMoE's eq. 1.
        tae_histogram: Tokens in TAE_BINS equal parts of [0, 1].
        margin: p_max - p_2nd.
        entropy: Mean, to the base of its length, of the whole distribution if it was recorded, otherwise of the
            selected probabilities.
        hit_rates: Of LRU caches of this layer alone, token after token of each request.
    """

    il: int
    activations: tuple[int, ...]
    busiest: float
    idlest: float
    gini: float
    unused: int
    strongest_peer: float
    tae_mean: float
    tae_percentiles: tuple[float, ...]
    tae_histogram: tuple[int, ...]
    margin_percentiles: tuple[float, ...]
    entropy: float
    hit_rates: tuple[float, ...]


@dataclass(frozen=True)
class TraceStatistics:
    """The statistics of a trace. hit_rates: over all layers, by CACHE_RATES."""

    path: Path
    arch: str
    n_tokens: int
    n_prefill: int
    n_decode: int
    n_requests: int
    n_inputs: int
    n_expert: int
    n_expert_used: int
    router: str
    percentiles: tuple[int, ...]
    cache_rates: tuple[float, ...]
    hit_rates: tuple[float, ...]
    layers: tuple[LayerStatistics, ...]


@dataclass(frozen=True)
class LayerArrays:
    """Further data of a layer for plots.

    coactivation: float64[n_expert, n_expert], tokens. hit_rates: float64[n_expert + 1], by cache size.
    """

    coactivation: np.ndarray
    hit_rates: np.ndarray


def analyze(trace: Trace, phase: str = "all") -> tuple[TraceStatistics, list[LayerArrays]]:
    """Analyzes a trace, its tokens of one phase or all.

    Raises:
        FormatError: The records are damaged.
        PyorchError: There are no tokens.
    """
    if phase not in PHASES:
        raise PyorchError(f'phase "{phase}" is not known: use {", ".join(PHASES)}')
    phases = np.asarray(trace.records["phase"])
    wanted = np.arange(len(trace)) if PHASES[phase] is None else np.flatnonzero(phases == PHASES[phase])
    if not len(wanted):
        raise PyorchError(f"{trace.path} holds no tokens" + ("" if phase == "all" else f" of {phase}"))
    requests = np.asarray(trace.records["request"])[wanted]
    positions = np.asarray(trace.records["position"])[wanted]
    # Requests are decoded together, but a cache of one layer sees them one after the other here.
    wanted = wanted[np.lexsort((positions, requests))]
    collectors = [_LayerCollector(trace, i) for i in range(len(trace.header.layers))]
    rows = max(1, CHUNK_BYTES // trace.records.dtype.itemsize)
    for start in range(0, len(wanted), rows):
        records = trace.records[wanted[start : start + rows]]
        if (highest := records["experts"].max()) >= trace.header.n_expert:
            raise FormatError(f"{trace.path} is damaged: it names expert {highest} of {trace.header.n_expert}")
        for collector in collectors:
            collector.add(records)
    header = trace.header
    arrays = [collector.arrays() for collector in collectors]
    sizes = _cache_sizes(header.n_expert)
    return TraceStatistics(
        path=trace.path,
        arch=header.arch,
        n_tokens=len(wanted),
        n_prefill=int((phases[wanted] == PREFILL).sum()),
        n_decode=int((phases[wanted] == DECODE).sum()),
        n_requests=len(np.unique(requests)),
        n_inputs=len(trace.inputs[0]),
        n_expert=header.n_expert,
        n_expert_used=header.n_expert_used,
        router=header.router,
        percentiles=PERCENTILES,
        cache_rates=CACHE_RATES,
        hit_rates=_floats(np.mean([array.hit_rates[sizes] for array in arrays], axis=0)),
        layers=tuple(collector.statistics() for collector in collectors),
    ), arrays


class _LayerCollector:
    """Sums over the records of one layer, chunk by chunk."""

    def __init__(self, trace: Trace, layer: int) -> None:
        header = trace.header
        self._il, self._layer, self._n_expert = header.layers[layer], layer, header.n_expert
        self._full = header.router == "full"
        self._counts = np.zeros(header.n_expert)
        self._pairs = np.zeros((header.n_expert, header.n_expert))
        self._tae: list[np.ndarray] = []
        self._margin: list[np.ndarray] = []
        self._entropy = 0.0
        self._lru = LruDistances(header.n_expert)

    def add(self, records: np.ndarray) -> None:
        experts, probs = records["experts"][:, self._layer], records["probs"][:, self._layer]
        self._counts += activation_counts(experts, self._n_expert)
        self._pairs += coactivation(experts, self._n_expert)
        self._tae.append(token_activating_entropy(probs).astype(np.float32))
        self._margin.append(margin(probs).astype(np.float32))
        whole = records["router"][:, self._layer] if self._full else probs
        self._entropy += float(token_activating_entropy(whole).sum())
        self._lru.add(experts)

    def arrays(self) -> LayerArrays:
        return LayerArrays(self._pairs, self._lru.hit_rates())

    def statistics(self) -> LayerStatistics:
        counts, tae = self._counts, np.concatenate(self._tae)
        even = counts.sum() / len(counts)
        peers = self._pairs[self._pairs.any(axis=1)]
        return LayerStatistics(
            il=self._il,
            activations=tuple(int(count) for count in counts),
            busiest=float(counts.max() / even),
            idlest=float(counts.min() / even),
            gini=gini(counts),
            unused=int((counts == 0).sum()),
            strongest_peer=float((peers.max(axis=1) / peers.sum(axis=1)).mean()) if len(peers) else 0.0,
            tae_mean=float(tae.mean(dtype=np.float64)),
            tae_percentiles=_floats(np.percentile(tae, PERCENTILES)),
            tae_histogram=tuple(int(count) for count in np.histogram(tae, TAE_BINS, (0, 1))[0]),
            margin_percentiles=_floats(np.percentile(np.concatenate(self._margin), PERCENTILES)),
            entropy=self._entropy / len(tae),
            hit_rates=_floats(self._lru.hit_rates()[_cache_sizes(self._n_expert)]),
        )


def _cache_sizes(n_expert: int) -> np.ndarray:
    return np.round(np.array(CACHE_RATES) * n_expert).astype(int)


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def gini(counts: np.ndarray) -> float:
    """Returns the Gini coefficient: 0 for even use, near 1 if one expert has all uses; nan without uses."""
    counts = np.sort(np.asarray(counts, np.float64))
    n, total = len(counts), counts.sum()
    if total == 0:
        return float("nan")
    return float((2 * np.arange(1, n + 1) - n - 1) @ counts / (n * total))


class LruDistances:
    """The depths of selected experts in a layer's LRU stack, from which one pass gets the hits of all cache sizes.

    A cache of C experts has the C that were used last, and those of one token in the order of their slots. A selected
    expert is a hit if it was in the cache before the token; then all of the token's experts move to the top. So an
    expert at depth d is a hit in every cache of more than d experts.
    """

    def __init__(self, n_expert: int) -> None:
        # [d]: uses at depth d; [n_expert]: first uses, which no cache holds
        self.counts = np.zeros(n_expert + 1, np.int64)
        self._last_use = np.full(n_expert, -1, np.int64)
        self._n_tokens = 0

    def add(self, experts: np.ndarray) -> None:
        """Adds the next tokens of the layer, integer[n_tokens, k], with distinct ids in a token."""
        n_expert = len(self._last_use)
        rows = max(1, (1 << 22) // (n_expert * experts.shape[1]))  # bounds the comparison below to 4 MiB
        for start in range(0, len(experts), rows):
            self._add(experts[start : start + rows].astype(np.int64), n_expert)

    def _add(self, experts: np.ndarray, n_expert: int) -> None:
        n, k = experts.shape
        # [t, e]: the last use of e before token t; every use has its own time
        last = np.full((n + 1, n_expert), -1, np.int64)
        last[0] = self._last_use
        times = (self._n_tokens + np.arange(n))[:, None] * k + np.arange(k)
        np.put_along_axis(last[1:], experts, times, axis=1)
        np.maximum.accumulate(last, axis=0, out=last)
        own = np.take_along_axis(last[:-1], experts, axis=1)
        depth = (last[:-1, None, :] > own[:, :, None]).sum(axis=2)
        depth[own < 0] = n_expert
        self.counts += np.bincount(depth.ravel(), minlength=n_expert + 1)
        self._last_use = last[-1]
        self._n_tokens += n

    def hit_rates(self) -> np.ndarray:
        """Returns float64[n_expert + 1]: the share of hits of a cache of 0, 1, ... n_expert experts."""
        total = max(1, self.counts.sum())
        return np.concatenate([[0], np.cumsum(self.counts[:-1])]) / total
