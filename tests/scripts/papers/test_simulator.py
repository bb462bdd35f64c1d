"""Simulated clusters against what can be added up by hand, and against the theory of queues."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simulated_cluster import SERVER, Lengths, Random, Same, costs_of, zipf

from pyorch.cluster.costs import CostsFile, ServerCosts
from pyorch.errors import FormatError, PyorchError
from scripts.papers.dancemoe.simulated_costs import Machine, Sizes, machines_of
from scripts.papers.dancemoe.simulated_server import Cores, Station
from scripts.papers.dancemoe.simulator import Settings, Traffic, simulate
from scripts.papers.dancemoe.workload import arrival_times

NO_DISK = replace(SERVER, disk_bytes_per_second=0.0)


def at(*times: float) -> np.ndarray:
    return np.array(times)


def everywhere(n_servers: int, n_layers: int, n_expert: int) -> np.ndarray:
    return np.ones((n_servers, n_layers, n_expert), bool)


def only_own(*experts: list[int], n_expert: int) -> np.ndarray:
    """One layer: these experts of each server."""
    resident = np.zeros((len(experts), 1, n_expert), bool)
    for server, own in zip(resident, experts):
        server[0, own] = True
    return resident


# Added up by hand


def test_a_local_request_takes_its_steps_one_after_another():
    """3 tokens of prompt in one step, of which the last layer computes one; 2 decoded; 2 experts, the same of all."""
    experts = np.broadcast_to(np.array([0, 1]), (5, 2, 2))
    server = replace(SERVER, token=0.03125)
    found = simulate(costs_of(1, 2, server), everywhere(1, 2, 2), [Traffic(at(7.0), Same(experts, n_output=2))], 10)
    prompt = 2 * (1 + 3 * 0.03125 + 2 * 0.25) + (6 + 2) * 0.125 + 0.5
    token = 2 * (1 + 0.03125 + 2 * 0.25 + 2 * 0.125) + 0.5
    assert found.first[0] == pytest.approx(7 + prompt)
    assert found.end[0] == pytest.approx(7 + prompt + 2 * token)
    assert found.local_ratio == 1 and found.n_messages == 0
    assert found.busy[0] == pytest.approx(prompt + 2 * token)


def test_a_layer_waits_for_the_slowest_answer():
    """Dense part 1 s; own expert meanwhile; there: 1 s of bytes, latency 0.5, 0.4375 s at the peer, and back."""
    resident = only_own([0], [1], n_expert=2)
    found = simulate(costs_of(2, 1, NO_DISK), resident, [Traffic(at(0), Same([[[0, 1]]])), Traffic(at(), Same([]))], 10)
    assert found.end[0] == pytest.approx(1 + (1 + 0.5) + 0.4375 + (1 + 0.5) + 0.5)
    assert (found.n_messages, found.n_bytes) == (1, 200)
    assert found.local_ratio == 0.5


def test_rows_for_one_peer_go_in_one_message_with_each_input_once():
    resident = np.concatenate([only_own([0], [1, 2], n_expert=3), everywhere(2, 1, 3)], axis=1)
    experts = [[[1, 2], [0, 1]], [[1, 2], [0, 1]], [[2, 1], [0, 1]]]
    found = simulate(costs_of(2, 2, NO_DISK), resident, [Traffic(at(0), Same(experts)), Traffic(at(), Same([]))], 10)
    computed = 0.0625 + 2 * 0.25 + 6 * 0.125
    assert found.n_messages == 1
    last = 1 + 2 * 0.25 + 2 * 0.125
    assert found.end[0] == pytest.approx(1 + (3 + 0.5) + computed + (6 + 0.5) + last + 0.5)


def test_two_servers_that_ask_a_third_at_once_wait_for_its_port_and_its_device():
    resident = only_own([0], [0], [1], n_expert=2)
    asking = Traffic(at(0), Same([[[1]]]))
    found = simulate(costs_of(3, 1, NO_DISK), resident, [asking, asking, Traffic(at(), Same([]))], 10)
    first = 1 + (1 + 0.5) + 0.4375 + (1 + 0.5) + 0.5
    assert np.sort(found.end) == pytest.approx([first, first + 1])  # its message, and its answer, are 1 s later


def test_a_device_answers_peers_while_its_own_step_waits():
    """Both ask each other. Each computes for the other while it waits itself."""
    resident = only_own([0], [1], n_expert=2)
    traffic = [Traffic(at(0), Same([[[1]]])), Traffic(at(0), Same([[[0]]]))]
    found = simulate(costs_of(2, 1, NO_DISK), resident, traffic, 10)
    assert found.end == pytest.approx([1 + 1.5 + 0.4375 + 1.5 + 0.5] * 2)


def test_an_expert_that_nobody_has_is_read_and_one_far_away_too():
    resident = only_own([0], [1], n_expert=3)
    read = 2 + 400 / 1000 + 0.25 + 0.125
    for expert, latency in ((2, 0.5), (1, 50.0)):
        traffic = [Traffic(at(0), Same([[[expert]]])), Traffic(at(), Same([]))]
        found = simulate(costs_of(2, 1, latency=latency), resident, traffic, 10)
        assert found.end[0] == pytest.approx(1 + read + 0.5)
        assert (found.n_read, found.n_messages, found.local_ratio) == (1, 0, 0)


def test_an_expert_that_cannot_be_had_is_a_sentence():
    traffic = [Traffic(at(0), Same([[[2]]])), Traffic(at(), Same([]))]
    with pytest.raises(PyorchError, match="no server has a needed expert, and no disk"):
        simulate(costs_of(2, 1, NO_DISK), only_own([0], [1], n_expert=3), traffic, 10)


def test_requests_that_run_together_share_steps():
    """Of 4 tokens each. The second comes when the first step has begun: 5 steps together, or 8 one after another."""
    experts = np.zeros((4, 1, 1))
    traffic = [Traffic(at(0, 0), Same(experts, n_output=3))]
    row, step = 0.125, 1 + 0.25 + 0.5
    together = simulate(costs_of(1, 1), everywhere(1, 1, 1), traffic, 10, Settings(n_places=2))
    assert together.end == pytest.approx([4 * step + 7 * row, 5 * step + 8 * row])
    alone = simulate(costs_of(1, 1), everywhere(1, 1, 1), traffic, 10, Settings(n_places=1))
    assert alone.end == pytest.approx([4 * (step + row), 8 * (step + row)])
    assert alone.begin == pytest.approx([0, 4 * (step + row)])


def test_a_long_prompt_takes_several_steps():
    traffic = [Traffic(at(0), Same(np.zeros((10, 2, 1))))]
    found = simulate(costs_of(1, 2), everywhere(1, 2, 1), traffic, 10, Settings(n_step=4))
    last = 0.25 + 0.125  # the last layer has an expert in the last step only, for one token
    assert found.end[0] == pytest.approx(3 * (2 * 1 + 0.25 + 0.5) + 10 * 0.125 + last)


def test_rows_for_experts_that_many_have_go_to_different_peers():
    resident = everywhere(5, 1, 8)
    resident[0] = False
    idle = Traffic(at(), Same([]))
    found = simulate(costs_of(5, 1, NO_DISK), resident, [Traffic(at(0), Same([[range(8)]])), *[idle] * 4], 10)
    assert found.n_messages == 4
    assert (found.busy[1:] > 0).all()


def test_a_disk_under_a_quota_gives_a_slice_s_bytes_at_once_after_a_pause():
    disk, plain = Station(slice=0.5), Station()
    assert [disk.serve(1.0, 0.22) for _ in range(6)] == pytest.approx([1.0, 1.0, 1.5, 1.5, 2.0, 2.0])
    assert [plain.serve(1.0, 0.2) for _ in range(3)] == pytest.approx([1.2, 1.4, 1.6])
    assert disk.serve(2.2, 0.02) == pytest.approx(2.2)  # 1.34 s of reads, in the third slice
    assert disk.serve(9.0, 0.4) == 9.0  # another pause
    assert disk.serve(9.1, 0.4) == pytest.approx(9.5)
    resident = only_own([0], [1], n_expert=3)
    traffic = [Traffic(at(0), Same([[[2]]])), Traffic(at(), Same([]))]
    slow = simulate(costs_of(2, 1), resident, traffic, 10).end
    soon = simulate(costs_of(2, 1), resident, traffic, 10, Settings(disk_slice=100.0)).end
    assert slow - soon == pytest.approx(2.0 + 400 / 1000)  # latency and bytes of the expert


# Servers that share cores


def test_equal_servers_with_equal_users_have_alike_much_to_do():
    """16 of them, each with memory for 30 % of the experts. What is measured is their rows for others."""
    n_servers, rng = 16, np.random.default_rng(1)
    resident = rng.permuted(np.broadcast_to(np.arange(32) < 10, (n_servers, 4, 32)), axis=2)
    resident[np.arange(4 * 32).reshape(4, 32) % n_servers, np.arange(4)[:, None], np.arange(32)] = True
    costs = costs_of(n_servers, 4, ServerCosts(disk_bytes_per_second=0), rate=6e7, latency=5e-4, row_bytes=8192)
    source = Random(np.ones((4, 32)), 40, 4, 20)
    traffic = [Traffic(arrival_times(np.random.default_rng(n), 4.0, 10.0), source) for n in range(n_servers)]
    busy = simulate(costs, resident, traffic, 10.0).served
    assert busy.max() / busy.mean() <= 1.15


def test_servers_that_are_there_again_share_machines_of_their_own():
    costs = CostsFile(simulated={"machines": [{"servers": ["a", "c"], "cores": 2}]})
    assert machines_of(costs, ("a", "b", "c", "a", "b")) == (Machine((0, 2), 2.0), Machine((3,), 2.0))
    with pytest.raises(PyorchError, match='costs of a server "c": the cluster has a, b'):
        machines_of(costs, ("a", "b"))


@pytest.mark.parametrize(("machines", "sentence"), [
    ({}, "machines is not a list"),
    ([{"servers": ["a"]}], "must have exactly the fields servers and cores"),
    ([{"servers": "a", "cores": 1}], "servers is not a list"),
    ([{"servers": ["a"], "cores": 0.5}], "cores is 0.5, not a number of at least 1"),
    ([{"servers": ["a", "b"], "cores": 1}, {"servers": ["a"], "cores": 1}], "server a occurs twice"),
])
def test_machines_that_cannot_be_are_one_sentence(machines, sentence):
    with pytest.raises(FormatError, match=sentence):
        machines_of(CostsFile(simulated={"machines": machines}), ("a", "b"))


def test_two_servers_on_one_core_take_twice_as_long_and_on_two_as_long_as_alone():
    traffic = [Traffic(at(0), Same(np.zeros((4, 2, 1)), n_output=1))] * 2
    alone, one, two = (simulate(costs_of(2, 2), everywhere(2, 2, 1), traffic, 10, Settings(machines=machines)).end
                       for machines in ((), *((Machine((0, 1), cores),) for cores in (1, 2))))
    assert one == pytest.approx(2 * alone) and two == pytest.approx(alone)


def test_cores_are_divided_again_when_a_job_comes_or_goes():
    """One core. The first job has 1 s to itself, then a half of the core until the second ends, and then all again."""
    traffic = [Traffic(at(0), Same([[[0], [0]]])), Traffic(at(1), Same([[[0], [0]]]))]
    server = ServerCosts(step=0.0, layer=1.0, token=0.0, expert=0.5, row=0.0)
    one_core = Settings(machines=(Machine((0, 1), 1),))
    found = simulate(costs_of(2, 2, server), everywhere(2, 2, 1), traffic, 10, one_core)
    assert found.end == pytest.approx([1 + 2 * 2, 1 + 2 * 2 + 1])
    assert found.busy == pytest.approx([3, 3])


def test_a_server_with_two_threads_answers_peers_beside_its_own_work():
    """Of 3 servers one has experts. On two cores it computes for its users and for another one's at once."""
    resident = only_own([0], [1], n_expert=2)
    traffic = [Traffic(at(0), Same([[[1]]])), Traffic(at(1.5), Same([[[1]]]))]
    costs, two_cores = costs_of(2, 1, NO_DISK), (Machine((0, 1), 2),)
    found = simulate(costs, resident, traffic, 10, Settings(machines=two_cores))
    asked = 1 + (1 + 0.5) + 0.4375 + (1 + 0.5) + 0.5
    assert found.end == pytest.approx([asked, 1.5 + 1 + 0.25 + 0.125 + 0.5])
    traffic = [Traffic(at(0, 0), Same([[[1]]])), Traffic(at(), Same([]))]
    found = simulate(costs, resident, traffic, 10, Settings(n_places=1, machines=two_cores))
    assert found.end == pytest.approx([asked, 2 * asked])


