"""Small clusters of servers that are all alike, and requests of choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyorch.cluster.costs import Costs, ServerCosts

# Round numbers, so that what a step takes can be added up by hand.
SERVER = ServerCosts(step=0.5, layer=1.0, token=0.0, expert=0.25, row=0.125, message=0.0625, disk_latency=2.0,
                     disk_bytes_per_second=1000.0)


def costs_of(
    n_servers: int, n_layers: int, server: ServerCosts = SERVER, rate: float = 100.0, latency: float = 0.5,
    expert_bytes: float | tuple[float, ...] = 400.0, row_bytes: float = 100.0, message_bytes: float = 0.0,
) -> Costs:
    links = np.full((n_servers, n_servers), latency)
    rates = np.full((n_servers, n_servers), rate)
    np.fill_diagonal(links, 0)
    np.fill_diagonal(rates, np.inf)
    costs = Costs.of([server] * n_servers, links, rates, np.broadcast_to(expert_bytes, n_layers).copy(), row_bytes)
    return replace(costs, message_bytes=message_bytes)


class Same:
    """The same request again and again. experts: [n_tokens, n_layers, k]."""

    def __init__(self, experts, n_output: int = 0) -> None:
        self._experts, self._n_output = np.asarray(experts, np.uint16), n_output

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        return self._experts, self._n_output


class Lengths:
    """Prompts of these lengths, drawn, with two layers that have one expert each."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        return np.zeros((int(rng.choice(self._lengths)), 2, 1), np.uint16), 0


class Random:
    """Requests of some tokens that use some experts more than others. popularity: [n_layers, n_expert]."""

    def __init__(self, popularity: np.ndarray, n_tokens: int, n_used: int, n_output: int) -> None:
        self._popularity, self._n_tokens, self._n_used, self._n_output = popularity, n_tokens, n_used, n_output

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        keys = np.log(self._popularity) + rng.gumbel(size=(self._n_tokens, *self._popularity.shape))
        return np.argsort(-keys, axis=2)[:, :, : self._n_used].astype(np.uint16), self._n_output


def zipf(rng: np.random.Generator, n_layers: int, n_expert: int, steepness: float = 1.2) -> np.ndarray:
    """[n_layers, n_expert], each layer in another order."""
    popularity = np.arange(1, n_expert + 1.0) ** -steepness
    return np.stack([rng.permutation(popularity) for _ in range(n_layers)])
