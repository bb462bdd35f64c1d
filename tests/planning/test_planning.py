"""Planning: the model of routing by rank, and the search for the best division of memory, against enumeration."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from pyorch.errors import PyorchError
from pyorch.planning.makespan import POOLS, Delays, hit_patterns, makespan
from pyorch.planning.planner import LayerCosts, Planner, interval_counts, mean_hits, pattern_probabilities
from pyorch.planning.ranks import (
    even_inclusion,
    fading_uses,
    inclusion_by_rank,
    inclusion_of_batch,
    inclusion_of_counts,
    inclusion_probabilities,
    selection_probabilities,
    use_counts,
)

N_USED = 3
DELAYS = Delays(sm_read=2.0, e_read=0.7, decode=1.1, n_workers=2, n_shards=2, n_matrices=3)


def subsets(q: np.ndarray, n_used: int) -> dict[tuple[int, ...], float]:
    """Pr(set | n_used are taken) of independent draws: eq. 19 and 20, one by one."""
    weights = {taken: float(np.prod([p if i in taken else 1 - p for i, p in enumerate(q)]))
               for taken in combinations(range(len(q)), n_used)}
    total = sum(weights.values())
    return {taken: weight / total for taken, weight in weights.items()}


def routed(n_layers: int, n_expert: int, n_used: int, n_tokens: int = 300, spread: float = 1.5) -> np.ndarray:
    """Experts of random tokens, some experts likelier than others: [n_tokens, n_layers, n_used]."""
    rng = np.random.default_rng(n_expert)
    scores = spread * rng.normal(size=(n_layers, n_expert)) + rng.gumbel(size=(n_tokens, n_layers, n_expert))
    return np.argsort(-scores, axis=2)[:, :, :n_used]


def skewed(n_layers: int, n_expert: int, n_used: int, spread: float = 1.5) -> np.ndarray:
    return inclusion_by_rank(routed(n_layers, n_expert, n_used, spread=spread), n_expert)


@pytest.mark.parametrize("q", [[0.5] * 5, [0.9, 0.8, 0.5, 0.1, 0.02, 0.6], [1.0, 0.3, 0.2, 0.4, 0.0]])
def test_inclusion_probabilities_are_those_of_all_sets(q):
    sets = subsets(np.array(q), N_USED)
    wanted = [sum(p for taken, p in sets.items() if i in taken) for i in range(len(q))]
    assert inclusion_probabilities(np.array([q]), N_USED)[0] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("n_expert", "n_used", "spread"), [
    (8, 2, 3.0), (4, 3, 1.0), (64, 6, 1.0), (256, 8, 1.0), (256, 8, 5.0), (3, 3, 1.0),
])
def test_weights_give_the_inclusion_probabilities_that_they_are_fitted_to(n_expert, n_used, spread):
    wanted = skewed(3, n_expert, n_used, spread)
    assert wanted.sum(axis=1) == pytest.approx([n_used] * 3)
    reached = inclusion_probabilities(selection_probabilities(wanted, n_used), n_used)
    assert np.abs(reached - wanted).max() < 1e-8


def test_fitted_weights_are_the_only_ones_but_for_their_scale():
    """Odds of the fit are those from which the probabilities were made, times one factor (Chen et al., 1994)."""
    q = np.array([[0.9, 0.5, 0.3, 0.2, 0.05]])
    found = selection_probabilities(inclusion_probabilities(q, 2), 2)
    factor = (found / (1 - found)) / (q / (1 - q))
    assert factor == pytest.approx(np.full((1, 5), factor[0, 0]), rel=1e-6)
    assert found.sum() == pytest.approx(2)


@pytest.mark.parametrize("seed", range(5))
def test_sets_that_are_drawn_so_have_the_most_entropy(seed):
    """Theorem 3.2, eqs. 15 to 22: all other distributions over sets of k with these inclusion probabilities have
    less."""
    rng = np.random.default_rng(seed)
    n_expert, n_used = 6, 3
    q = selection_probabilities(inclusion_probabilities(rng.uniform(0.05, 0.95, (1, n_expert)), n_used), n_used)[0]
    sets = subsets(q, n_used)
    p = np.array(list(sets.values()))
    holds = np.array([[i in taken for taken in sets] for i in range(n_expert)], float)  # C_2, and so C_3
    _, sizes, rows = np.linalg.svd(holds)
    for direction in rng.normal(size=(20, len(p) - len(sizes))) @ rows[len(sizes):]:
        other = p + 0.5 * p.min() / np.abs(direction).max() * direction
        assert holds @ other == pytest.approx(holds @ p)
        assert -(other * np.log(other)).sum() < -(p * np.log(p)).sum()
    # and the logarithm of each is a sum of one number for each expert (eq. 18)
    residual = np.log(p) - holds.T @ np.linalg.lstsq(holds.T, np.log(p), rcond=None)[0]
    assert np.abs(residual).max() < 1e-9


def test_experts_that_are_always_or_never_taken_stay_so():
    wanted = np.array([[1.0, 0.7, 0.3, 0.0]])
    q = selection_probabilities(wanted, 2)
    assert (q[0, 0], q[0, 3]) == (1, 0)
    assert inclusion_probabilities(q, 2) == pytest.approx(wanted)


@pytest.mark.parametrize("rows", [[[0.5, 0.5, 0.5]], [[1.5, 0.5, 0.0]], [[float("nan"), 1.0, 1.0]]])
def test_probabilities_that_cannot_be_are_refused(rows):
    with pytest.raises(PyorchError, match="the sum of a layer's is 2"):
        selection_probabilities(np.array(rows), 2)


def test_experts_are_ranked_by_what_was_used_before_each_token():
    experts = routed(2, 7, 2, n_tokens=40)
    counts = np.zeros((2, 7))
    for layer in range(2):
        uses = np.zeros(7)
        for chosen in experts[:, layer]:
            ranking = np.argsort(-uses, kind="stable")
            counts[layer, [int(np.flatnonzero(ranking == e)[0]) for e in chosen]] += 1
            uses *= 0.5 ** (1 / 4)
            uses[chosen] += 1
    found = inclusion_by_rank(experts, 7, half_life=4)
    assert found == pytest.approx(np.sort((counts + 2 / 7) / 41, axis=1)[:, ::-1])
    assert found.sum(axis=1) == pytest.approx([2, 2])


def test_ranking_outlasts_long_traces():
    long = np.tile(np.array([[[0, 1]], [[2, 3]]]), (4000, 1, 1))
    found = inclusion_by_rank(long, 6, half_life=0.5)
    assert np.isfinite(found).all() and found.sum() == pytest.approx(2)


def test_counts_alone_rank_experts_by_their_sum():
    assert inclusion_of_counts(np.array([[1.0, 9.0, 10.0, 0.0]]), 2) == pytest.approx(
        np.array([[10.5, 9.5, 1.5, 0.5]]) / 11)
    with pytest.raises(PyorchError, match="numbers from 0 on"):
        inclusion_of_counts(np.zeros((1, 4)), 2)


def test_counts_of_intervals_are_those_of_all_outcomes():
    q = np.array([0.9, 0.4, 0.35, 0.1, 0.05])
    counts = interval_counts(q, N_USED)
    for i, j in combinations(range(len(q) + 1), 2):
        wanted = np.zeros(j - i + 1)
        for taken in product((0, 1), repeat=j - i):
            wanted[sum(taken)] += np.prod([p if t else 1 - p for p, t in zip(q[i:j], taken)])
        kept = min(j - i, N_USED) + 1
        assert counts[i, j, :kept] == pytest.approx(wanted[:kept])
        assert not counts[i, j, kept:].any()


def test_hit_patterns_have_the_probabilities_of_the_sets_that_make_them():
    q, ends = np.array([0.9, 0.6, 0.4, 0.35, 0.1, 0.05]), np.array([[1, 3, 4, 5], [2, 2, 6, 6], [0, 0, 0, 0]])
    patterns = hit_patterns(N_USED, range(4))
    assert len(patterns) == 35 and (patterns.sum(axis=1) == N_USED).all()
    found = pattern_probabilities(interval_counts(q, N_USED), ends, patterns)
    for row, of_pools in zip(found, ends):
        wanted = dict.fromkeys(map(tuple, patterns.tolist()), 0.0)
        for taken, p in subsets(q, N_USED).items():
            wanted[tuple(np.bincount(np.searchsorted(of_pools, taken, side="right"), minlength=5).tolist())] += p
        assert row == pytest.approx(list(wanted.values()))
        means = mean_hits(inclusion_probabilities(q[None], N_USED), of_pools[None])[0]
        assert means == pytest.approx(row @ patterns)


@pytest.mark.parametrize(("hits", "reads", "work"), [
    ((3, 0, 0, 0, 0), 0, 0),
    ((0, 3, 0, 0, 0), 0, 18 * 1.1),
    ((0, 0, 3, 0, 0), 18 * 0.7, 18 * (0.7 + 1.1)),
    ((0, 0, 0, 3, 0), 9 * 2, 18 * 1.1),
    ((1, 0, 0, 0, 2), 6 * 2 + 12 * 0.7, 12 * (0.7 + 1.1)),
])
def test_a_layer_waits_for_all_reads_or_all_decoding(hits, reads, work):
    assert makespan(DELAYS, np.array(hits)) == pytest.approx(max(reads, work / 2))


def costs(delays: Delays, n_layers: int, n_expert: int, plain_read: float = 1e9) -> list[LayerCosts]:
    return [LayerCosts(n_expert, (20, 14, 10, 4), delays, plain_read)] * n_layers


@pytest.mark.parametrize("delays", [
    DELAYS, Delays(2.0, 0.7, 0.1, 2, 2, 3), Delays(0.2, 0.1, 3.0, 1, 2, 1), Delays(1.0, 0.3, 0.65, 2, 2, 3),
])
@pytest.mark.parametrize("pools", ["FCSE", "FS", "C", "SE"])
def test_the_search_finds_what_trying_everything_finds(delays, pools):
    n_expert, step = 8, 0.25
    inclusion = skewed(2, n_expert, N_USED)
    budget = 2 * 5 * 20 + 7
    planner = Planner(inclusion, N_USED, costs(delays, 2, n_expert))
    sets = [subsets(q, N_USED) for q in planner.q]
    best = np.inf
    for shares in product(range(5), repeat=4):
        if sum(shares) != 4 or any(s and pool not in pools for s, pool in zip(shares, POOLS)):
            continue
        capacities = [int(s / 4 * budget / 2 / size) for s, size in zip(shares, (20, 14, 10, 4))]
        ends = np.minimum(np.cumsum(capacities), n_expert)
        total = 0.0
        for of_layer in sets:
            for taken, p in of_layer.items():
                hits = np.bincount(np.searchsorted(ends, taken, side="right"), minlength=5)
                total += p * float(makespan(delays, hits))
        best = min(best, total)
        assert planner.cost([s / 4 for s in shares], budget).makespan == pytest.approx(total)
    found = planner.plan(budget, pools, step)
    assert found.packed_best.makespan == pytest.approx(best)
    assert found.best is found.packed_best
    assert not [pool for pool, share in zip(POOLS, found.best.shares) if share and pool not in pools]
    assert (found.best.capacities * np.array([20, 14, 10, 4])).sum() <= budget


def test_most_divisions_are_given_up_before_they_are_computed():
    planner = Planner(skewed(4, 64, 6), 6, costs(DELAYS, 4, 64))
    found = planner.plan(4 * 64 * 8)
    assert found.n_evaluated < found.n_splits / 4


def test_nothing_is_compressed_where_that_does_not_pay():
    inclusion, slow = skewed(2, 16, 4), Delays(0.5, 0.1, 30.0, 1, 2, 3)
    found = Planner(inclusion, 4, costs(slow, 2, 16, plain_read=3.0)).plan(2 * 6 * 20)
    assert not found.best.compressed and found.best.shares == (1, 0, 0, 0)
    assert found.best.makespan == pytest.approx(3.0 * mean_hits(inclusion, np.array([[6] * 4] * 2))[:, 4].sum())
    assert found.best.makespan < found.packed_best.makespan
    quick = Delays(0.5, 0.1, 0.01, 1, 2, 3)
    assert Planner(inclusion, 4, costs(quick, 2, 16, plain_read=3.0)).plan(2 * 6 * 20).best.compressed


def test_with_memory_for_all_everything_is_whole_and_nobody_waits():
    found = Planner(even_inclusion([8, 8], 3), 3, costs(DELAYS, 2, 8)).plan(10**6)
    assert found.best.shares == (1, 0, 0, 0) and found.best.makespan == 0
    assert found.best.hits == pytest.approx(np.array([[3, 0, 0, 0, 0]] * 2))


@pytest.mark.parametrize(("pools", "step", "sentence"), [
    ("FX", 0.1, 'pools "FX" are not understood'), ("", 0.1, "name some of F, C, S, E"), ("FF", 0.1, "each once"),
    ("F", 0.0, "a step of 0 is none of the memory: use one from 0.01 to 1"), ("FCSE", 1e-4, "a step of 0.0001 is none"),
])
def test_pools_and_steps_that_are_none_are_refused(pools, step, sentence):
    planner = Planner(even_inclusion([8], 3), 3, costs(DELAYS, 1, 8))
    with pytest.raises(PyorchError, match=sentence):
        planner.plan(100, pools, step)


def test_pools_are_chosen_only_where_they_gain_more_than_their_handicap():
    planner, budget = Planner(skewed(2, 16, 4), 4, costs(DELAYS, 2, 16)), 2 * 6 * 20
    free, whole = planner.plan(budget), planner.cost((1, 0, 0, 0), budget)
    gain = whole.makespan / free.best.makespan
    assert free.best.is_mixed and gain > 1
    assert planner.plan(budget, handicap=gain - 1e-6).best.shares == free.best.shares
    held_back = planner.plan(budget, handicap=gain + 1e-6)
    assert held_back.packed_best.shares == held_back.best.shares == whole.shares == (1, 0, 0, 0)
    assert planner.plan(budget, "CSE", handicap=9.0).best.is_mixed, "whole ones are not allowed"


def test_a_handicap_counts_where_experts_can_be_read_without_the_pack():
    inclusion, budget = skewed(2, 16, 4), 2 * 6 * 20
    mixed = Planner(inclusion, 4, costs(DELAYS, 2, 16)).plan(budget).best.makespan
    plain = 1.05 * mixed / Planner(inclusion, 4, costs(DELAYS, 2, 16, plain_read=1.0)).plain(budget).makespan
    planner = Planner(inclusion, 4, costs(DELAYS, 2, 16, plain_read=plain))
    assert planner.plan(budget).best.compressed
    assert not planner.plan(budget, handicap=1.1).best.compressed


def test_finalists_are_good_and_differ():
    planner = Planner(skewed(3, 32, 4), 4, costs(DELAYS, 3, 32))
    found = planner.plan(3 * 32 * 8, n_finalists=5)
    assert len(found.finalists) > 2 and found.finalists[0].shares == found.packed_best.shares
    waits = [split.makespan for split in found.finalists]
    assert waits == sorted(waits)
    for i, split in enumerate(found.finalists):
        assert split.makespan == pytest.approx(planner.cost(split.shares, 3 * 32 * 8).makespan)
        assert all(np.abs(np.subtract(split.shares, other.shares)).max() > 0.14 for other in found.finalists[:i])


@pytest.mark.parametrize("n", [2, 3])
def test_a_batch_is_expected_to_wait_as_its_tokens_do_by_enumeration(n):
    """Nearly: the wait of mean hits is a bound."""
    inclusion, n_expert = skewed(1, 6, 2), 6
    budget, planner = 4 * 20 + 7, Planner(inclusion, 2, costs(DELAYS, 1, n_expert), batch=n)
    sets = subsets(selection_probabilities(inclusion, 2)[0], 2)
    for shares in ((1, 0, 0, 0), (0.25, 0.75, 0, 0), (0, 0.5, 0.25, 0.25)):
        found = planner.cost(shares, budget)
        ends, hits, wait = np.minimum(np.cumsum(found.capacities[0]), n_expert), np.zeros(5), 0.0
        for tokens in product(sets, repeat=n):
            p = np.prod([sets[taken] for taken in tokens])
            of_pools = np.bincount(np.searchsorted(ends, sorted(set().union(*tokens)), side="right"), minlength=5)
            hits += p * of_pools
            wait += p * float(makespan(DELAYS, of_pools))
        assert found.hits[0] == pytest.approx(hits) and found.batch == n
        assert 0.8 * wait < found.makespan <= wait * (1 + 1e-6)
    assert inclusion_of_batch(inclusion, 1) == pytest.approx(inclusion)


def test_the_best_division_for_a_batch_is_found():
    planner = Planner(skewed(2, 16, 4), 4, costs(DELAYS, 2, 16, plain_read=30.0), least_full=2 * 5 * 20, batch=3)
    found = planner.plan(2 * 9 * 20, "FC", 0.25, n_finalists=3)
    waits = {n: planner.cost((n / 4, 1 - n / 4, 0, 0), 2 * 9 * 20).makespan for n in range(5)}
    assert found.packed_best.makespan == pytest.approx(min(waits.values())) and found.n_evaluated == found.n_splits
    assert (found.packed_best.capacities[:, 0] >= 5).all() and found.packed_best.batch == found.plain.batch == 3
    alone = Planner(skewed(2, 16, 4), 4, costs(DELAYS, 2, 16), least_full=2 * 5 * 20).plan(2 * 9 * 20, "FC", 0.25)
    assert alone.packed_best.makespan < found.packed_best.makespan < 3 * alone.packed_best.makespan


def test_uses_fade_to_what_is_left_at_the_end():
    experts = routed(2, 7, 2, n_tokens=40)
    assert use_counts(experts, 7).tolist() == [[int((experts[:, i] == e).sum()) for e in range(7)] for i in range(2)]
    even = np.full((1, 4), 10)
    kept = sum(0.5 ** (t / 128) for t in range(20)) / 2  # used by every other of 20 tokens
    assert fading_uses(even, 20) == pytest.approx(np.full((1, 4), kept))


def test_layers_that_are_not_compressed_have_whole_experts_only():
    """What others keep in other forms is theirs alone."""
    plain_layer = LayerCosts(8, (20, 0, 0, 0), Delays(2.0, 0.0, 0.0, 2, 1, 3), 6.0)
    planner = Planner(skewed(2, 8, N_USED), N_USED, [*costs(DELAYS, 1, 8), plain_layer])
    split = planner.cost((0.5, 0.25, 0.125, 0.125), 160)
    assert split.capacities.tolist() == [[2, 40 // 14, 20 // 10, 20 // 4], [2, 0, 0, 0]]
    assert split.makespans[1] == pytest.approx(6.0 * split.hits[1, 4])
    assert planner.plan(160).best.makespan <= split.makespan


def test_whole_experts_have_what_they_need_in_any_case():
    planner = Planner(skewed(2, 16, 4), 4, costs(DELAYS, 2, 16), least_full=2 * 9 * 20)
    split = planner.cost((0, 1, 0, 0), 2 * 12 * 20)
    assert split.capacities.tolist() == [[9, 3 * 20 // 14, 0, 0]] * 2
    found = planner.plan(2 * 12 * 20, "C", reserved=2 * 20)
    assert found.best.capacities.tolist() == [[9, 2 * 20 // 14, 0, 0]] * 2
