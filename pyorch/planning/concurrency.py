"""How many requests may be decoded together before their experts do not fit into the budget together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def distinct_experts(n_expert: int, n_used: int, n_requests: int) -> float:
    """How many experts of a layer a step uses that computes one token of each request, on average.

    Each token takes n_used of n_expert, all as likely: E (1 - (1 - k/E)^n). Routers that prefer some, and requests that
    are alike, use fewer.
    """
    return n_expert * (1 - (1 - n_used / n_expert) ** n_requests)


@dataclass(frozen=True)
class Concurrency:
    """Requests that a server computes together, and what their experts need.

    layers: experts of each layer, how many of them a token uses, and the bytes of one. n_slots: requests that are
    computed together at most (-np).
    """

    layers: tuple[tuple[int, int, int], ...]
    n_slots: int

    @classmethod
    def of(cls, layers: Iterable, n_slots: int) -> Concurrency:
        """layers: of a ModelMap."""
        return cls(tuple((layer.n_expert, layer.n_expert_used, layer.slot_bytes) for layer in layers), n_slots)

    def step_bytes(self, n_requests: int) -> float:
        """Of the experts that a step of all layers uses."""
        return sum(distinct_experts(n_expert, n_used, n_requests) * size for n_expert, n_used, size in self.layers)

    def suitable(self, budget: int) -> int:
        """The most requests, up to n_slots, whose experts fit into a budget together; at least 1.

        A step of more reads experts that the step before had, and that had to go for others of the same step.
        """
        return next((n for n in range(self.n_slots, 1, -1) if self.step_bytes(n) <= budget), 1)

    def advice(self, budget: int) -> str:
        """A sentence where fewer slots suit a budget, else ""."""
        suitable = self.suitable(budget)
        if suitable == self.n_slots:
            return ""
        every = sum(n_expert * size for n_expert, _, size in self.layers)
        n_expert, n_used, _ = max(self.layers)
        used = distinct_experts(n_expert, n_used, self.n_slots)
        return (f"-np {suitable} suits this budget: a step of {self.n_slots} requests uses about {used:.0f} of the "
                f"{n_expert} experts of a layer, and {n_expert * min(1.0, budget / every):.0f} of them fit")
