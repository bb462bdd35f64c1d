"""Buddy lists from a trace: experts that are selected together, or compute alike (BuddyMoE, section 3).

Co-activation (eq. 4): M(i, j) counts the tokens that select both i and j, each as 1 or as the smaller of the two
probabilities; epsilon is added to every pair (Laplace smoothing), and q(j|i) = M(i, j) / sum of M(i, j') over all j'
except i. By outputs, a peer's score is its mean cosine with the expert on the trace's router inputs, instead of q or
times q. Of equal peers, the one that the trace selected more often comes first, because it is more likely resident. An
expert that the trace never selected has no counts of its own: its list has the most selected experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyorch.convert import expert_outputs
from pyorch.convert.output_similarity import RouterInputs, compare
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.buddies import N_PERCENTILES, Buddies, LayerBuddies
from pyorch.traces.file import Trace
from pyorch.traces.routing_statistics import (
    activation_counts,
    coactivation,
    margin,
    renormalized,
    token_activating_entropy,
)

OnProgress = Callable[[str, int, int], None]  # "counting" or "comparing", done, total

WEIGHTINGS = ("binary", "probability")
SIMILARITIES = ("coactivation", "output", "both")

RECORDS_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Settings:
    """The settings of the lists.

    Attributes:
        alpha: Of eq. 5, spread evenly over the layers and linear between them.
        k_max: Buddies in a list at most.
        weighting: "binary", or "probability": a token counts as the smaller of the two.
        smoothing: epsilon.
        warm_up: Token t of a request counts as (t + 1) / (warm_up + 1), at most as 1.
        similarity: One of SIMILARITIES.

    Raises:
        PyorchError: A value is invalid.
    """

    alpha: tuple[float, ...] = (0.95,)
    k_max: int = 16
    weighting: str = "binary"
    smoothing: float = 1.0
    warm_up: int = 0
    similarity: str = "coactivation"

    def __post_init__(self) -> None:
        for name, names in (("weighting", WEIGHTINGS), ("similarity", SIMILARITIES)):
            if getattr(self, name) not in names:
                raise PyorchError(f'{name} {getattr(self, name)} is not known: use {" or ".join(names)}')
        for alpha in self.alpha:
            if not 0 < alpha <= 1:
                raise PyorchError(f"coverage {alpha:g} is not in (0, 1]")
        if not 0 <= self.smoothing < float("inf"):
            raise PyorchError(f"smoothing {self.smoothing:g} is not a number of 0 or more")
        if self.warm_up < 0:
            raise PyorchError(f"warm-up {self.warm_up} is below 0")
        if self.k_max < 1:
            raise PyorchError(f"k-max {self.k_max} is below 1: a list holds at least one buddy")

    def alphas(self, n_layers: int) -> np.ndarray:
        """Returns the schedule over depth, float64[n_layers]. With one value per layer, these values."""
        return np.interp(np.linspace(0, 1, n_layers), np.linspace(0, 1, len(self.alpha)), self.alpha)


@dataclass(frozen=True)
class LayerCounts:
    """The counts of a trace for one layer."""

    activations: np.ndarray  # int64[n_expert], A(i): tokens that selected the expert
    coactivations: np.ndarray  # float64[n_expert, n_expert], M(i, j)
    tae: np.ndarray  # float32[n_tokens] (eq. 1)
    margin: np.ndarray  # float32[n_tokens]


@dataclass(frozen=True)
class ListSizes:
    """The lengths of a layer's lists with its alpha and the cap k_max."""

    il: int
    alpha: float
    n_active: int  # experts that the trace selected
    counts: tuple[int, ...]  # [n]: experts with n buddies, from 0 to k_max
    mean: float
    capped: int  # lists that reach k_max before alpha
    covered: float  # mean sum of q in a list


@dataclass(frozen=True)
class Built:
    """Buddy lists and their report."""

    buddies: Buddies
    sizes: tuple[ListSizes, ...]


def build(
    model_map: ModelMap, trace: Trace, settings: Settings = Settings(), on_progress: OnProgress | None = None
) -> Built:
    """Makes the buddy lists of a model from a trace of it.

    Raises:
        FormatError: The trace belongs to another model, or is damaged.
        PyorchError: The trace is empty; or outputs are to be compared, and the trace has no router inputs, or pyorch
            does not know how the model's experts compute.
    """
    check(model_map, trace)
    inputs = router_inputs(model_map, trace) if settings.similarity != "coactivation" else None
    layers, sizes, n = {}, [], len(model_map.layers)
    alphas = dict(zip((layer.il for layer in model_map.layers), settings.alphas(n).tolist()))
    for done, (layer, counted) in enumerate(zip(model_map.layers, count(trace, settings, on_progress))):
        scores = conditional(counted.coactivations, settings.smoothing)
        if inputs is not None:
            if on_progress is not None:
                on_progress("comparing", done, n)
            experts = expert_outputs.LayerExperts(model_map, layer.il)
            scores = by_outputs(scores, compare(experts, *inputs.layer(layer.il, layer.n_expert)).cosine,
                                settings.similarity)
        layers[layer.il] = lists_of(layer.il, counted, scores, settings.k_max)
        sizes.append(list_sizes(layers[layer.il], alphas[layer.il]))
    return Built(Buddies(layers, alphas, len(trace)), tuple(sizes))


