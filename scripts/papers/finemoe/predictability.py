"""Measures predictability: entropies of iterations and of requests, and errors of predicted states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.runtime.routers import Router

AGGREGATED = (1, 2, 4, 16, 64)  # iterations of a request


@dataclass(frozen=True)
class Entropy:
    """The entropy of the mean distribution over experts of n_iterations of a request, in bits; the mean over requests.

    n_iterations 0: whole requests. by_layer: `mean` is their mean. n_requests: with at least this length.
    """

    n_iterations: int
    n_requests: int
    by_layer: tuple[float, ...]
    mean: float


@dataclass(frozen=True)
class StateCosine:
    """The cosine between a predicted and the true input of the router one layer ahead, the mean over tokens.

    predictor: The one that applies the router to it. by_layer: of the layer ahead, nan for the first.
    """

    predictor: str
    by_layer: tuple[float, ...]
    mean: float


def entropies(probs: np.ndarray, request: np.ndarray, aggregated: Sequence[int] = AGGREGATED) -> list[Entropy]:
    """Returns entropies of routers' distributions, float32[n, L, n_expert]; the tokens of a request are consecutive.

    FineMoE, fig. 3: aggregating over a request removes information about an iteration. The first iterations count.
    """
    requests = np.split(probs, np.flatnonzero(np.diff(request)) + 1)
    rows = []
    for n in (*aggregated, 0):
        of_requests = [request[:n] if n else request for request in requests if len(request) >= n]
        if of_requests:
            bits = np.mean([_bits(of_request.mean(axis=0)) for of_request in of_requests], axis=0)
            rows.append(Entropy(n, len(of_requests), tuple(bits.tolist()), float(bits.mean())))
    return rows


def state_cosines(
    states: np.ndarray, experts: np.ndarray, weights: np.ndarray, routers: Sequence[Router],
    defaults: Mapping[int, np.ndarray],
) -> list[StateCosine]:
    """Returns cosines for Speculating Experts, fig. 3.

    Args:
        states: float32[n, L, n_embd], the residual states before the routers.
        experts, weights: [n, L, k], selected.
        routers: Of the L layers.
        defaults: float32[n_expert, n_embd], by layer; some may be missing.
    """
    found: dict[str, list[float]] = {"next-router": [float("nan")], "quasi-hidden": [float("nan")]}
    for layer in range(1, states.shape[1]):
        before, ahead = states[:, layer - 1], routers[layer]
        truth = _input(states[:, layer], ahead)
        guess = before
        if layer - 1 in defaults:
            guess = before + np.einsum("nk,nkd->nd", weights[:, layer - 1], defaults[layer - 1][experts[:, layer - 1]])
        found["next-router"].append(_cosine(_input(before, routers[layer - 1]), truth))
        found["quasi-hidden"].append(_cosine(_input(guess, ahead), truth))
    return [StateCosine(name, tuple(values), float(np.mean(values[1:]))) for name, values in found.items()]


def _bits(probs: np.ndarray) -> np.ndarray:
    """Returns entropies over the last axis."""
    return -(probs * np.log2(np.maximum(probs, np.float32(1e-30)))).sum(axis=-1)


def _input(states: np.ndarray, router: Router) -> np.ndarray:
    if router.norm is None:
        return states
    return states / np.sqrt((states**2).mean(axis=-1, keepdims=True) + np.float32(router.eps)) * router.norm


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(((a * b).sum(axis=-1) / np.maximum(norms, np.float32(1e-20))).mean())
