"""When another placement pays, against sums by hand and by loops; and that experts move without ever being gone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import SERVER, costs_of

from pyorch.cluster.migration import DISK, Migration, Sharing, decide, migration_seconds, remote_seconds
from pyorch.errors import PyorchError

NO_DISK = replace(SERVER, disk_bytes_per_second=0.0)


def placed(*servers: str) -> np.ndarray:
    """bool[n_servers, n_layers, n_expert] of texts such as "110 001": layers of a server."""
    return np.array([[[c == "1" for c in layer] for layer in server.split()] for server in servers])


def test_a_remote_use_costs_latency_bytes_and_the_peers_computation():
    resident, uses = placed("10", "01"), np.array([[[5.0, 3.0]], [[0.0, 2.0]]])
    # 3 uses: 2 latencies of 0.5, 100 bytes there and back at 100 a second, message 0.0625, expert 0.25, row 0.125
    assert remote_seconds(resident, uses, costs_of(2, 1, NO_DISK)) == pytest.approx([3 * (1 + 2 + 0.4375), 0])


def test_rows_share_the_latency_of_a_message_the_weights_of_an_expert_and_an_input():
    resident, uses = placed("10", "01"), np.array([[[0.0, 1.0]], [[0.0, 0.0]]])
    shared = remote_seconds(resident, uses, costs_of(2, 1, NO_DISK), Sharing(4, 2, rows_per_input=5))
    assert shared[0] == pytest.approx((1 + 0.0625) / 4 + 1 / 5 + 1 + 0.25 / 2 + 0.125)


def test_the_own_disk_counts_where_it_is_faster_and_where_nobody_has_the_expert():
    uses = np.array([[[0.0, 1.0]], [[0.0, 0.0]]])
    read = 2.0 + 400 / 1000 + 0.25 + 0.125
    assert remote_seconds(placed("10", "01"), uses, costs_of(2, 1))[0] == pytest.approx(read)
    assert remote_seconds(placed("10", "01"), uses, costs_of(2, 1, rate=1e6))[0] == pytest.approx(1.4375, abs=1e-3)
    assert remote_seconds(placed("10", "10"), uses, costs_of(2, 1, rate=1e6))[0] == pytest.approx(read)
    assert remote_seconds(placed("10", "10"), uses, costs_of(2, 1, NO_DISK))[0] == np.inf


def test_an_expert_comes_from_the_fastest_that_has_it():
    costs = costs_of(3, 2, expert_bytes=(400.0, 100.0))
    before, after = placed("11 11", "00 10", "00 00"), placed("11 11", "10 10", "00 11")
    # by link 0.5 s and bytes at 100 a second, by disk 2 s and bytes at 1000
    assert migration_seconds(before, after, costs) == pytest.approx([0, 2.4, 2 * 1.5])
    costs.bytes_per_second[0, 2] = 1000
    assert migration_seconds(before, after, costs) == pytest.approx([0, 2.4, 2 * 0.6])


def test_what_only_leaves_costs_nothing():
    assert migration_seconds(placed("11", "11"), placed("10", "01"), costs_of(2, 1)).tolist() == [0, 0]


@pytest.mark.parametrize(("n_uses", "adopted"), [(1, False), (2, False), (3, True)])
def test_a_placement_is_adopted_when_it_saves_more_than_moving_takes(n_uses, adopted):
    """One expert to each server: 4.5 s over the link, without a disk. Each use elsewhere costs 3.4375 s."""
    uses = np.array([[[0.0, n_uses]], [[0.0, 0.0]]])
    decision = decide(placed("10", "01"), placed("01", "10"), uses, costs_of(2, 1, NO_DISK))
    assert (decision.candidate, decision.n_moves, decision.n_bytes) == (0, 2, 800)
    assert decision.current == pytest.approx(3.4375 * n_uses)
    assert decision.migration == pytest.approx(9.0)
    assert decision.adopt is adopted


def test_the_same_placement_is_never_adopted():
    decision = decide(placed("10", "01"), placed("10", "01"), np.full((2, 1, 2), 1e6), costs_of(2, 1))
    assert decision.current == decision.candidate > 0 and decision.migration == 0
    assert not decision.adopt


@st.composite
def cases(draw, covered: bool = False):
    """Costs of servers and links that differ, two placements, and uses."""
    n_servers, n_layers, n_expert = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    disk = draw(st.booleans())
    sizes = tuple(rng.integers(1, 5, n_layers) * 100.0)
    costs = costs_of(n_servers, n_layers, SERVER if disk else NO_DISK, expert_bytes=sizes,
                     message_bytes=float(rng.integers(0, 20)))
    costs.latency[:] = rng.integers(1, 4, costs.latency.shape)
    costs.bytes_per_second[:] = rng.integers(1, 4, costs.latency.shape) * 100
    np.fill_diagonal(costs.latency, 0)
    np.fill_diagonal(costs.bytes_per_second, np.inf)
    for name in ("expert", "row", "message", "disk_latency"):
        getattr(costs, name)[:] = rng.integers(1, 9, n_servers) / 8
    placements = rng.random((2, n_servers, n_layers, n_expert)) < draw(st.sampled_from([0.1, 0.3, 0.6]))
    if covered or not disk:
        layers, experts = np.indices((n_layers, n_expert))
        for placement in placements:
            placement[rng.integers(0, n_servers, (n_layers, n_expert)), layers, experts] = True
    return costs, *placements, rng.integers(0, 4, placements[0].shape).astype(float), rng


@given(cases())
@settings(max_examples=60)
def test_seconds_are_those_of_a_loop_over_all_choices(case):
    costs, before, after, uses, _ = case
    n_servers, n_layers, n_expert = before.shape
    remote, moving = np.zeros((2, n_servers))
    sharing = Sharing(3.0, 1.5, 1.25)
    for n, layer, e in itertools.product(range(n_servers), range(n_layers), range(n_expert)):
        size = costs.expert_bytes[layer]
        rate = costs.disk_bytes_per_second[n]
        disk = costs.disk_latency[n] + size / rate if rate else np.inf
        ways, links = [disk / 1.5 + costs.expert[n] / 1.5 + costs.row[n]], [disk]
        for peer in range(n_servers):
            if peer != n and before[peer, layer, e]:
                there, back = costs.bytes_per_second[n, peer], costs.bytes_per_second[peer, n]
                links.append(costs.latency[peer, n] + size / back)
                both = 1 / there + 1 / back
                message = costs.latency[n, peer] + costs.latency[peer, n] + costs.message_bytes * both
                ways.append((message + costs.message[peer]) / 3 + 100 / 1.25 / there + 100 / back
                            + costs.expert[peer] / 1.5 + costs.row[peer])
        if not before[n, layer, e]:
            remote[n] += uses[n, layer, e] * min(ways) if uses[n, layer, e] else 0
            moving[n] += min(links) if after[n, layer, e] else 0
    assert remote_seconds(before, uses, costs, sharing) == pytest.approx(remote)
    assert migration_seconds(before, after, costs) == pytest.approx(moving)


@given(cases(covered=True))
@settings(max_examples=150)
def test_a_migration_ends_in_any_order_and_no_expert_is_ever_gone(case):
    costs, before, after, uses, rng = case
    begin, size = before.copy(), costs.expert_bytes
    room = np.maximum(begin.sum(axis=2) @ size, after.sum(axis=2) @ size) + size.max()
    resident = before.copy()
    migration = Migration(resident, after, uses, costs)
    loads, n_loads = {}, 0
    ready = list(range(len(before)))
    while True:
        for n in ready:
            load = migration.next_load(n)
            if load is not None:
                loads[n] = load
                assert after[n, load.layer, load.expert] and not resident[n, load.layer, load.expert]
        under_way = np.zeros_like(resident)
        for load in loads.values():
            under_way[load.server, load.layer, load.expert] = True
            if load.source != DISK:
                assert resident[load.source, load.layer, load.expert], "it leaves while it is read"
        assert ((resident | under_way).sum(axis=2) @ size <= room + 1e-9).all()
        assert resident.any(axis=0).all()
        if not loads:
            break
        load = loads.pop(int(rng.choice(list(loads))))
        n_loads += 1
        ready = [load.server, *migration.finish(load)]
    assert migration.done
    assert (resident == after).all()
    assert n_loads == (after & ~begin).sum()


def test_experts_used_most_come_first_and_those_used_least_leave_first():
    before, after = placed("111000", "000111"), placed("000111", "111000")
    uses = np.array([[[3, 1, 2, 5, 9, 7]], [[1, 2, 3, 0, 0, 0]]], float)
    migration = Migration(before, after, uses, costs_of(2, 1, NO_DISK))
    first, other = migration.next_load(0), migration.next_load(1)
    assert (first.expert, first.source, other.expert) == (4, 1, 2)
    assert migration.next_load(0) is None, "one at a time"
    migration.finish(first)
    assert before[0].sum() == 4, "all it had, and the new one"
    assert migration.next_load(0) is None, "nobody else has what it would give away"
    assert migration.finish(other) == [0]
    assert migration.next_load(0).expert == 5
    assert not before[0, 0, 2], "the only one of which there is another copy"


def test_what_the_new_placement_has_nowhere_may_leave():
    before, after = placed("110", "110"), placed("011", "010")
    migration = Migration(before, after, np.ones(before.shape), costs_of(2, 1))
    load = migration.next_load(0)
    assert (load.expert, load.source) == (2, DISK)
    migration.finish(load)
    assert migration.done and (before == after).all()


def test_a_migration_to_an_expert_that_nobody_has_is_refused():
    with pytest.raises(PyorchError, match="on no server and on no disk"):
        Migration(placed("10", "10"), placed("10", "01"), np.ones((2, 1, 2)), costs_of(2, 1, NO_DISK))
