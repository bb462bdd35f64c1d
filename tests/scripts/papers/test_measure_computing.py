"""Costs of computing are found again in work that they made."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyorch.cluster.costs import ServerCosts
from scripts.papers.dancemoe.measure_computing import Processors, Work, at_once, fit, work_seconds

N_LAYERS = 8
KNOWN = ServerCosts(step=0.0, disk_latency=0.25, disk_bytes_per_second=1e8)


def own(costs: ServerCosts, steps: int, tokens: int, experts: int, rows: int, noise: float = 1.0) -> Work:
    seconds = N_LAYERS * (costs.layer * steps + costs.token * tokens) + costs.expert * experts + costs.row * rows
    return Work(noise * seconds, steps, tokens, 0, experts, rows)


def service(costs: ServerCosts, messages: int, experts: int, rows: int, noise: float = 1.0) -> Work:
    seconds = costs.message * messages + costs.expert * experts + costs.row * rows
    return Work(noise * seconds, 0, 0, messages, experts, rows)


def works(costs: ServerCosts, noise=lambda: 1.0) -> tuple[list[Work], list[Work]]:
    """Of a server with half of 64 experts, of which a token uses 6, and of a peer that asks for the other half."""
    requests, services = [], []
    for steps, tokens in ((17, 18), (1, 8), (1, 24), (1, 64), (1, 160), (1, 320)):
        used = steps * N_LAYERS * min(32, 3 * tokens // steps)
        requests.append(own(costs, steps, tokens, used, 3 * N_LAYERS * tokens, noise()))
        services.append(service(costs, steps * N_LAYERS, used, 3 * N_LAYERS * tokens, noise()))
    return requests, services


@given(st.tuples(*[st.floats(1e-6, 1e-3)] * 5))
@settings(max_examples=50)
def test_costs_are_found_again(values):
    costs = replace(KNOWN, **dict(zip(("layer", "token", "expert", "row", "message"), values)))
    assert astuple(fit(*works(costs), N_LAYERS, KNOWN)) == pytest.approx(astuple(costs), rel=1e-6, abs=1e-12)


def test_noise_of_a_tenth_leaves_predictions_within_a_tenth():
    costs = replace(KNOWN, layer=4e-4, token=5e-5, expert=1e-4, row=2e-5, message=1e-4)
    rng = np.random.default_rng(3)
    noisy = [works(costs, lambda: rng.uniform(0.9, 1.1)) for _ in range(3)]
    found = fit([w for requests, _ in noisy for w in requests], [w for _, services in noisy for w in services],
                N_LAYERS, KNOWN)
    for request, expected in zip(works(found)[0], works(costs)[0]):
        assert request.seconds == pytest.approx(expected.seconds, rel=0.1)
    assert min(astuple(found)) >= 0


def test_of_a_server_that_nobody_asked_rows_are_counted_with_tokens():
    costs = replace(KNOWN, layer=4e-4, token=5e-5, expert=1e-4, row=0.0)
    found = fit(works(costs)[0], [], N_LAYERS, KNOWN)
    assert (found.layer, found.token, found.expert) == pytest.approx((4e-4, 5e-5, 1e-4))
    assert (found.row, found.message) == (0.0, KNOWN.message)


def test_no_coefficient_is_below_zero():
    """A request of many tokens that took less than one of few."""
    found = fit([Work(2.0, 1, 1, 0, 0, 0), Work(1.0, 1, 100, 0, 0, 0)], [], N_LAYERS, KNOWN)
    assert min(astuple(found)) == 0.0


def test_work_is_what_it_would_take_by_the_costs():
    costs = replace(KNOWN, layer=4.0, token=5.0, expert=7.0, row=0.5, message=3.0)
    gained = {"hits": 8, "misses": 2, "activations": 30, "sent": 12, "fallback": 1, "served": 20, "served_messages": 6}
    assert work_seconds(costs, N_LAYERS, gained, [(2, 9), (1, 4)]) == (
        N_LAYERS * (4 * 3 + 5 * 13) + 3 * 6 + 7 * 10 + 0.5 * (30 - 12 + 1 + 20))
    assert work_seconds(costs, N_LAYERS, dict.fromkeys(gained, 0), []) == 0


@pytest.mark.parametrize(("n", "n_threads", "busy", "seconds", "jobs"), [
    (8, 1, 10.0, 7.5, 6.0),  # a second of a processor does three quarters of one of work
    (8, 2, 40.0, 15.0, 3.0),  # of jobs with two threads
    (8, 1, 10.0, 11.0, 8.0),  # never more than there are processors for
    (8, 2, 10.0, 11.0, 4.0),
    (2, 1, 10.0, 1.0, 1.0),  # something else computed
    (2, 4, 0.0, 1.0, 1.0), (4, 1, 0.0, 0.0, 4.0),  # too short to tell
])
def test_a_machine_is_worth_the_work_that_its_processors_do_while_they_are_busy(n, n_threads, busy, seconds, jobs):
    assert at_once(Processors(n, n_threads, 99.0), busy, seconds) == pytest.approx(jobs)