def test_reads_are_computed_on_the_cores_too():
    traffic = [Traffic(at(0), Same([[[2]]])), Traffic(at(), Same([]))]
    one_core = Settings(machines=(Machine((0, 1), 1),))
    found = simulate(costs_of(2, 1), only_own([0], [1], n_expert=3), traffic, 10, one_core)
    assert found.end[0] == pytest.approx(1 + 2 + 400 / 1000 + 0.25 + 0.125 + 0.5)
    assert found.n_read == 1


# Sizes


def test_sizes_of_other_layers_are_refused():
    with pytest.raises(PyorchError, match="of 2 layers: the model has 3"):
        Sizes((1.0, 2.0), 1.0, 1.0).applied(costs_of(2, 3), 3)
    for size in (0.0, 1e11):
        with pytest.raises(PyorchError, match="an expert has 1 byte at least"):
            Sizes(size, 1.0, 1.0).applied(costs_of(2, 3), 3)
    for size, sentence in (([], "expert_bytes is"), ([1, None], "expert_bytes is None")):
        with pytest.raises(FormatError, match=sentence):
            Sizes.of(CostsFile(simulated={"expert_bytes": size}))


# Theory


def _mean_and_error(values: np.ndarray, n_batches: int = 20) -> tuple[float, float]:
    """The mean of what depends on its neighbours, and its standard error, by means of batches."""
    batches = values[: len(values) // n_batches * n_batches].reshape(n_batches, -1).mean(axis=1)
    return float(batches.mean()), float(batches.std(ddof=1) / np.sqrt(n_batches))


@pytest.mark.parametrize(("lengths", "load"), [([4], 0.5), ([1, 2, 40], 0.6)])
def test_waiting_times_of_one_server_are_pollaczek_and_khinchines(lengths, load):
    """M/D/1, and M/G/1: W = rate * E[S^2] / (2 (1 - rho))."""
    service = np.array([2 * (1 + 0.25) + 0.125 * (n + 1) + 0.5 for n in lengths])
    rate = load / service.mean()
    times = arrival_times(np.random.default_rng(3), rate, 5000 / rate)
    found = simulate(costs_of(1, 2), everywhere(1, 2, 1), [Traffic(times, Lengths(lengths))], times[-1] + 1,
                     Settings(n_places=1), seed=5)
    waiting, error = _mean_and_error(found.begin - found.arrival)
    expected = rate * (service**2).mean() / (2 * (1 - load))
    assert error < 0.12 * expected
    assert abs(waiting - expected) < 3 * error
    assert (found.end - found.begin).mean() == pytest.approx(service.mean(), rel=0.05)


@pytest.mark.parametrize("draw", [lambda rng: 1.0, lambda rng: rng.exponential(), lambda rng: rng.choice([0.2, 4.2],
                                                                                                    p=[0.8, 0.2])])
def test_on_shared_cores_jobs_take_what_theory_says_however_long_they_are(draw):
    """M/G/1 with processor sharing: a job of s seconds takes s / (1 - rho) in the mean, whatever the distribution."""
    rng, load, n_jobs = np.random.default_rng(7), 0.6, 10_000
    env = simpy.Environment()
    cores, taken, wanted = Cores(env, 1), np.zeros(n_jobs), np.array([draw(rng) for _ in range(n_jobs)])

    def job(i: int):
        begin = env.now
        yield cores.compute(wanted[i])
        taken[i] = env.now - begin

    def arrive():
        for i in range(n_jobs):
            yield env.timeout(rng.exponential(1 / load))
            env.process(job(i))

    env.process(arrive())
    env.run()
    mean, error = _mean_and_error(taken)
    assert error < 0.1 * mean and abs(mean - wanted.mean() / (1 - load)) < 3 * error
    assert (taken >= wanted - 1e-6).all()


def test_arrivals_are_poissons():
    times = arrival_times(np.random.default_rng(1), 2.0, 5000.0)
    counts = np.histogram(times, np.arange(0, 5001.0, 5.0))[0]
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() == pytest.approx(10, rel=0.15)
    assert (np.diff(times) > 0).all() and times[-1] < 5000


# Claims


def _skewed(n_servers: int, seed: int = 0, n_expert: int = 16, n_layers: int = 3):
    rng = np.random.default_rng(seed)
    return [zipf(rng, n_layers, n_expert) for _ in range(n_servers)]


def _traffic(popularities, rate: float, duration: float, later=None, shift: float = np.inf) -> list[Traffic]:
    return [Traffic(arrival_times(np.random.default_rng((9, n)), rate, duration), Random(popularity, 6, 2, 4),
                    None if later is None else Random(later[n], 6, 2, 4), shift)
            for n, popularity in enumerate(popularities)]


def _most_used(uses: np.ndarray, n_each: int) -> np.ndarray:
    """Of each server and layer the experts used most, and expert e on server e modulo their number."""
    order = np.argsort(-uses, axis=2, kind="stable")
    held = np.zeros(uses.shape, bool)
    np.put_along_axis(held, order[:, :, :n_each], True, axis=2)
    for e in range(uses.shape[2]):
        held[e % len(uses), :, e] = True
    return held


FAST = replace(SERVER, step=1e-3, layer=1e-3, expert=5e-4, row=1e-4, message=2e-4, disk_bytes_per_second=0.0)


@given(st.integers(1, 5), st.integers(0, 1 << 32), st.booleans(), st.sampled_from([1, 3]), st.sampled_from([2, 64]),
       st.sampled_from([None, 1.0, 1.5, 3.0]))
@hypothesis_settings(max_examples=25)
def test_every_request_ends_and_no_time_is_negative(n_servers, seed, disk, n_places, n_step, cores):
    rng = np.random.default_rng(seed)
    resident = rng.random((n_servers, 2, 5)) < 0.5
    if not disk:
        resident[0] |= ~resident.any(axis=0)
    server = replace(SERVER, disk_bytes_per_second=1000.0 if disk else 0.0)
    traffic = _traffic([rng.random((2, 5)) + 0.01 for _ in range(n_servers)], 0.05, 100.0)
    costs = costs_of(n_servers, 2, server)
    machines = () if cores is None else (Machine(tuple(range(max(1, n_servers - 1))), cores),)  # all but the last
    found = simulate(costs, resident, traffic, 100.0, Settings(n_places, n_step, machines=machines))
    assert len(found.end) == sum(len(each.times) for each in traffic)
    for earlier, later in (("arrival", "begin"), ("begin", "first"), ("first", "end")):
        assert (getattr(found, earlier) <= getattr(found, later)).all()
    # tokens of a layer, without one of a prompt of two in the last; experts
    assert found.uses.sum() == len(found.end) * (6 + 5) * 2
    assert (found.local <= found.uses).all() and (found.local >= 0).all()
    assert (found.busy >= 0).all() and (found.busy <= found.duration * (1 if cores is None else 2) + 1e-6).all()
    assert found.duration == found.end.max(initial=0)


def test_the_same_seed_gives_the_same_outcome():
    popularities = _skewed(3)
    resident = _most_used(np.stack(popularities), 4)
    costs, traffic = costs_of(3, 3, FAST, rate=1e5, latency=1e-3), _traffic(popularities, 1.0, 60.0)
    outcomes = [simulate(costs, resident, traffic, 60, Settings(interval=20), lambda uses: _most_used(uses, 4), seed=4)
                for _ in range(2)]
    for field in fields(outcomes[0]):
        one, other = (getattr(outcome, field.name) for outcome in outcomes)
        assert repr(one) == repr(other) and np.array_equal(one, other), field.name


def test_more_bandwidth_never_makes_requests_slower_in_the_mean():
    popularities = _skewed(4)
    resident = _most_used(np.stack(popularities), 4)
    traffic = _traffic(popularities, 0.5, 60.0)
    latencies = [simulate(costs_of(4, 3, FAST, rate=rate, latency=1e-3), resident, traffic, 60.0).latency.mean()
                 for rate in (2e4, 4e4, 8e4, 1.6e5, 1e9)]
    assert latencies == sorted(latencies, reverse=True)
    local = simulate(costs_of(4, 3, FAST), everywhere(4, 3, 16), traffic, 60.0)
    assert local.latency.mean() < latencies[-1]


def test_after_a_shift_migration_makes_more_local_and_requests_faster():
    popularities = _skewed(3)
    later = popularities[1:] + popularities[:1]
    costs = costs_of(3, 3, FAST, rate=5e4, latency=5e-3, expert_bytes=1000.0)
    traffic = _traffic(popularities, 1.0, 200.0, later, shift=50.0)
    resident = _most_used(np.stack(popularities), 5)
    settings = Settings(interval=25.0)
    moved = simulate(costs, resident, traffic, 200.0, settings, lambda uses: _most_used(uses, 5))
    stayed = simulate(costs, resident, traffic, 200.0, settings)
    late = moved.arrival > 125
    assert any(change.decision.adopt and change.finished > change.time for change in moved.changes)
    assert not stayed.changes
    assert moved.local[:, 25:].sum() > 1.2 * stayed.local[:, 25:].sum()
    assert moved.latency[late].mean() < 0.9 * stayed.latency[late].mean()
    assert moved.latency[moved.end < 25] == pytest.approx(stayed.latency[stayed.end < 25])


def test_a_shift_does_not_move_experts_that_are_too_large():
    popularities = _skewed(3)
    costs = costs_of(3, 3, FAST, rate=5e4, latency=5e-3, expert_bytes=1e9)
    traffic = _traffic(popularities, 1.0, 200.0, popularities[1:] + popularities[:1], shift=50.0)
    found = simulate(costs, _most_used(np.stack(popularities), 5), traffic, 200.0, Settings(interval=50.0),
                     lambda uses: _most_used(uses, 5))
    assert len(found.changes) >= 3
    assert not any(change.decision.adopt for change in found.changes)


def test_no_requests_are_no_time():
    found = simulate(costs_of(1, 1), everywhere(1, 1, 1), [Traffic(at(), Same([]))], 10)
    assert found.duration == 0 and len(found.latency) == 0 and np.isnan(found.local_ratio)
