"""Measures whether similar iterations use the same experts: FineMoE's figures 8 and 9."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SEMANTIC, TRAJECTORY, AHEAD = "semantic", "trajectory", "trajectory ahead"
N_BINS = 20


@dataclass(frozen=True)
class Similarity:
    """All pairs of a past and a present iteration: the cosine of known data, and the share of common experts.

    Attributes:
        kind: "semantic", of the embedding layer's outputs (eq. 4); "trajectory", of all routers' distributions (eq. 5),
            as in the paper's figures; "trajectory ahead", as for a prediction: of the layers up to `distance` before
            the compared layer, a pair counted once for each such layer.
        scores: Edges of N_BINS equal parts of the scores.
        hit_rates: The mean in each part, nan in an empty one.
        counts: Of pairs.
        pearson: nan if one of both is constant.
    """

    kind: str
    n_pairs: int
    pearson: float
    scores: tuple[float, ...]
    hit_rates: tuple[float, ...]
    counts: tuple[int, ...]


def similarities(
    past_embeddings: np.ndarray, past_maps: np.ndarray, past_experts: np.ndarray,
    embeddings: np.ndarray, maps: np.ndarray, experts: np.ndarray, distance: int,
) -> list[Similarity]:
    """Compares float32[n, n_embd], float32[n, L, n_expert] and integers [n, L, k] of past and present iterations."""
    overlap = overlaps(experts, past_experts, maps.shape[-1])
    mean = overlap.mean(axis=0)
    found = [
        _similarity(SEMANTIC, cosines(embeddings, past_embeddings), mean),
        _similarity(TRAJECTORY, trajectory_cosines(maps, past_maps)[-1], mean),
    ]
    if distance < maps.shape[1]:
        ahead = trajectory_cosines(maps, past_maps)[: -distance]
        found.append(_similarity(AHEAD, ahead, overlap[distance:]))
    return found


def overlaps(experts: np.ndarray, past_experts: np.ndarray, n_expert: int) -> np.ndarray:
    """Returns float32[L, n, n_past]: the share of the experts [n, L, k] of an iteration that a past one used too."""
    return np.stack([
        _uses(experts[:, layer], n_expert) @ _uses(past_experts[:, layer], n_expert).T
        for layer in range(experts.shape[1])
    ]) / np.float32(experts.shape[2])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns float32[n, m] of rows [n, d] and [m, d]; 0 if one is 0."""
    return _unit(a) @ _unit(b).T


def trajectory_cosines(maps: np.ndarray, past_maps: np.ndarray) -> np.ndarray:
    """Returns float32[L, n, n_past]: of the first layers up to each, of float32[n, L, n_expert]."""
    dots = np.cumsum([maps[:, layer] @ past_maps[:, layer].T for layer in range(maps.shape[1])], axis=0)
    norms, past_norms = (np.sqrt(np.cumsum((rows**2).sum(axis=-1), axis=1)).T for rows in (maps, past_maps))
    return dots / np.maximum(norms[:, :, None] * past_norms[:, None, :], np.float32(1e-20))


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the correlation coefficient; nan if x or y is constant."""
    x, y = (np.asarray(values, np.float64).ravel() for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else float("nan")


def _similarity(kind: str, scores: np.ndarray, hit_rates: np.ndarray) -> Similarity:
    scores, hit_rates = scores.ravel(), hit_rates.ravel()
    edges = np.linspace(scores.min(), scores.max(), N_BINS + 1)
    part = np.clip(np.searchsorted(edges, scores, side="right") - 1, 0, N_BINS - 1)
    counts = np.bincount(part, minlength=N_BINS)
    sums = np.bincount(part, hit_rates, minlength=N_BINS)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Similarity(kind, scores.size, pearson(scores, hit_rates), tuple(edges.tolist()), tuple(means.tolist()),
                      tuple(counts.tolist()))


def _uses(experts: np.ndarray, n_expert: int) -> np.ndarray:
    """Returns float32[n, n_expert]: 1 for each expert of [n, k]."""
    uses = np.zeros((len(experts), n_expert), np.float32)
    np.put_along_axis(uses, experts.astype(np.int64), 1, axis=1)
    return uses


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-20))
