"""What the eviction policy `learned` does, as its equations say it: against which the library is checked."""

from __future__ import annotations

import numpy as np

N_TABLES = 3
STEP, BIAS_SHARE, FEATURE_STEP, DISCOUNT = 0.02, 0.3, 0.25, 0.85


class LearnedValue:
    """value: float64[n_layers, n_expert] of each expert, as of its layer's last visit. Of one context."""

    def __init__(self, n_layers: int, n_expert: int, n_used: int) -> None:
        self.n_layers, self.share = n_layers, n_used / n_expert
        shape = n_layers, n_expert
        self.counts = np.full((3, *shape), self.share)
        self.age = np.full(shape, 20.0)
        self.weights = np.array([0.4, 0.3, 0, 0, 1, 1, 1, np.log(self.share / (1 - self.share) + 1e-3)])
        self.squares = np.full(8, 1e-2)
        self.bias = np.zeros(shape)
        self.tables = np.zeros((N_TABLES, n_layers, n_expert, n_expert))
        self.value = np.full(shape, self.share)
        self.past: list[tuple[np.ndarray, list] | None] = [None] * n_layers
        self.previous: list[int] = []

    def visit(self, layer: int, used: np.ndarray, continues: bool) -> None:
        hit = np.isin(np.arange(self.bias.shape[1]), used).astype(float)
        fading = 0.5 ** (1 / np.array([12, 48, 400]))[:, None]
        self.counts[:, layer] = fading * self.counts[:, layer] + (1 - fading) * hit
        self.age[layer] = (self.age[layer] + 1) * (1 - hit)
        past = self.past[layer]
        active = [list(used), self.previous, past[1][0] if past else []]
        features = np.vstack([
            np.log((self.counts[:, layer] + 2e-3) / self.share), np.log1p(self.age[layer]) - 2,
            *(table[layer, rows].sum(0) for table, rows in zip(self.tables, active)), np.ones_like(hit),
        ])
        value = 1 / (1 + np.exp(-(self.weights @ features + self.bias[layer])))
        if past and continues:
            error = self.value[layer] - np.where(hit, 1, DISCOUNT * value)
            gradient = past[0] @ error
            self.squares += gradient**2 / self.n_layers
            self.weights -= FEATURE_STEP / self.n_layers * gradient / np.sqrt(self.squares)
            for table, rows in zip(self.tables, past[1]):
                table[layer, rows] -= STEP * error
            self.bias[layer] -= BIAS_SHARE * STEP * error
        self.value[layer] = value
        self.past[layer] = features, active
        self.previous = list(used)


def hit_rate(used: np.ndarray, request: np.ndarray, n_expert: int, capacity: int, n_warm: int) -> float:
    """Of a cache of `capacity` experts: used [n_tokens, n_layers, n_used], request [n_tokens]."""
    n_tokens, n_layers, n_used = used.shape
    learned = LearnedValue(n_layers, n_expert, n_used)
    resident = np.zeros((n_layers, n_expert), bool)
    hits = uses = 0
    for token in range(n_tokens):
        continues = token > 0 and request[token] == request[token - 1]
        for layer, need in enumerate(used[token].astype(int)):
            if token >= n_warm:
                uses += n_used
                hits += resident[layer, need].sum()
            resident[layer, need] = True
            over = resident.sum() - capacity
            if over > 0:
                turn = (np.arange(n_layers) - layer - 1) % n_layers + 1
                worth = np.where(resident, learned.value * DISCOUNT ** (turn / n_layers)[:, None], np.inf)
                worth[layer, need] = np.inf
                resident.ravel()[np.argsort(worth, axis=None)[:over]] = False
            learned.visit(layer, need, continues)
    return hits / uses
