"""Placements: memory and coverage of every algorithm; DanceMoE's and the others by hand; files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from placement_problems import problem_of, skewed

from pyorch.cluster.placement.algorithms import ALGORITHMS, place
from pyorch.cluster.placement.baselines import eplb, smartmoe
from pyorch.cluster.placement.dance import allocate, assign, entropies
from pyorch.cluster.placement.exchange import exchange
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.errors import BudgetError, PyorchError

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


@st.composite
def problems(draw, sizes: str) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    n_servers, n_layers, n_expert = (draw(st.integers(1, most)) for most in (4, 4, 9))
    frequencies = skewed(rng, (n_servers, n_layers, n_expert))
    frequencies[rng.random(frequencies.shape) < draw(st.sampled_from([0, 0.3, 1]))] = 0
    n_experts = rng.integers(1, n_expert + 1, n_layers) if draw(st.booleans()) else np.full(n_layers, n_expert)
    of_layers = np.full(n_layers, 5) if sizes == "equal" else rng.integers(1, 8, n_layers)
    share = draw(st.floats(0.2, 3.0))
    parts = rng.dirichlet(np.ones(n_servers * 3)).reshape(n_servers, 3)
    capacities = [(share * n_experts @ of_layers * part[: rng.integers(1, 4)]).astype(int) for part in parts]
    return problem_of(frequencies, [tuple(map(int, of)) for of in capacities], of_layers, n_experts)


def used_bytes(placement: Placement, problem: Problem) -> np.ndarray:
    """Counted expert by expert."""
    used = [[0] * len(devices) for devices in problem.capacities]
    for server, layer, expert in zip(*np.nonzero(placement.held)):
        assert expert < problem.n_experts[layer]
        used[server][placement.device[server, layer, expert]] += int(problem.sizes[layer])
    return np.concatenate(used)


@algorithms
@given(problem=problems("equal") | problems("different"))
@settings(max_examples=40)
def test_no_device_gets_more_than_its_memory(algorithm: str, problem: Problem) -> None:
    placement = place(problem, algorithm, partial=True)
    assert (used_bytes(placement, problem) <= problem.device_bytes).all()
    for server, used in enumerate(placement.used_bytes(problem.sizes)):
        counted = used_bytes(placement, problem)[problem.device_server == server]
        np.testing.assert_array_equal(used, counted[: len(used)])


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


# --- DanceMoE's algorithm


def test_memory_is_divided_by_entropy() -> None:
    """Algorithm 1, step 1, by hand: entropies of 1 and 3 bits, and 8 places."""
    two, all_of_eight = [4, 4, 0, 0, 0, 0, 0, 0], [1] * 8
    problem = problem_of(np.array([[two, all_of_eight]] * 2), [8, 8])
    np.testing.assert_allclose(entropies(problem), [[1, 3], [1, 3]])
    # 2 of layer 0 and 6 of layer 1 on each server; 4 more are needed in layer 0, and layer 1 has 4 too many
    np.testing.assert_array_equal(allocate(problem).of_server, [[4, 4], [4, 4]])


def test_shares_of_memory_are_rounded_down_and_the_rest_goes_to_what_is_most_frequent() -> None:
    """7 places for two layers of equal entropy: 3 each, and the last for the layer whose fourth expert is used more."""
    problem = problem_of(np.array([[[1, 1, 1, 1], [2, 2, 2, 2]]] * 2), [7, 7])
    np.testing.assert_array_equal(allocate(problem).of_server, [[3, 4], [3, 4]])


def test_a_layer_borrows_from_the_one_that_has_most_and_from_the_largest_server_first() -> None:
    frequencies = np.array([[[1, 0, 0, 0], [1, 1, 1, 1]]] * 2)
    # 0 of layer 0; 3 and 4 of layer 1. One place is left on the second server; then that one gives, then the first.
    np.testing.assert_array_equal(allocate(problem_of(frequencies, [3, 5])).of_server, [[1, 2], [3, 2]])


def test_a_layer_without_entropy_is_held_all_the_same() -> None:
    """Step 1 of Algorithm 1 gives nothing to a layer that always uses the same expert."""
    frequencies = np.zeros((2, 2, 8))
    frequencies[:, 0, 5] = 1
    frequencies[:, 1] = 1 / 8
    placement = place(problem_of(frequencies, [13, 13]))
    assert placement.n_uncovered == 0
    assert placement.held[:, 0, 5].all()


def test_memory_in_many_devices_is_divided_as_if_it_were_in_one() -> None:
    """Algorithm 1 rounds what a server gets of a layer, not what each of its devices does."""
    frequencies = skewed(np.random.default_rng(3), (4, 12, 32), 0.5)
    whole, split = (problem_of(frequencies, [devices] * 4) for devices in ((128,), (16,) * 8))
    np.testing.assert_allclose(allocate(split).of_server, allocate(whole).of_server, atol=2)
    ratios = [place(problem).total_ratio(frequencies) for problem in (whole, split)]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.02)


def test_each_server_gets_what_its_users_activate_most_and_nobody_s_experts_replace_duplicates() -> None:
    """Algorithm 2 by hand."""
    frequencies = np.array([[[9, 8, 7, 0, 3]], [[9, 7, 1, 2, 0]]])
    held = assign(problem_of(frequencies, [3, 3]), np.array([[3], [3]]))
    # At first 0, 1, 2 and 0, 1, 3. Both have two duplicates; the first server takes 4 in place of 1, its lesser one.
    np.testing.assert_array_equal(held[:, 0], [[True, False, True, False, True], [True, True, False, True, False]])


def on_servers(*held: list[int]) -> np.ndarray:
    """Placement.device of one layer of 4 experts, on one device each."""
    device = np.full((len(held), 1, 4), ABSENT, np.int16)
    for row, experts in zip(device, held):
        row[0, experts] = 0
    return device


@pytest.mark.parametrize(("frequencies", "before", "after"), [
    # both replace experts that the other one has too
    ([[5, 1, 9, 0], [5, 1, 0, 9]], [[0, 1], [1, 2, 3]], [[0, 2], [0, 1, 3]]),
    # they trade experts that only they hold
    ([[1, 9, 1, 1], [9, 1, 1, 1]], [[0, 2], [1, 3]], [[1, 2], [0, 3]]),
    # the first hands expert 0 over to the second, which gives up expert 1 for it, and takes expert 2
    ([[0, 0, 9, 0], [4, 5, 0, 9], [0, 5, 9, 0]], [[0], [1, 3], [1, 2]], [[2], [0, 3], [1, 2]]),
])
def test_servers_exchange_experts_as_long_as_that_brings_more_of_them_home(
    frequencies: list, before: list, after: list
) -> None:
    device = on_servers(*before)
    exchange(problem_of(np.array(frequencies, float)[:, None], [3] * len(frequencies)), device)
    np.testing.assert_array_equal(device, on_servers(*after))


@given(problem=problems("equal") | problems("different"))
@settings(max_examples=40)
def test_an_exchange_of_any_placement_costs_less_or_the_same_and_moves_no_memory(problem: Problem) -> None:
    before = place(problem, "redundance", partial=True)
    device = before.device.copy()
    exchange(problem, device)
    after = Placement(before.servers, before.layers, before.n_experts, device)
    assert after.cost(problem.frequencies) <= before.cost(problem.frequencies) * (1 + 1e-12)
    assert after.n_uncovered <= before.n_uncovered
    np.testing.assert_array_equal(used_bytes(after, problem), used_bytes(before, problem))


def test_users_of_different_tasks_find_more_of_their_experts_at_home_than_with_any_other_placement() -> None:
    rng = np.random.default_rng(2)
    frequencies = skewed(rng, (3, 6, 64))
    problem = problem_of(frequencies, [128, 128, 256])
    ratios = {name: place(problem, name).total_ratio(frequencies) for name in ALGORITHMS}
    assert max(ratios, key=ratios.get) == "dance" and ratios["dance"] > 1.1 * ratios["eplb"]


def test_local_ratios_and_cost_count_activations() -> None:
    frequencies = np.array([[[3.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [2.0, 0.0]]])
    device = np.full((2, 2, 2), ABSENT)
    device[0, 0, 0] = device[0, 1, 0] = device[1, 0, 1] = device[1, 1, 1] = 0
    placement = Placement(("a", "b"), (0, 1), (2, 2), device)
    np.testing.assert_array_equal(placement.local_ratio(frequencies), [[0.75, np.nan], [0.5, 0]])
    np.testing.assert_array_equal(placement.server_ratio(frequencies), [0.75, 0.25])
    assert placement.cost(frequencies) == 4 and placement.total_ratio(frequencies) == 0.5 and placement.n_uncovered == 0


# --- the others


def test_uniform_and_smartmoe_give_each_expert_one_place_and_devices_alike_many() -> None:
    problem = problem_of(skewed(np.random.default_rng(0), (3, 4, 16)), [32, 32, (32, 32)])
    for name in ("uniform", "smartmoe"):
        placement = place(problem, name)
        assert (placement.copies == 1).all()
        per_device = [(placement.device[server] == number).sum(axis=1)
                      for server, number in zip(problem.device_server, problem.device_number)]
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


# --- files


@pytest.mark.parametrize("damage", [
    {"layers": [1, 0]}, {"layers": []}, {"layers": None}, {"n_experts": [4]}, {"n_experts": [4, 0]}, {"servers": []},
    {"servers": [{"name": "a"}]}, {"servers": [{"name": "a", "experts": [[[0]]]}]}, {"algorithm": 3},
    {"servers": [{"name": "a", "experts": [[[4]], [[0]]]}]}, {"servers": [{"name": "a", "experts": [[[0, 0]], [[]]]}]},
    {"servers": [{"name": "a", "experts": [[[0]], [[]]]}] * 2}, {"servers": [{"name": 1, "experts": [[], []]}]},
    {"servers": [{"name": "a", "experts": [[[True]], [[]]]}]}, {"servers": 7}, {"servers": ["a"]},
])
def test_what_is_no_placement_is_refused(damage: dict) -> None:
    fields = place(problem_of(np.ones((2, 2, 4)), [4, 4])).to_fields()
    Placement.from_fields(fields)
    with pytest.raises(ValueError):
        Placement.from_fields({**fields, **damage})


def test_a_placement_larger_than_any_cluster_is_refused_before_memory_is_taken_for_it() -> None:
    layers = list(range(60_000))
    fields = {"algorithm": "", "layers": layers, "n_experts": [65535] * len(layers),
              "servers": [{"name": "a", "experts": [[]] * len(layers)}]}
    with pytest.raises(ValueError, match="larger than any cluster"):
        Placement.from_fields(fields)


@pytest.mark.parametrize("change", [
    {"frequencies": -np.ones((2, 2, 4))}, {"frequencies": np.full((2, 2, 4), np.nan)}, {"frequencies": np.ones(4)},
    {"sizes": np.array([1, 0])}, {"sizes": np.array([1])}, {"capacities": ((4,),)}, {"capacities": ((4,), ())},
    {"capacities": ((4,), (-1,))}, {"n_experts": np.array([4, 5])}, {"servers": ("a",)},
])
def test_what_is_no_problem_is_refused(change: dict) -> None:
    fields = {"servers": ("a", "b"), "layers": (0, 1), "frequencies": np.ones((2, 2, 4)), "sizes": np.ones(2, int),
              "capacities": ((8,), (8,))}
    Problem(**fields)
    with pytest.raises(ValueError):
        Problem(**{**fields, **change})
