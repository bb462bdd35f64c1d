"""Placements of every algorithm: memory and coverage; and those that DanceMoE compares with its own, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_problems import problem_of, problems, skewed, used_bytes

from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.errors import BudgetError, PyorchError
from scripts.papers.dancemoe.baselines import ALGORITHMS, eplb, place, smartmoe

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


@algorithms
@given(problem=problems("equal") | problems("different"))
@settings(max_examples=40)
def test_no_device_gets_more_than_its_memory(algorithm: str, problem: Problem) -> None:
    placement = place(problem, algorithm, partial=True)
    assert (used_bytes(placement, problem) <= problem.device_bytes).all()


@algorithms
@given(problem=problems("equal"))
@settings(max_examples=40)
def test_every_expert_is_held_that_memory_has_room_for(algorithm: str, problem: Problem) -> None:
    room = int((problem.device_bytes // problem.sizes[0]).sum())
    missing = max(0, int(problem.n_experts.sum()) - room)
    assert place(problem, algorithm, partial=True).n_uncovered == missing
    if missing:
        with pytest.raises(BudgetError, match=f"^{missing} of {problem.n_experts.sum()} experts have no place"):
            place(problem, algorithm)
    else:
        place(problem, algorithm)


@algorithms
@given(problem=problems("different"))
@settings(max_examples=40)
def test_experts_of_different_sizes_are_all_held_where_no_device_must_be_filled_to_the_brim(
    algorithm: str, problem: Problem
) -> None:
    placement = place(problem, algorithm, partial=True)
    brim = np.maximum(problem.device_bytes - problem.sizes.max(), 0)
    if brim.sum() >= problem.experts_bytes:
        assert placement.n_uncovered == 0
    for row, n_expert in zip(placement.copies, problem.n_experts):
        assert row[:n_expert].min() > 0 or row.max() <= 1  # nothing twice while something is nowhere


@algorithms
@given(problem=problems("equal") | problems("different"), seed=st.integers(0, 3))
@settings(max_examples=10)
def test_a_placement_is_the_same_each_time_and_survives_json(algorithm: str, problem: Problem, seed: int) -> None:
    placement = place(problem, algorithm, partial=True, seed=seed)
    again = Placement.from_fields(json.loads(json.dumps(placement.to_fields())))
    for other in (again, place(problem, algorithm, partial=True, seed=seed)):
        n_expert = other.device.shape[2]
        np.testing.assert_array_equal(other.device, placement.device[:, :, :n_expert])
        assert (other.servers, other.layers, other.n_experts, other.algorithm) == (
            problem.servers, problem.layers, tuple(problem.n_experts.tolist()), algorithm)


def test_an_algorithm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PyorchError, match='"waltz" is not known: use dance, uniform'):
        place(problem_of(np.ones((1, 1, 1)), [1]), "waltz")


def test_users_of_different_tasks_find_more_of_their_experts_at_home_than_with_any_other_placement() -> None:
    rng = np.random.default_rng(2)
    frequencies = skewed(rng, (3, 6, 64))
    problem = problem_of(frequencies, [128, 128, 256])
    ratios = {name: place(problem, name).total_ratio(frequencies) for name in ALGORITHMS}
    assert max(ratios, key=ratios.get) == "dance" and ratios["dance"] > 1.1 * ratios["eplb"]


def test_uniform_and_smartmoe_give_each_expert_one_place_and_devices_alike_many() -> None:
    problem = problem_of(skewed(np.random.default_rng(0), (3, 4, 16)), [32, 32, (32, 32)])
    for name in ("uniform", "smartmoe"):
        placement = place(problem, name)
        assert (placement.copies == 1).all()
        per_device = [(placement.device[server] == number).sum(axis=1)
                      for server, number in [(0, 0), (1, 0), (2, 0), (2, 1)]]
        np.testing.assert_array_equal(per_device, np.full((4, 4), 4))


def test_a_small_server_gets_what_it_can_and_the_others_share_the_rest() -> None:
    problem = problem_of(np.ones((3, 4, 12)), [4, 40, 40])
    for name in ("uniform", "smartmoe"):
        held = place(problem, name).held.sum(axis=2)
        assert held[0].tolist() == [1, 1, 1, 1] and set(held[1:].ravel()) == {5, 6} and held.sum(axis=1)[1] == 22


def test_smartmoe_balances_what_devices_have_to_do() -> None:
    loads = np.array([8, 7, 6, 5, 4, 3, 2, 1.0])
    problem = problem_of(np.broadcast_to(loads / 2, (2, 1, 8)), [8, 8])
    device = smartmoe(problem, np.random.default_rng(0))
    assert [loads[row[0] != ABSENT].sum() for row in device] == [18, 18]


def test_redundance_uses_all_memory() -> None:
    problem = problem_of(skewed(np.random.default_rng(0), (3, 4, 16)), [30, 40, (20, 35)])
    placement = place(problem, "redundance")
    np.testing.assert_array_equal(used_bytes(placement, problem), [30, 40, 20, 35])
    assert (placement.copies >= 1).all() and not (place(problem, "redundance", seed=1).device == placement.device).all()


def test_eplb_gives_replicas_to_the_expert_whose_replicas_have_most_to_do() -> None:
    """8 places for 4 experts: of loads 100, 50, 30 and 20 the replicas are 4 (the most), 2, 1 and 1."""
    loads = np.array([100.0, 50, 30, 20])
    problem = problem_of(np.broadcast_to(loads / 4, (4, 1, 4)), [2, 2, 2, 2])
    device = eplb(problem, np.random.default_rng(0))
    assert (device != ABSENT).sum(axis=0).tolist() == [[4, 2, 1, 1]]
    shares = loads / [4, 2, 1, 1]
    assert sorted(shares[row[0] != ABSENT].sum() for row in device) == [45, 50, 50, 55]


@pytest.mark.parametrize(("loads", "devices"), [
    ([61, 104, 165, 39, 4, 73], [[2, 3], [2, 4], [5, 1], [0, 1]]),
    ([90, 132, 40, 56, 183, 86], [[4, 3], [4, 2], [0, 1], [5, 1]]),
    ([187, 157, 172, 86, 16, 27], [[1, 4], [0, 2], [0, 5], [2, 3]]),
    ([20, 107, 104, 64, 19, 197], [[2, 4], [5, 1], [5, 0], [3, 1]]),
])
def test_eplb_places_as_deepseeks_own_example_does(loads: list[int], devices: list[list[int]]) -> None:
    """The example in its README, node by node: 6 experts on 4 devices of 2 places."""
    frequencies = np.array(loads, float)
    device = eplb(problem_of(np.broadcast_to(frequencies / 4, (4, 1, 6)), [2] * 4), np.random.default_rng(0))
    found = sorted(tuple(np.flatnonzero(row[0] != ABSENT)) for row in device)
    assert found == sorted(tuple(sorted(experts)) for experts in devices)
