"""What the scheduler decides by."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from placement_problems import problem_of, skewed
from processes import HANG_SECONDS

from pyorch.cluster.costs import Costs, ServerCosts
from pyorch.cluster.members import Work
from pyorch.cluster.migration import RecentUses, Sharing, row_seconds
from pyorch.cluster.placement.dance import place
from pyorch.cluster.placement.placement import ABSENT, Move, Placement
from pyorch.cluster.rebalancing import Recent, Setting, place_again
from pyorch.cluster.scheduler import Scheduler

SHAPE = (3, 4, 8)
INTERVAL = 100.0


@pytest.fixture
def setting() -> Setting:
    """Three servers with memory for 16 experts of 32 each, and slow disks."""
    problem = problem_of(np.zeros(SHAPE), [16 << 20] * 3, 1 << 20)
    links = np.where(np.eye(3, dtype=bool), np.inf, 1e8)
    latencies = np.where(np.eye(3, dtype=bool), 0, 1e-3)
    costs = Costs.of([ServerCosts(disk_bytes_per_second=1e7)] * 3, latencies, links, problem.sizes, 256.0)
    return Setting(problem, costs, INTERVAL)


def work(counts: np.ndarray, life: str = "first", **counters: int) -> Work:
    return Work(life, counts, **counters)


def test_what_was_used_an_interval_ago_counts_half() -> None:
    recent = RecentUses((1, 1, 2), INTERVAL)
    recent.add(np.array([[[8.0, 0.0]]]), INTERVAL)
    recent.add(np.array([[[0.0, 8.0]]]), INTERVAL)
    assert recent.expected.ravel() == pytest.approx([8 / 3, 16 / 3])


def test_a_short_window_stands_for_an_interval() -> None:
    recent = RecentUses((1, 1, 1), INTERVAL)
    recent.add(np.array([[[5.0]]]), INTERVAL / 10)
    assert recent.expected.ravel() == pytest.approx([50.0])


def test_each_look_counts_what_came_after_the_last_one_and_a_restart_begins_anew(setting: Setting) -> None:
    recent, counts = Recent.begin(setting, 0.0), np.full(SHAPE[1:], 3.0)
    recent.look(setting, {"s0": work(counts)}, 1.0)
    assert not recent.uses.uses.any()  # nobody knows when that was
    recent.look(setting, {"s0": work(counts + 2, sent=16, messages=4, sent_bytes=4 * 1088)}, 2.0)
    assert recent.local == {"s0": 0.75} and recent.uses.uses[0].sum() == 64
    assert recent.sharing == Sharing(4.0, 1.0, 1.0)
    recent.look(setting, {"s0": work(counts, "second", sent=1)}, 3.0)
    assert recent.local["s0"] == 1 - 1 / 96 and recent.uses.uses[0].sum() == pytest.approx(96 + 64 * 0.5 ** 0.01)


def test_rows_whose_experts_were_read_instead_are_not_local(setting: Setting) -> None:
    recent, counts = Recent.begin(setting, 0.0), np.zeros(SHAPE[1:])
    recent.look(setting, {"s0": work(counts)}, 1.0)
    recent.look(setting, {"s0": work(counts + 20, sent=1, read=479)}, 2.0)  # of 640
    assert recent.local == {"s0": 0.25}


def test_rows_cost_what_they_took_lately_where_any_were_computed_for_others(setting: Setting) -> None:
    recent, counts = Recent.begin(setting, 0.0), np.zeros(SHAPE[1:])
    assert recent.costs(setting).row.tolist() == setting.costs.row.tolist()
    for at, rows, ms in ((0.0, 5, 999), (0.0, 105, 1199), (INTERVAL, 205, 1999)):
        recent.look(setting, {"s1": work(counts, served=rows, served_ns=ms * 1_000_000)}, at)
    costs = recent.costs(setting)  # 100 rows in 0.2 s an interval ago, and 100 in 0.8 s now
    assert costs.row == pytest.approx([setting.costs.row[0], (0.1 + 0.8) / 150, setting.costs.row[2]])
    assert costs.expert[1] == costs.message[1] == 0 < costs.expert[0] and costs.message[0] > 0
    uses = np.zeros(SHAPE)
    uses[0, 0, 0] = 1000.0
    recent.uses.add(uses, INTERVAL)
    device = np.full(SHAPE, ABSENT, np.int16)
    device[1] = 0
    now = Placement(setting.problem.servers, setting.problem.layers, (SHAPE[2],) * SHAPE[1], device)
    _, decision = place_again(setting, now, recent, setting.problem.servers)
    assert decision.current == pytest.approx(recent.uses.expected[0, 0, 0] * row_seconds(costs)[0, 1])


def test_experts_of_a_server_that_is_gone_are_placed_on_the_others(setting: Setting) -> None:
    uses = 1000 * skewed(np.random.default_rng(0), SHAPE, 0.5)
    recent = Recent.begin(setting, 0.0)
    recent.uses.add(uses, INTERVAL)
    now = place(replace(setting.problem, frequencies=uses))
    candidate, decision = place_again(setting, now, recent, ["s0", "s2"])
    assert candidate.held[[0, 2]].any(axis=0).all() and not candidate.held[1].any()
    assert decision.adopt and decision.n_moves >= (now.held[1] & ~now.held[[0, 2]].any(axis=0)).sum() > 0
    assert decision.migration == pytest.approx(setting.costs.disk_seconds[0, 0] * decision.n_moves)
    same, decision = place_again(setting, now, recent, setting.problem.servers)
    assert not decision.adopt and decision.n_moves == 0 and (same.held == now.held).all()


def test_moves_lead_from_a_placement_to_another(setting: Setting) -> None:
    one, other = (place(replace(setting.problem, frequencies=skewed(np.random.default_rng(seed), SHAPE, 0.5)))
                  for seed in (0, 1))
    moves = one.moves_to(other)
    assert moves and all(isinstance(move, Move) for move in moves)
    assert (one.changed(moves).device == other.device).all()
    assert isinstance(one, Placement) and one.moves_to(one) == []


def test_a_scheduler_that_fails_says_so_and_decides_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray has for it."""
    asked = []

    def ask(self: Scheduler, names: tuple[str, ...], method: str, *rest: object, **options: object) -> dict:
        asked.append(method)
        if len(asked) < 3:
            raise RuntimeError("its connection is gone")
        return {}

    monkeypatch.setattr(Scheduler, "_ask", ask)
    scheduler = Scheduler(replace(setting, interval=0.01))
    reasons = set()
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while len(asked) < 5 or "no server answers" not in reasons:
            assert time.monotonic() < deadline
            if (last := scheduler.report().last) is not None:
                reasons.add(last.reason)
            time.sleep(0.001)
    finally:
        scheduler.stop()
    assert asked[:3] == ["activity"] * 3
