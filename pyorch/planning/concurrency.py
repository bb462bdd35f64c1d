"""The number of requests that can be decoded together with their experts in the budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def distinct_experts(n_expert: int, n_used: int, n_requests: int) -> float:
    """Returns the mean number of experts of a layer in a step that computes one token of each request.

    Each token uses n_used of n_expert experts, all equally likely: E (1 - (1 - k/E)^n). Routers that prefer some
    experts, and similar requests, use fewer.
    """
    return n_expert * (1 - (1 - n_used / n_expert) ** n_requests)


@dataclass(frozen=True)
class Concurrency:
    """Requests that a server computes together, and their experts.

    layers: for each layer the number of experts, the number that a token uses, and the bytes of one. n_slots: the most
    requests computed together (-np).
    """

    layers: tuple[tuple[int, int, int], ...]
    n_slots: int

    @classmethod
    def of(cls, layers: Iterable, n_slots: int) -> Concurrency:
        """Makes one from the layers of a ModelMap."""
        return cls(tuple((layer.n_expert, layer.n_expert_used, layer.slot_bytes) for layer in layers), n_slots)

    def step_bytes(self, n_requests: int) -> float:
        """Returns the bytes of the experts that a step uses in all layers."""
        return sum(distinct_experts(n_expert, n_used, n_requests) * size for n_expert, n_used, size in self.layers)

    def suitable(self, budget: int) -> int:
        """Returns the most requests, from 1 to n_slots, whose experts fit into a budget together.

        With more requests, a step reads experts again that it evicted for other requests of the step before.
        """
        return next((n for n in range(self.n_slots, 1, -1) if self.step_bytes(n) <= budget), 1)

    def advice(self, budget: int) -> str:
        """Returns a sentence if fewer slots suit a budget, otherwise ""."""
        suitable = self.suitable(budget)
        if suitable == self.n_slots:
            return ""
        every = sum(n_expert * size for n_expert, _, size in self.layers)
        n_expert, n_used, _ = max(self.layers)
        used = distinct_experts(n_expert, n_used, self.n_slots)
        return (f"-np {suitable} suits this budget: a step of {self.n_slots} requests uses about {used:.0f} of the "
                f"{n_expert} experts of a layer, and {n_expert * min(1.0, budget / every):.0f} of them fit")
