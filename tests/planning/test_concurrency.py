"""How many requests suit a budget, against a count over all choices."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyorch.planning.concurrency import Concurrency, distinct_experts


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
