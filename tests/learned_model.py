"""What the eviction policy `learned` does, as its equations say it: against which the library is checked."""

from __future__ import annotations

import numpy as np

N_TABLES = 3
N_MATCHES, TAU, HORIZON, SEARCHES = 8, 0.08, 12, 2
N_VOTERS, FADE, LEAST_VOTES = 24, 0.7, 0.02
STEP, BIAS_SHARE, FEATURE_STEP, DISCOUNT = 0.02, 0.3, 0.5, 0.85


class LearnedValue:
    """value: float64[n_layers, n_expert] of each expert, as of its layer's last visit. Of one context."""

    def __init__(self, n_layers: int, n_expert: int, n_used: int) -> None:
        self.n_layers, self.share = n_layers, n_used / n_expert
        shape = n_layers, n_expert
        self.counts = np.full((3, *shape), self.share)
        self.age = np.full(shape, 20.0)
        self.weights = np.array([0.4, 0.3, 0, 0, 1, 1, 1, 0, np.log(self.share / (1 - self.share) + 1e-3)])
        self.squares = np.full(9, 1e-2)
        self.bias = np.zeros(shape)
        self.tables = np.zeros((N_TABLES, n_layers, n_expert, n_expert))
        self.value = np.full(shape, self.share)
        self.past: list[tuple[np.ndarray, list] | None] = [None] * n_layers
        self.previous: list[int] = []
        self.moments = Moments(n_layers, n_expert, n_used)

    def visit(self, layer: int, used: np.ndarray, continues: bool) -> None:
        hit = np.isin(np.arange(self.bias.shape[1]), used).astype(float)
        fading = 0.5 ** (1 / np.array([12, 48, 400]))[:, None]
        self.counts[:, layer] = fading * self.counts[:, layer] + (1 - fading) * hit
        self.age[layer] = (self.age[layer] + 1) * (1 - hit)
        past = self.past[layer]
        active = [list(used), self.previous, past[1][0] if past else []]
        votes = self.moments.votes(layer, hit, continues)
        features = np.vstack([
            np.log((self.counts[:, layer] + 2e-3) / self.share), np.log1p(self.age[layer]) - 2,
            *(table[layer, rows].sum(0) for table, rows in zip(self.tables, active)),
            np.zeros_like(hit) if votes is None else np.log((votes + LEAST_VOTES) / (1 - votes + LEAST_VOTES)) + 0.5,
            np.ones_like(hit),
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


class Moments:
    """What tokens used after moments that were like the present one. Of one context, with room for all tokens."""

    def __init__(self, n_layers: int, n_expert: int, n_used: int) -> None:
        self.n_layers, self.n_used = n_layers, n_used
        self.tokens: list[np.ndarray] = []  # [n_layers, n_expert] each, nonzero: used
        self.follows: list[bool] = []  # the token follows on the one before
        self.voters: dict[int, float] = {}  # weights, by token

    def votes(self, layer: int, hit: np.ndarray, continues: bool) -> np.ndarray | None:
        """Returns votes from 0 to 1 for the experts of a layer that was visited now, or None if no moment votes."""
        if layer == 0:
            self.tokens.append(np.zeros((self.n_layers, len(hit))))
            self.follows.append(continues and len(self.tokens) > 1)
            self.voters = {token + 1: weight for token, weight in self.voters.items() if self.follows[token + 1]}
        self.tokens[-1][layer] = hit
        if layer % -(-self.n_layers // SEARCHES) == 0:
            faded = {token: FADE * weight for token, weight in self.voters.items()}
            for token, weight in self.search(layer):
                faded[token] = faded.get(token, 0) + weight
            self.voters = dict(sorted(faded.items(), key=lambda voter: (voter[1], voter[0]))[-N_VOTERS:])
        if not self.voters:
            return None
        sums = np.zeros_like(hit)
        for token, weight in self.voters.items():
            unused = np.ones_like(hit)
            for h in range(HORIZON):
                after = token + 1 + h
                if after >= len(self.tokens) - 1 or not self.follows[after]:
                    break
                sums += weight * DISCOUNT**h * self.tokens[after][layer] * unused
                unused *= 1 - self.tokens[after][layer]
        return np.minimum(sums / sum(self.voters.values()), 1)

    def search(self, layer: int) -> list[tuple[int, float]]:
        now = len(self.tokens) - 1
        alike = {}
        for token in range(now - 1):
            if not self.follows[token + 1]:
                continue
            alike[token] = (self.tokens[token] * self.tokens[now])[: layer + 1].sum()
            if self.follows[token] and self.follows[now]:
                alike[token] += (self.tokens[token - 1] * self.tokens[now - 1])[layer + 1 :].sum()
        if not alike:
            return []
        most = max(alike.values())
        best = sorted(alike, key=lambda token: (alike[token], token), reverse=True)[:N_MATCHES]
        weights = np.array([np.exp((alike[token] - most) / (TAU * self.n_layers * self.n_used)) for token in best])
        return list(zip(best, weights / weights.sum()))


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
