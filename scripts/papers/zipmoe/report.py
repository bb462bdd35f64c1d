"""The evaluation of compressed experts as text, as CSV files, and against the project's goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scripts.papers.tables import Goal, Table, goal_table
from scripts.papers.zipmoe.caching import COMPRESSED, FULL, PLAN, WITHOUT, Conditions, Played, find, shown_policy
from scripts.papers.zipmoe.measure import MMAP, WITHOUT_LRU, Case, Measured, Measurements

DECODE_GOAL, DECODE_GOAL_AT = 1.35, "40%"  # speed relative to whole experts, if most tokens read experts
_EXPECTED = 0.25  # allowed error of a plan, relative to the measurement


@dataclass(frozen=True)
class Evaluation:
    """The requested results; others are empty. notes: remarks."""

    conditions: Conditions | None = None
    caching: list[Played] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def tables(evaluation: Evaluation) -> list[Table]:
    made = []
    if evaluation.conditions is not None:
        made.append(_caching(evaluation.conditions, evaluation.caching))
    latency = [row for row in evaluation.measured if row.batch == 1]
    throughput = _batches(evaluation.measured)
    if latency:
        made.append(_latency(latency))
    if throughput:
        made.append(_throughput(throughput))
    if evaluation.goals:
        made.append(goal_table(evaluation.goals))
    return made


def caching_goals(rows: Sequence[Played], conditions: Conditions) -> Iterator[Goal]:
    """Yields goals in simulated time: the plan waits no longer than a single form, and as long as it expects."""
    policy = shown_policy(conditions.policies)
    for budget in map(str, conditions.budgets):
        ours = find(rows, PLAN, policy, budget)
        for kept, other in ((FULL, policy), (COMPRESSED, policy), (WITHOUT, policy), (FULL, "lru"), (WITHOUT, "lru")):
            theirs = find(rows, kept, other, budget)
            if theirs is not None and ours is not None:
                yield Goal(f"replayed wait of {kept}, {other} / the plan's, {budget}", 1.0,
                           _ratio(theirs.wait_ms, ours.wait_ms))
        if ours is not None and ours.expected_ms == ours.expected_ms:
            yield Goal(f"expected wait of the plan, off the replayed one, {budget}", _EXPECTED,
                       abs(_ratio(ours.expected_ms, ours.wait_ms) - 1), at_most=True)


def measured_goals(measurements: Measurements, rows: Sequence[Measured]) -> Iterator[Goal]:
    """Yields goals of measurements, each the median of the ratios of rounds."""
    cases = measurements.cases
    for limit in dict.fromkeys(case.limit for case in cases):
        ours = Case(PLAN, limit)
        for system in (WITHOUT, WITHOUT_LRU, FULL, COMPRESSED, MMAP):
            if Case(system, limit) in cases and ours in cases:
                goal = DECODE_GOAL if system == WITHOUT and str(limit) == DECODE_GOAL_AT else 1.0
                yield Goal(f"decode of the plan / {system}, memory {limit}", goal,
                           measurements.decode_ratio(ours, Case(system, limit)))
    for row in rows:
        if row.expected_ms == row.expected_ms:
            yield Goal(f"expected wait of the plan, off the measured one, memory {row.limit}", _EXPECTED,
                       abs(_ratio(row.expected_ms, row.wait_ms) - 1), at_most=True)


def _batches(rows: Sequence[Measured]) -> list[Measured]:
    """Returns the rows under one limit with several sequences, which compare batches."""
    limits = {row.limit for row in rows if row.batch > 1}
    systems = {row.system for row in rows if row.batch > 1}
    return [row for row in rows if row.limit in limits and row.system in systems]


def _caching(conditions: Conditions, rows: Sequence[Played]) -> Table:
    machine = conditions.machine
    title = (f"replayed, per token: {machine.bytes_per_second / 1e6:.4g} MB/s, {machine.n_workers} threads that decode "
             f"{machine.decoded_per_second / 1e6:.4g} MB/s each, {conditions.compute_ms:.4g} ms of computing")
    columns = ("budget", "kept", "policy", "wait ms", "TPOT ms", "hit rate", "in part", "MiB read", "F,C,S,E %",
               "expected ms", "failed")
    return Table("caching", title, columns, tuple(
        (row.budget, row.kept, row.policy, row.wait_ms, row.tpot_ms, row.hit_rate, row.part_rate, row.read_mib,
         _shares(row.shares), row.expected_ms, row.failure) for row in rows
    ))


def _latency(rows: Sequence[Measured]) -> Table:
    columns = ("memory", "system", "rounds", "TTFT s", "TPOT ms", "wait ms", "expected ms", "hit rate", "MiB read",
               "F,C,S,E %", "budget MiB", "peak MiB", "failed")
    return Table("latency", "measured, cold, one sequence: to the first token of a loaded model, then a token", columns,
                 tuple((row.limit, row.system, row.n_rounds, row.ttft_s, row.tpot_ms, row.wait_ms, row.expected_ms,
                        row.hit_rate, row.read_mib, _shares(row.shares), row.budget_mib, row.peak_mib, row.failure)
                       for row in rows))


def _throughput(rows: Sequence[Measured]) -> Table:
    columns = ("memory", "sequences", "system", "rounds", "tokens/s", "TPOT ms", "hit rate", "MiB read", "budget MiB",
               "failed")
    ordered = sorted(rows, key=lambda row: (row.limit, row.batch))
    return Table("throughput", "measured, cold, several sequences at once", columns,
                 tuple((row.limit, row.batch, row.system, row.n_rounds, row.tokens_per_second, row.tpot_ms,
                        row.hit_rate, row.read_mib, row.budget_mib, row.failure) for row in ordered))


def _shares(shares: Sequence[float] | None) -> str:
    return "-" if shares is None else ",".join(f"{100 * share:.0f}" for share in shares)


def _ratio(a: float, b: float) -> float:
    """Returns a / b, and 1 for 0 / 0."""
    return a / b if b else 1.0 if a == 0 else float("nan")
