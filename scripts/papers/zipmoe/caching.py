"""Caching strategies for compressed experts on one recorded routing, in simulated time (ZipMoE, fig. 10).

The planner knows the first half of the recording, which also fills the caches; the second half counts. So each strategy
is judged by other tokens than it was made of. All have the same budget, disk, residency table and policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyorch.errors import BudgetError
from pyorch.library.choices import default_policy, policies
from pyorch.planning.makespan import POOLS
from pyorch.planning.planner import HANDICAP, STEP, Planner
from pyorch.planning.ranks import inclusion_by_rank
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.settings.pools import Pools
from pyorch.sidecars.memory_plan import Machine, Reserve, new_planner
from pyorch.sizes import MiB
from pyorch.traces.divisions import FINALISTS, choose
from pyorch.traces.file import Trace
from pyorch.traces.recording import Recording, decoded_recording
from pyorch.traces.replay import ReplaySettings, replay

POLICIES = ("lru", "fifo", "marking", "lfu", "learned", "belady")

# The kept forms of experts, by the names of `pyorch plan`.
WITHOUT = "without a pack"  # whole experts, read from the model
FULL = "full only"  # whole experts, read from the compressed pack
COMPRESSED = "compressed only"
PLAN = "plan"  # pools as planned; without a pack if that is faster

# These count loads and evictions, and an expert that changes its form causes neither.
_WHOLE_ONLY = ("fifo", "marking")

OnProgress = Callable[[str, int, int], None]  # replay, done, total


@dataclass(frozen=True)
class Conditions:
    """The common conditions of all replays. compute_ms: of a token with all experts resident."""

    budgets: tuple[Budget, ...]
    policies: tuple[str, ...]
    machine: Machine
    compute_ms: float


@dataclass(frozen=True)
class Played:
    """One strategy at one budget, per token of the second half.

    Attributes:
        shares: Of the budget for the forms F, C, S and E; None without the pack.
        part_rate: Share of the needed experts of which a compressed form was in memory.
        wait_ms: Without a matrix to compute with.
        expected_ms: The planner's estimate of wait_ms; nan without a plan.
        failure: Why there are no results.
    """

    kept: str
    policy: str
    budget: str
    shares: tuple[float, ...] | None
    hit_rate: float = float("nan")
    part_rate: float = float("nan")
    wait_ms: float = float("nan")
    tpot_ms: float = float("nan")
    read_mib: float = float("nan")
    expected_ms: float = float("nan")
    failure: str = ""

    @property
    def is_bound(self) -> bool:
        return self.policy in policies().foreseeing


def compare(
    plain: ModelMap, packed: ModelMap, trace: Trace, conditions: Conditions, on_progress: OnProgress
) -> list[Played]:
    """Replays every strategy at every budget. A row says if a budget is too small.

    Args:
        plain, packed: Two maps of one model, without its pack and with it.

    Raises:
        BudgetError: No strategy has enough memory.
        FormatError: The trace belongs to another model, or there is no compressed pack.
        PyorchError: The trace has no tokens.
    """
    recording = decoded_recording(trace, packed)
    half = max(1, len(recording) // 2)
    known = recording.part(slice(half))
    n_expert = max(layer.n_expert for layer in packed.decoded_layers)
    planner = new_planner(packed, inclusion_by_rank(known.experts, n_expert), conditions.machine)
    strategies = [(kept, policy) for kept in (WITHOUT, FULL, COMPRESSED, PLAN) for policy in conditions.policies
                  if kept in (WITHOUT, FULL) or policy not in _WHOLE_ONLY]
    rows: list[Played] = []
    for budget in conditions.budgets:
        budget.resolve(plain.info)
        divisions = _divisions(planner, plain, packed, known, conditions, budget)
        for kept, policy in strategies:
            on_progress(f"replaying {kept}, {policy}, {budget}", len(rows), len(strategies) * len(conditions.budgets))
            try:
                pools, expected = divisions[kept]
                if pools is not None:
                    budget.resolve(packed.info)
                model_map = plain if pools is None else packed
                rows.append(_played(model_map, recording, conditions, kept, policy, budget, pools, expected, half))
            except BudgetError as error:
                rows.append(Played(kept, policy, str(budget), None, failure=str(error)))
    return rows


def find(rows: list[Played], kept: str, policy: str, budget: str) -> Played | None:
    return next((row for row in rows if (row.kept, row.policy, row.budget) == (kept, policy, budget)), None)


def shown_policy(policies: tuple[str, ...]) -> str:
    """Returns the policy that represents a plan: the default one, if it is compared."""
    return default_policy() if default_policy() in policies else policies[0]


def _divisions(
    planner: Planner, plain: ModelMap, packed: ModelMap, known: Recording, conditions: Conditions, budget: Budget
) -> dict[str, tuple[Pools | None, float]]:
    """Returns by kept form the shares, None without the pack, and the plan's milliseconds of waiting per token."""
    nan = float("nan")
    divisions = {WITHOUT: (None, nan), FULL: (Pools(1, 0, 0, 0), nan), COMPRESSED: (Pools(0, 1, 0, 0), nan)}
    try:
        n_bytes = budget.resolve(packed.info)
    except BudgetError:  # the floor is higher with a pack
        return {**divisions, PLAN: (None, nan)}
    reserved = Reserve.of(packed).bytes(n_bytes)
    planned = planner.plan(n_bytes, POOLS, STEP, reserved, HANDICAP, FINALISTS)
    simple = [planner.cost(divisions[kept][0].shares, n_bytes - reserved) for kept in (FULL, COMPRESSED)]
    best = choose([*simple, planned.plain, *planned.finalists], packed, plain, known, n_bytes, conditions.machine,
                  handicap=1.0,  # compares results of replays, however small
                  compute_ms=conditions.compute_ms).best
    return {**divisions, PLAN: (Pools(*best.shares) if best.compressed else None, 1000 * best.makespan)}


def _played(
    model_map: ModelMap, recording: Recording, conditions: Conditions, kept: str, policy: str, budget: Budget,
    pools: Pools | None, expected_ms: float, n_warm: int,
) -> Played:
    machine = conditions.machine
    found = replay(model_map, recording, ReplaySettings(
        policy, budget=budget, read_bandwidth=machine.bytes_per_second, compute_ms=conditions.compute_ms,
        n_warm_tokens=n_warm, pools=pools or Pools(), decode_bandwidth=machine.decoded_per_second,
        n_decoders=machine.n_workers,
    ))
    stats = found.stats
    uses = stats.hits + stats.misses
    in_part = stats.compressed_hits + stats.sm_hits + stats.e_hits
    return Played(kept, policy, str(budget), pools.shares if pools is not None else None, found.hit_rate,
                  in_part / uses if uses else float("nan"), found.stall_ms, found.tpot_ms, found.bytes_per_token / MiB,
                  expected_ms)
