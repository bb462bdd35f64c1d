"""How many requests suit a budget, against a count over all choices."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyorch.planning.concurrency import MOST_SLOTS, Concurrency, SlotMemory, choose_slots, distinct_experts


@pytest.mark.parametrize(("n_expert", "n_used", "n_requests"), [(4, 1, 3), (5, 2, 2), (4, 2, 3), (6, 3, 1)])
def test_distinct_experts_are_the_mean_over_all_choices(n_expert: int, n_used: int, n_requests: int) -> None:
    choices = list(combinations(range(n_expert), n_used))
    counts = [len(set().union(*chosen)) for chosen in product(choices, repeat=n_requests)]
    assert distinct_experts(n_expert, n_used, n_requests) == pytest.approx(sum(counts) / len(counts))


@given(layers=st.lists(st.tuples(st.integers(2, 64), st.integers(1, 2), st.integers(1, 1 << 24)), min_size=1,
                       max_size=4),
       n_slots=st.integers(1, 8), share=st.floats(0.05, 1))
def test_one_request_more_than_suits_does_not_fit(layers: list, n_slots: int, share: float) -> None:
    concurrency = Concurrency(tuple(layers), n_slots)
    budget = round(share * sum(n_expert * size for n_expert, _, size in layers))
    n = concurrency.suitable(budget)
    assert 1 <= n <= n_slots
    assert n == 1 or concurrency.step_bytes(n) <= budget
    assert n == n_slots or concurrency.step_bytes(n + 1) > budget
    assert (concurrency.advice(budget) == "") == (n == n_slots)
    assert concurrency.suitable(2 * budget) >= n


def test_the_sentence_has_the_numbers() -> None:
    concurrency = Concurrency(((64, 8, 100),) * 4, n_slots=4)
    assert concurrency.advice(4 * 64 * 100 * 3 // 10) == (
        "-np 2 suits this budget: a step of 4 requests uses about 26 of the 64 experts of a layer, and 19 of them fit")


GIB = 1 << 30


def chosen(free: float, context: float, budget: float | None = None, n_expert: int = 64, n_used: int = 8,
           experts: float = 4.0) -> tuple[int, str]:
    """Of a model whose experts have so many GiB in 16 layers, and a slot's context `context`."""
    layer = SimpleNamespace(n_expert=n_expert, n_expert_used=n_used, slot_bytes=round(experts * GIB / 16 / n_expert))
    memory = SlotMemory(round(free * GIB), round(context * GIB), None if budget is None else round(budget * GIB))
    return choose_slots([layer] * 16, memory)


def test_slots_are_as_many_as_memory_holds_with_their_experts() -> None:
    assert chosen(64, 0.5) == (MOST_SLOTS, "memory has room for their contexts and their experts")
    # Half of the experts: 32 of 64. Five requests use 31, six use 35.
    n, why = chosen(2.01, 0.001)
    assert n == 5 and why == "a step of 6 requests would use about 35 of the 64 experts of a layer, and 32 of them fit"
    assert chosen(1.05, 0.001)[0] == 2 and chosen(0.3, 0.001)[0] == 1
    # Where few of many experts are used, more requests share memory.
    assert chosen(1.05, 0.001, n_expert=256, n_used=4)[0] == MOST_SLOTS
    # A context that costs many experts: half a GiB of two and a half is more than a tenth.
    assert chosen(3, 0.5) == (1, "the context of another one needs 512 MiB, too much of the memory for experts")
    assert chosen(3, 0.1)[0] == 3
    # Where nearly all experts stay in memory beside the contexts, these cost little.
    assert chosen(5.2, 0.5)[0] == 3


def test_a_given_budget_keeps_its_experts_and_slots_take_a_part_of_the_rest() -> None:
    assert chosen(64, 0.5, budget=4)[0] == MOST_SLOTS
    assert chosen(64, 0.5, budget=2)[0] == 5
    assert chosen(5, 0.5, budget=2) == (
        2, "the context of another one needs 512 MiB, too much of the memory that is free")
    assert chosen(1, 0.5, budget=2)[0] == 1  # more than is free: the user's decision
    assert choose_slots([], SlotMemory(8 * GIB, GIB // 2, 0)) == (4, (
        "the context of another one needs 512 MiB, too much of the memory that is free"))


@given(free=st.floats(0, 64), context=st.floats(0.001, 4), budget=st.none() | st.floats(0.1, 4))
def test_more_memory_or_smaller_contexts_give_no_fewer_slots(free: float, context: float, budget: float | None) -> None:
    n = chosen(free, context, budget)[0]
    assert 1 <= n <= MOST_SLOTS and chosen(free, context / 2, budget)[0] >= n
    if budget is not None:
        assert chosen(free + 1, context, budget)[0] >= n
