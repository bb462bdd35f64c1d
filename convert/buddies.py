"""Buddy lists from a trace: which experts are selected together, or compute alike (BuddyMoE, section 3).

Co-activation (eq. 4): M(i, j) counts the tokens that select both i and j, each as 1 or as the smaller of
their two renormalized probabilities; epsilon is added to every pair (Laplace smoothing), and
q(j|i) = M(i, j) / sum of M(i, j') over all j' but i.

Output similarity: cos(i, j) is the mean cosine of the two experts' outputs on sampled router inputs of the
tokens that selected i (pyorch.convert.expert_outputs).

Score, always normalized over all peers of an expert:

    coactivation    q(j|i)
    output          max(cos(i, j), 0)
    both            q(j|i) * max(cos(i, j), 0)

An expert none of whose peers has a positive cosine keeps q(j|i). Equal scores: the peer that the trace
selected more often comes first, as it is more likely to be resident. Peers with a score of zero are not in a
list, but an active expert always has a buddy. An expert that the trace never selected has nothing of its own
to go by: smoothing makes all its peers equal, so that its list holds the most selected ones, and without
smoothing it is empty; with outputs its peers are those that compute alike on all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyorch.convert import expert_outputs
from pyorch.convert.expert_outputs import OutputSimilarity
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.buddies import N_PERCENTILES, SIMILARITIES, Buddies, LayerBuddies
from pyorch.traces.file import Trace
from pyorch.traces.routing_statistics import (
    activation_counts,
    coactivation,
    margin,
    renormalized,
    token_activating_entropy,
)

WEIGHTINGS = ("binary", "probability")

OnProgress = Callable[[str, int, int], None]  # "counting" or "comparing", done, total

RECORDS_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Settings:
    """How lists are made. Raises PyorchError for values that cannot be."""

    similarity: str = "coactivation"
    alpha: tuple[float, float] = (0.95, 0.95)  # of the first and of the last layer, linear between them (eq. 5)
    k_max: int = 16
    weighting: str = "binary"
    smoothing: float = 1.0  # epsilon
    warm_up: int = 0  # tokens at the begin of each request, of which token t counts as (t + 1) / (warm_up + 1)

    def __post_init__(self) -> None:
        for what, value, names in (
            ("similarity", self.similarity, SIMILARITIES), ("weighting", self.weighting, WEIGHTINGS),
        ):
            if value not in names:
                raise PyorchError(f"{what} {value} is not one of {', '.join(names)}")
        if not all(0 < alpha <= 1 for alpha in self.alpha):
            raise PyorchError(f"alpha {':'.join(dict.fromkeys(f'{alpha:g}' for alpha in self.alpha))} is not in (0, 1]")
        if self.k_max < 1:
            raise PyorchError(f"k-max {self.k_max} is below 1: a list holds at least one buddy")
        if not 0 <= self.smoothing < float("inf"):
            raise PyorchError(f"smoothing {self.smoothing:g} is not a number of 0 or more")
        if self.warm_up < 0:
            raise PyorchError(f"warm-up {self.warm_up} is below 0")

    def alphas(self, n_layers: int) -> np.ndarray:
        """float64[n_layers]: the monotone schedule over depth."""
        return np.linspace(*self.alpha, n_layers)


@dataclass(frozen=True)
class LayerCounts:
    """What the trace says about one layer."""

    activations: np.ndarray  # int64[n_expert], A(i): tokens that selected the expert
    coactivations: dict[str, np.ndarray]  # float64[n_expert, n_expert] for each of WEIGHTINGS, M(i, j)
    tae: np.ndarray  # float32[n_tokens] (eq. 1)
    margin: np.ndarray  # float32[n_tokens]


@dataclass(frozen=True)
class ListSizes:
    """How long the lists of a layer are that its alpha gives, cap included."""

    il: int
    alpha: float
    n_active: int  # experts that the trace selected
    counts: tuple[int, ...]  # [n]: experts with n buddies, from 0 to k_max
    mean: float
    capped: int  # lists that end by k_max before they reach alpha
    covered: float  # mean sum of q in a list


@dataclass(frozen=True)
class Built:
    """Buddy lists and what there is to report on them."""

    buddies: Buddies
    sizes: tuple[ListSizes, ...]
    n_inputs: int  # sampled tokens whose outputs were compared


def build(
    model_map: ModelMap, trace: Trace, settings: Settings = Settings(), compare: bool = False,
    on_progress: OnProgress | None = None,
) -> Built:
    """Makes the buddy lists of a model from a trace of it.

    Args:
        compare: compute the experts' outputs even where the score does not need them: for the scales.

    Raises:
        FormatError: the trace is of another model, or damaged.
        PyorchError: the trace is empty, has no router inputs where outputs are to be compared, or it is not
            known how the experts compute.
    """
    compare = compare or settings.similarity != "coactivation"
    check(model_map, trace, compare)
    report = on_progress or (lambda *_: None)
    counts = count(trace, settings.warm_up, report)
    inputs = RouterInputs(trace) if compare else None
    layers, sizes = {}, []
    alphas = dict(zip((layer.il for layer in model_map.layers), settings.alphas(len(model_map.layers)).tolist()))
    for done, (layer, counted) in enumerate(zip(model_map.layers, counts)):
        outputs = None
        if inputs is not None:
            report("comparing", done, len(counts))
            experts = expert_outputs.LayerExperts(model_map, layer.il)
            outputs = expert_outputs.compare(experts, *inputs.layer(layer.il, layer.n_expert))
        q = conditional(counted.coactivations[settings.weighting], settings.smoothing)
        layers[layer.il] = lists_of(layer.il, counted, score(q, outputs, settings.similarity), outputs, settings.k_max)
        sizes.append(list_sizes(layers[layer.il], alphas[layer.il]))
    if inputs is not None:
        report("comparing", len(counts), len(counts))
    buddies = Buddies(layers, alphas, settings.similarity, len(trace))
    return Built(buddies, tuple(sizes), 0 if inputs is None else len(inputs))


def count(trace: Trace, warm_up: int = 0, on_progress: OnProgress | None = None) -> list[LayerCounts]:
    """What the trace says about each of its layers. Reads it once. FormatError if it names unknown experts."""
    header, n = trace.header, len(trace)
    n_layers, n_expert = len(header.layers), header.n_expert
    activations = np.zeros((n_layers, n_expert))
    square = {name: np.zeros((n_layers, n_expert, n_expert)) for name in WEIGHTINGS}
    tae, margins = np.empty((2, n_layers, n), np.float32)
    for start in range(0, n, RECORDS_AT_ONCE):
        if on_progress is not None:
            on_progress("counting", start, n)
        records = trace.records[start : start + RECORDS_AT_ONCE]
        rows = slice(start, start + len(records))
        experts, probs = records["experts"], records["probs"]
        if experts.max() >= n_expert:
            raise FormatError(f"{trace.path} is damaged: it names expert {experts.max()} of {n_expert}")
        # An early token of a request was routed with little context to go by.
        weights = np.minimum((records["position"] + 1) / (warm_up + 1), 1)
        for at in range(n_layers):
            p = renormalized(probs[:, at])
            activations[at] += activation_counts(experts[:, at], n_expert)
            both = coactivation(experts[:, at], p, n_expert, weights)
            for name, counted in zip(WEIGHTINGS, both):
                square[name][at] += counted
            tae[at, rows], margins[at, rows] = token_activating_entropy(p), margin(p)
    return [LayerCounts(activations[at].astype(np.int64), {name: square[name][at] for name in WEIGHTINGS},
                        tae[at], margins[at]) for at in range(n_layers)]


def conditional(coactivations: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
    """q(j|i) of eq. 4, float64[n_expert, n_expert]: row i sums to 1, or is 0 where there is nothing to go by.

    Args:
        coactivations: M(i, j); the diagonal does not count.
        smoothing: epsilon, added to every pair.
    """
    smoothed = coactivations + smoothing
    np.fill_diagonal(smoothed, 0)
    return _normalized(smoothed)


def score(q: np.ndarray, outputs: OutputSimilarity | None, similarity: str) -> np.ndarray:
    """float64[n_expert, n_expert]: how much peer j recommends itself for i, rows as those of conditional()."""
    if similarity == "coactivation":
        return q
    alike = np.maximum(outputs.cosine.astype(np.float64), 0)
    np.fill_diagonal(alike, 0)
    scores = _normalized(alike if similarity == "output" else q * alike)
    return np.where(scores.any(axis=1, keepdims=True), scores, q)


def list_sizes(layer: LayerBuddies, cft_alpha: float) -> ListSizes:
    """How long the lists are that alpha gives (eqs. 5, 6)."""
    lengths = layer.prefix_lengths(cft_alpha)
    covered = layer.cut(cft_alpha).q.sum(axis=1, dtype=np.float64)
    there = lengths > 0
    k_max = layer.ids.shape[1]
    return ListSizes(
        layer.il, cft_alpha, int((layer.activations > 0).sum()),
        tuple(np.bincount(lengths, minlength=k_max + 1).tolist()), float(lengths.mean()),
        int(((lengths == k_max) & (covered < cft_alpha - 1e-6)).sum()),
        float(covered[there].mean()) if there.any() else 0.0,
    )


class RouterInputs:
    """The trace's sample of router inputs, and what the routers chose for them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        indices, self._inputs = trace.inputs
        self._experts = trace.records["experts"][indices]

    def __len__(self) -> int:
        return len(self._inputs)

    def layer(self, il: int, n_expert: int) -> tuple[np.ndarray, np.ndarray]:
        """float16[n, n_embd] router inputs and bool[n, n_expert] selected experts."""
        index = self._trace.layer_index(il)
        selected = np.zeros((len(self), n_expert), bool)
        np.put_along_axis(selected, self._experts[:, index].astype(np.int64), True, axis=1)
        return self._inputs[:, index], selected