def count(
    trace: Trace, settings: Settings = Settings(), on_progress: OnProgress | None = None
) -> list[LayerCounts]:
    """Counts the trace, by layer, in one pass. FormatError: it names unknown experts."""
    header, n = trace.header, len(trace)
    n_layers, n_expert = len(header.layers), header.n_expert
    activations = np.zeros((n_layers, n_expert))
    pairs = np.zeros((n_layers, n_expert, n_expert))
    tae, margins = np.empty((2, n_layers, n), np.float32)
    for start in range(0, n, RECORDS_AT_ONCE):
        if on_progress is not None:
            on_progress("counting", start, n)
        records = trace.records[start : start + RECORDS_AT_ONCE]
        rows = slice(start, start + len(records))
        experts, probs = records["experts"], records["probs"]
        if experts.max() >= n_expert:
            raise FormatError(f"{trace.path} is damaged: it names expert {experts.max()} of {n_expert}")
        weights = np.minimum((records["position"] + 1.0) / (settings.warm_up + 1), 1) if settings.warm_up else None
        for at in range(n_layers):
            p = renormalized(probs[:, at])
            activations[at] += activation_counts(experts[:, at], n_expert)
            pairs[at] += coactivation(
                experts[:, at], n_expert, p if settings.weighting == "probability" else None, weights)
            tae[at, rows], margins[at, rows] = token_activating_entropy(p), margin(p)
    return [LayerCounts(activations[at].astype(np.int64), pairs[at], tae[at], margins[at]) for at in range(n_layers)]


def conditional(coactivations: np.ndarray, smoothing: float = Settings.smoothing) -> np.ndarray:
    """Returns q(j|i) of eq. 4, float64[n_expert, n_expert]: row i sums to 1, or is 0 if nothing was counted for i.

    Args:
        coactivations: M(i, j) of two experts or more; the diagonal does not count.
        smoothing: epsilon, which is added to every pair.
    """
    return _shares(coactivations + smoothing)


def by_outputs(q: np.ndarray, cosine: np.ndarray, similarity: str) -> np.ndarray:
    """Returns the scores by the mean cosines of outputs, below 0 as 0: alone ("output"), or times q ("both").

    Both arguments and the result are float[n_expert, n_expert]. Rows of the result sum to 1. An expert without a peer
    of positive score keeps its row of q.
    """
    alike = np.maximum(cosine.astype(np.float64), 0)
    scores = _shares(alike if similarity == "output" else alike * q)
    return np.where(scores.any(axis=1, keepdims=True), scores, q)


def _shares(values: np.ndarray) -> np.ndarray:
    values = np.where(np.eye(len(values), dtype=bool), 0, values)
    sums = values.sum(axis=1, keepdims=True)
    return np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)


def list_sizes(layer: LayerBuddies, cft_alpha: float) -> ListSizes:
    """Returns the lengths of the lists with alpha (eqs. 5, 6)."""
    lengths = layer.prefix_lengths(cft_alpha)
    covered = layer.cut(cft_alpha).q.sum(axis=1, dtype=np.float64)
    has_buddies = lengths > 0
    k_max = layer.ids.shape[1]
    return ListSizes(
        layer.il, cft_alpha, int((layer.activations > 0).sum()),
        tuple(np.bincount(lengths, minlength=k_max + 1).tolist()), float(lengths.mean()),
        int(((lengths == k_max) & (covered < cft_alpha - 1e-6)).sum()),
        float(covered[has_buddies].mean()) if has_buddies.any() else 0.0,
    )


def check(model_map: ModelMap, trace: Trace) -> None:
    if not model_map.layers:
        raise PyorchError(f"{model_map.path} has no routed experts, so none can have a buddy")
    trace.check(model_map)


def router_inputs(model_map: ModelMap, trace: Trace) -> RouterInputs:
    """Returns the inputs for comparing outputs. PyorchError: there are none, or the experts' formula is unknown."""
    expert_outputs.check_known(model_map)
    inputs = RouterInputs(trace)
    if not len(inputs):
        raise PyorchError(f"{trace.path} has no router inputs to compare outputs on: record it with `pyorch profile "
                          "--inputs 512`")
    return inputs


def lists_of(il: int, counted: LayerCounts, scores: np.ndarray, k_max: int) -> LayerBuddies:
    n_expert = len(scores)
    width = min(k_max, n_expert - 1)
    # Stable sorts, the least important key first. The expert itself comes last.
    popular = np.argsort(-counted.activations, kind="stable")
    ranked = np.where(np.eye(n_expert, dtype=bool), -1, scores)[:, popular]
    ids = popular[np.argsort(-ranked, axis=1, kind="stable")[:, :width]]
    percentiles = np.arange(N_PERCENTILES)
    return LayerBuddies(
        il,
        ids.astype(np.int32),
        np.take_along_axis(scores, ids, axis=1).astype(np.float32),
        counted.activations,
        np.percentile(counted.tae, percentiles).astype(np.float32),
        np.percentile(counted.margin, percentiles).astype(np.float32),
    )
