"""Buddy lists from a trace: which experts are selected together (BuddyMoE, section 3).

Co-activation (eq. 4): M(i, j) counts the tokens that select both i and j; 1 is added to every pair (Laplace
smoothing), and q(j|i) = M(i, j) / sum of M(i, j') over all j' but i. Of equal peers the one that the trace selected
more often comes first, as it is more likely to be resident. An expert that the trace never selected has nothing of its
own to go by: its list holds the most selected experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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

OnProgress = Callable[[str, int, int], None]  # "counting", done, total

SMOOTHING = 1.0  # epsilon of eq. 4

RECORDS_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Settings:
    """How lists are made. Raises PyorchError for values that cannot be."""

    alpha: float = 0.95  # eq. 5
    k_max: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise PyorchError(f"coverage {self.alpha:g} is not in (0, 1]")
        if self.k_max < 1:
            raise PyorchError(f"k-max {self.k_max} is below 1: a list holds at least one buddy")


@dataclass(frozen=True)
class LayerCounts:
    """What the trace says about one layer."""

    activations: np.ndarray  # int64[n_expert], A(i): tokens that selected the expert
    coactivations: np.ndarray  # float64[n_expert, n_expert], M(i, j)
    tae: np.ndarray  # float32[n_tokens] (eq. 1)
    margin: np.ndarray  # float32[n_tokens]


@dataclass(frozen=True)
class ListSizes:
    """How long the lists of a layer are that its alpha gives, cap included."""

    il: int
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


def build(
    model_map: ModelMap, trace: Trace, settings: Settings = Settings(), on_progress: OnProgress | None = None
) -> Built:
    """Makes the buddy lists of a model from a trace of it.

    Raises FormatError where the trace is of another model, or damaged, and PyorchError where it is empty.
    """
    check(model_map, trace)
    layers, sizes = {}, []
    for layer, counted in zip(model_map.layers, count(trace, on_progress)):
        layers[layer.il] = lists_of(layer.il, counted, conditional(counted.coactivations), settings.k_max)
        sizes.append(list_sizes(layers[layer.il], settings.alpha))
    return Built(Buddies(layers, dict.fromkeys(layers, settings.alpha), len(trace)), tuple(sizes))


def count(trace: Trace, on_progress: OnProgress | None = None) -> list[LayerCounts]:
    """What the trace says about each of its layers. Reads it once. FormatError if it names unknown experts."""
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
        for at in range(n_layers):
            p = renormalized(probs[:, at])
            activations[at] += activation_counts(experts[:, at], n_expert)
            pairs[at] += coactivation(experts[:, at], n_expert)
            tae[at, rows], margins[at, rows] = token_activating_entropy(p), margin(p)
    return [LayerCounts(activations[at].astype(np.int64), pairs[at], tae[at], margins[at]) for at in range(n_layers)]


def conditional(coactivations: np.ndarray) -> np.ndarray:
    """q(j|i) of eq. 4, float64[n_expert, n_expert]: row i sums to 1.

    coactivations: M(i, j) of two experts or more; the diagonal does not count.
    """
    smoothed = coactivations + SMOOTHING
    np.fill_diagonal(smoothed, 0)
    return smoothed / smoothed.sum(axis=1, keepdims=True)


def list_sizes(layer: LayerBuddies, cft_alpha: float) -> ListSizes:
    """How long the lists are that alpha gives (eqs. 5, 6)."""
    lengths = layer.prefix_lengths(cft_alpha)
    covered = layer.cut(cft_alpha).q.sum(axis=1, dtype=np.float64)
    there = lengths > 0
    k_max = layer.ids.shape[1]
    return ListSizes(
        layer.il, int((layer.activations > 0).sum()),
        tuple(np.bincount(lengths, minlength=k_max + 1).tolist()), float(lengths.mean()),
        int(((lengths == k_max) & (covered < cft_alpha - 1e-6)).sum()),
        float(covered[there].mean()) if there.any() else 0.0,
    )


def check(model_map: ModelMap, trace: Trace) -> None:
    if not model_map.layers:
        raise PyorchError(f"{model_map.path} has no routed experts, so none can have a buddy")
    trace.check(model_map)


def lists_of(il: int, counted: LayerCounts, scores: np.ndarray, k_max: int) -> LayerBuddies:
    n_expert = len(scores)
    width = min(k_max, n_expert - 1)
    # Stable sorts, the least important key first. The expert itself comes last of all.
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