def check(model_map: ModelMap, trace: Trace, compare: bool) -> None:
    if not model_map.layers:
        raise PyorchError(f"{model_map.path} has no routed experts, so none can have a buddy")
    trace.check(model_map)
    if compare:
        try:
            expert_outputs.check_known(model_map)
        except PyorchError as error:
            raise PyorchError(f"{error}, so outputs cannot be compared: use --similarity coactivation") from None
        if not len(trace.inputs[0]):
            raise PyorchError(f"{trace.path} has no router inputs to compare outputs on: record it with "
                              "--inputs 512, or use --similarity coactivation")


def _normalized(values: np.ndarray) -> np.ndarray:
    sums = values.sum(axis=1, keepdims=True)
    return np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)


def lists_of(
    il: int, counted: LayerCounts, scores: np.ndarray, outputs: OutputSimilarity | None, k_max: int
) -> LayerBuddies:
    n_expert = len(scores)
    width = min(k_max, n_expert - 1)
    active = counted.activations > 0
    # Stable sorts, the least important key first. The expert itself comes last of all.
    popular = np.argsort(-counted.activations, kind="stable")
    ranked = np.where(np.eye(n_expert, dtype=bool), -1, scores)[:, popular]
    ids = popular[np.argsort(-ranked, axis=1, kind="stable")[:, :width]]
    q = np.take_along_axis(scores, ids, axis=1)
    kept = q > 0
    kept[:, 0] |= active
    scale, left = np.full((2, *ids.shape), np.nan)
    if outputs is not None:
        scale, left = (np.take_along_axis(values, ids, axis=1) for values in (outputs.scale, outputs.left))
    percentiles = np.arange(N_PERCENTILES)
    return LayerBuddies(
        il,
        np.where(kept, ids, -1).astype(np.int32),
        np.where(kept, q, 0).astype(np.float32),
        np.where(kept, scale, np.nan).astype(np.float32),
        counted.activations,
        np.percentile(counted.tae, percentiles).astype(np.float32),
        np.percentile(counted.margin, percentiles).astype(np.float32),
        np.where(kept, left, np.nan).astype(np.float32),
    )
