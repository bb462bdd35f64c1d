"""Arithmetic of scripts.bench_goals, on runs that never took place: 10 tokens each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyorch.bench.bench_plan import RESIDENT
from pyorch.bench.job import ENGINE, UNMANAGED, Config, Measurement, Phase
from pyorch.bench.rounds import Results, Run
from pyorch.settings.settings import Settings
from pyorch.sizes import GiB
from scripts import bench_goals
from scripts.papers.tables import goal_table

BUDGET = Config("budget 40%", ENGINE, Settings(budget="40%"))


def run_of(config: Config, seconds: float) -> Run:
    phase = Phase(10, seconds, 60, 20, 0, 0, 0.0)
    return Run(config, 0, "", Measurement(1, 2, phase, phase, 100, 50, 40), None, GiB, 0.0)


def test_goal_that_was_not_measured_is_not_met():
    reached = list(bench_goals.goals(Results((run_of(RESIDENT, 1.0), run_of(BUDGET, 1.1)), ()), 4 * GiB, Settings()))
    by_name = {goal.what: goal for goal in reached}
    assert by_name["decode, fraction of the roofline, budget 40%"].met and by_name["decode, hits, budget 40%"].met
    assert not by_name["decode, fraction of the roofline, budget 25%"].met
    assert [row[-1] for row in goal_table(reached).rows].count("yes") == 3


def test_goals_compare_with_llama_cpp_under_the_same_limits():
    configs = bench_goals.goal_configs(4 * GiB, Settings())
    assert len(set(configs)) == len(configs)
    for limit in (4 * GiB * 40 // 100, 4 * GiB * 60 // 100):
        assert {config.mode for config in configs if config.limit_bytes == limit} == {ENGINE, UNMANAGED}


def test_a_ratio_is_of_runs_of_the_same_round_and_has_an_interval():
    def at(config: Config, number: int, seconds: float) -> Run:
        return replace(run_of(config, seconds), round=number)

    without = next(config for config in bench_goals.goal_configs(4 * GiB, Settings())
                   if config.label == "budget 40%, no guesses")
    runs = (at(BUDGET, 0, 1.0), at(without, 0, 1.1), at(BUDGET, 1, 2.0), at(without, 1, 2.6), at(BUDGET, 2, 1.0))
    goal = next(goal for goal in bench_goals.goals(Results(runs, ()), 4 * GiB, Settings())
                if goal.what == "decode rate / that without guesses, budget 40%")
    assert goal.met and goal.reached == pytest.approx(1.2)
    low, high = goal.interval
    assert low < 1.1 and high > 1.3 and (low * high) ** 0.5 == pytest.approx((1.1 * 1.3) ** 0.5)
