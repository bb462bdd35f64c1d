"""Caching strategies for compressed experts on one recorded routing, in simulated time (ZipMoE, fig. 10).

The first half of the recording is what the planner knows, and fills the caches; the second half counts. So no strategy
is judged by what it was made of. All have the same budget, the same disk, and the table and policies of the runtime.
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
from pyorch.sidecars.plan import Machine, Reserve, new_planner
from pyorch.sizes import MiB
from pyorch.traces.divisions import FINALISTS, choose
from pyorch.traces.file import Trace
from pyorch.traces.recording import Recording, decoded_recording
from pyorch.traces.replay import ReplaySettings, replay

POLICIES = ("lru", "fifo", "marking", "lfu", "learned", "belady")

# What is kept of experts, by the names of `pyorch plan`.
WITHOUT = "without a pack"  # whole experts, which are read from the model
FULL = "full only"  # whole experts, which are read from the compressed pack
COMPRESSED = "compressed only"
PLAN = "plan"  # pools as planned; without a pack where that is sooner done

# They count what comes into memory and what leaves it, and an expert that changes its form does neither.
_WHOLE_ONLY = ("fifo", "marking")

OnProgress = Callable[[str, int, int], None]  # what is played, done, total


@dataclass(frozen=True)
class Conditions:
    """What all replays have in common. compute_ms: of a token when all experts are resident."""

    budgets: tuple[Budget, ...]
    policies: tuple[str, ...]
    machine: Machine
    compute_ms: float


@dataclass(frozen=True)
class Played:
    """One strategy at one budget, per token of the second half.

    shares: of the budget for the forms F, C, S and E, None without the pack. part_rate: of the experts that were
    needed, those of which a compressed form was in memory; wait_ms: without a matrix to compute with; expected_ms: what
    the planner expects of that, nan where it was not asked. failure: why there is nothing else.
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
    """Every strategy at every budget. A budget that is too small for one is said in its row.

    Args:
        plain, packed: two maps of one model, without its pack and with it.

    Raises FormatError for a trace of another model, or without a compressed pack; PyorchError for a trace without
    tokens, and BudgetError where no strategy has enough.
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
    """The one that stands for a plan: the default, where it is compared."""
    return default_policy() if default_policy() in policies else policies[0]


def _divisions(
    planner: Planner, plain: ModelMap, packed: ModelMap, known: Recording, conditions: Conditions, budget: Budget
) -> dict[str, tuple[Pools | None, float]]:
    """By what is kept: the shares, None without the pack, and milliseconds that the plan expects a token to wait."""
    nan = float("nan")
    divisions = {WITHOUT: (None, nan), FULL: (Pools(1, 0, 0, 0), nan), COMPRESSED: (Pools(0, 1, 0, 0), nan)}
    try:
        n_bytes = budget.resolve(packed.info)
    except BudgetError:  # with a pack the floor is higher
        return {**divisions, PLAN: (None, nan)}
    reserved = Reserve.of(packed).bytes(n_bytes)
    planned = planner.plan(n_bytes, POOLS, STEP, reserved, HANDICAP, FINALISTS)
    simple = [planner.cost(divisions[kept][0].shares, n_bytes - reserved) for kept in (FULL, COMPRESSED)]
    best = choose([*simple, planned.plain, *planned.finalists], packed, plain, known, n_bytes, conditions.machine,
                  handicap=1.0,  # what divisions bring in a replay is compared, be it much or little
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
