"""Placements: DanceMoE's, step by step, by hand; what they count; files. Memory and coverage: tests/scripts/papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from placement_problems import problem_of, problems, skewed, used_bytes

from pyorch.cluster.placement.dance import allocate, assign, entropies, place
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.cluster.placement.swaps import exchange
from scripts.papers.dancemoe import baselines

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


def random_problem(rng: np.random.Generator) -> Problem:
    """With experts of one size, servers of one device, and memory for all."""
    n_servers, n_layers, n_expert = rng.integers(1, [5, 6, 10])
    n_places = n_layers * n_expert + int(rng.choice([0, 1, 2, 5, n_layers * n_expert]))
    frequencies = skewed(rng, (n_servers, n_layers, n_expert))
    frequencies[rng.random(frequencies.shape) < rng.choice([0, 0.3])] = 0
    return problem_of(frequencies, rng.multinomial(n_places, rng.dirichlet(np.full(n_servers, 3))).tolist())


def counts_of_the_paper(problem: Problem) -> list[list[int]]:
    """Algorithm 1 in plain Python, with the changes that docs/explanation/papers.md names.

    No layer gets more places than it has experts; other layers get the rest. Memory that is left covers layers before
    they borrow, and is used in the end. A layer gives only the places that it has beyond its own experts; as printed,
    it may give more. Empty: these counts do not cover all experts, and allocate() takes others.
    """
    f, memory = problem.frequencies, problem.server_bytes.tolist()
    n_servers, n_layers, n_expert = f.shape
    counts = []
    for n in range(n_servers):
        v = []
        for row in f[n]:
            p = [x / sum(row) if sum(row) else 1 / n_expert for x in row]
            v.append(-sum(x * math.log2(x) for x in p if x))
        v = v if sum(v) else [1.0] * n_layers
        share, left, full = [0.0] * n_layers, float(memory[n]), set()
        while left > 1e-12 and (weight := sum(v[i] for i in range(n_layers) if i not in full)):
            more = [left * v[i] / weight if i not in full else 0.0 for i in range(n_layers)]
            share = [min(n_expert, a + b) for a, b in zip(share, more)]
            left, before = memory[n] - sum(share), set(full)
            full = {i for i in range(n_layers) if share[i] >= n_expert}
            if full == before:
                break
        counts.append([math.floor(s + 1e-9) for s in share])
    free = [memory[n] - sum(counts[n]) for n in range(n_servers)]

    def total(layer: int) -> int:
        return sum(row[layer] for row in counts)

    for layer in range(n_layers):
        while total(layer) < n_expert:
            having = [n for n in range(n_servers) if free[n] and counts[n][layer] < n_expert]
            if having:
                n = max(having, key=lambda n: free[n])
                counts[n][layer] += 1
                free[n] -= 1
                continue
            for donor in sorted(range(n_layers), key=lambda i: -total(i)):
                moved = False
                for n in sorted(range(n_servers), key=lambda n: -memory[n]):
                    if (total(donor) > n_expert and total(layer) < n_expert and counts[n][donor]
                            and counts[n][layer] < n_expert):
                        counts[n][donor] -= 1
                        counts[n][layer] += 1
                        moved = True
                if moved:
                    break
            else:
                return []  # this does not cover all
    ranked = -np.sort(-f, axis=2)
    for n in range(n_servers):
        while free[n] and min(counts[n]) < n_expert:
            layer = max((i for i in range(n_layers) if counts[n][i] < n_expert),
                        key=lambda i: ranked[n, i, counts[n][i]])
            counts[n][layer] += 1
            free[n] -= 1
    return counts


def experts_of_the_paper(frequencies: np.ndarray, counts: list[list[int]]) -> list[list[set[int]]]:
    """Algorithm 2 in plain Python. Of experts that nobody there uses, server n prefers those from its n-th part on."""
    n_servers, n_layers, n_expert = frequencies.shape
    held = [[set(sorted(range(n_expert), key=lambda e: (
        -frequencies[n, layer, e], (e - n * n_expert // n_servers) % n_expert))[: counts[n][layer]])
        for layer in range(n_layers)] for n in range(n_servers)]
    for layer in range(n_layers):
        def duplicates(n: int) -> list[int]:
            return [e for e in sorted(held[n][layer]) if sum(e in row[layer] for row in held) > 1]

        while nobody_s := [e for e in range(n_expert) if not any(e in row[layer] for row in held)]:
            for n in sorted(range(n_servers), key=lambda n: len(duplicates(n))):
                if nobody_s and duplicates(n):
                    wanted = max(nobody_s, key=lambda e: frequencies[n, layer, e])
                    held[n][layer].remove(min(duplicates(n), key=lambda e: frequencies[n, layer, e]))
                    held[n][layer].add(wanted)
                    nobody_s.remove(wanted)
    return held


def test_counts_and_experts_are_those_of_the_algorithms_in_plain_loops() -> None:
    rng, n_compared = np.random.default_rng(4), 0
    for _ in range(150):
        problem = random_problem(rng)
        expected = counts_of_the_paper(problem)
        if expected:
            n_compared += 1
            assert allocate(problem).of_server.tolist() == expected
            held = assign(problem, np.array(expected))
            assert [[set(np.flatnonzero(row)) for row in of_server] for of_server in held] == experts_of_the_paper(
                problem.frequencies, expected)
    assert n_compared > 140


def counts_as_printed(problem: Problem) -> np.ndarray | None:
    """Algorithm 1 to the letter, int[n_servers, n_layers]; None: it does not end. No activations: all layers alike."""
    n_servers, n_layers, n_expert = problem.shape
    v = entropies(problem)
    v[v.sum(axis=1) == 0] = 1
    counts = np.floor(problem.server_bytes[:, None] * v / v.sum(axis=1, keepdims=True) + 1e-9).astype(int)
    for layer in range(n_layers):
        seen = set()
        while counts[:, layer].sum() < n_expert:
            if counts.tobytes() in seen:
                return None
            seen.add(counts.tobytes())
            donor = int(np.argmax(counts.sum(axis=0)))
            for n in np.argsort(-problem.server_bytes, kind="stable"):
                if counts[n, donor]:
                    counts[n, donor] -= 1
                    counts[n, layer] += 1
                    if counts[:, layer].sum() == n_expert:
                        break
    return counts


def test_algorithm_1_as_printed_does_not_always_end_or_cover_and_ours_does() -> None:
    rng, n_endless, n_uncovered = np.random.default_rng(4), 0, 0
    for _ in range(150):
        problem = random_problem(rng)
        counts = counts_as_printed(problem)
        n_endless += counts is None
        n_uncovered += counts is not None and bool((counts.sum(axis=0) < problem.n_experts).any())
        assert allocate(problem).n_missing == 0
    assert (n_endless, n_uncovered) == (16, 57)  # docs/explanation/papers.md has these


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
    before = baselines.place(problem, "redundance", partial=True)
    device = before.device.copy()
    exchange(problem, device)
    after = Placement(before.servers, before.layers, before.n_experts, device)
    assert after.cost(problem.frequencies) <= before.cost(problem.frequencies) * (1 + 1e-12)
    assert after.n_uncovered <= before.n_uncovered
    np.testing.assert_array_equal(used_bytes(after, problem), used_bytes(before, problem))


def test_local_ratios_and_cost_count_activations() -> None:
    frequencies = np.array([[[3.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [2.0, 0.0]]])
    device = np.full((2, 2, 2), ABSENT)
    device[0, 0, 0] = device[0, 1, 0] = device[1, 0, 1] = device[1, 1, 1] = 0
    placement = Placement(("a", "b"), (0, 1), (2, 2), device)
    np.testing.assert_array_equal(placement.local_ratio(frequencies), [[0.75, np.nan], [0.5, 0]])
    np.testing.assert_array_equal(placement.server_ratio(frequencies), [0.75, 0.25])
    assert placement.cost(frequencies) == 4 and placement.total_ratio(frequencies) == 0.5 and placement.n_uncovered == 0


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
