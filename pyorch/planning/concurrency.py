"""The number of requests that can be decoded together with their experts in the budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyorch.sizes import format_bytes


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


MOST_SLOTS = 8
_SHARE_OF_EXPERTS = 1 / 10  # contexts of further slots may take so much of the memory for experts
_SHARE_OF_REST = 1 / 4  # with a named budget: of the memory that neither it nor the first context needs


@dataclass(frozen=True)
class SlotMemory:
    """The memory that slots share with experts.

    free_bytes: for experts and contexts together. context_bytes: of the context of one slot. budget: for experts; None:
    experts get what contexts leave.
    """

    free_bytes: int
    context_bytes: int
    budget: int | None

    def expert_bytes(self, n_slots: int, most: int) -> int:
        """Returns the bytes for experts, at most `most`."""
        left = self.free_bytes - n_slots * self.context_bytes if self.budget is None else self.budget
        return max(0, min(most, left))

    def holds(self, n_slots: int, most: int) -> bool:
        """Returns whether the contexts cost few experts. With a given budget: little of the memory beside it."""
        if self.budget is None:
            return self.expert_bytes(n_slots, most) >= (1 - _SHARE_OF_EXPERTS) * self.expert_bytes(1, most)
        rest = self.free_bytes - self.context_bytes - self.budget
        return (n_slots - 1) * self.context_bytes <= _SHARE_OF_REST * rest


def choose_slots(layers: Iterable, memory: SlotMemory) -> tuple[int, str]:
    """Returns the number of slots that serves best, and the reason.

    More requests in a step share the reads of dense weights and of common experts, until their experts no longer fit
    into memory together: then a step reads again what it evicted. Each slot needs a context of its own, so that no
    request fails because others have filled a common one.

    Args:
        layers: The layers with routed experts; none for a dense model.
        memory: The memory to divide.
    """
    concurrency = Concurrency.of(layers, MOST_SLOTS)
    most = sum(n_expert * size for n_expert, _, size in concurrency.layers)
    by_context = next((n for n in range(MOST_SLOTS, 1, -1) if memory.holds(n, most)), 1)
    n_slots = next((n for n in range(by_context, 1, -1)
                    if concurrency.step_bytes(n) <= memory.expert_bytes(n, most)), 1)
    if n_slots == MOST_SLOTS:
        return n_slots, "memory has room for their contexts" + (" and their experts" if most else "")
    if n_slots == by_context:
        return n_slots, (f"the context of another one needs {format_bytes(memory.context_bytes)}, too much of the "
                         f"memory {'for experts' if memory.budget is None else 'that is free'}")
    n_expert, n_used, _ = max(concurrency.layers)
    used = distinct_experts(n_expert, n_used, n_slots + 1)
    fit = n_expert * memory.expert_bytes(n_slots + 1, most) / most
    return n_slots, (f"a step of {n_slots + 1} requests would use about {used:.0f} of the {n_expert} experts of a "
                     f"layer, and {fit:.0f} of them fit")
