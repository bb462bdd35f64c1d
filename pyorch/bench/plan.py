"""Which configurations a benchmark compares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyorch.bench import goals
from pyorch.bench.job import ENGINE, Config
from pyorch.errors import PyorchError
from pyorch.library.choices import policies
from pyorch.llama import memory
from pyorch.llama.apply import check_prefetch
from pyorch.runtime.model_map import MapInfo
from pyorch.settings.budget import Budget
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.substitution import Substitution

PEERS = ("mmap", "stock")  # llama.cpp under the same memory limit; all resident, with the same kernels


@dataclass(frozen=True)
class Plan:
    """What the user asks for.

    budgets: () for those that suit. memory_limit: such as "1600MiB", or "40%" of the file; "" for none.
    peers: of PEERS. goals: the configurations of the project's speed goals, in place of budgets and peers.
    substitution, buddies, speculate: each configuration that reads experts is measured with them too.
    """

    budgets: tuple[str, ...] = ()
    memory_limit: str = ""
    peers: tuple[str, ...] = ()
    goals: bool = False
    policies: tuple[str, ...] = ("finemoe",)
    prefetches: tuple[str, ...] = ("auto",)
    substitution: Substitution | None = None
    buddies: str | None = None
    speculate: bool = False

    @property
    def lossy(self) -> bool:
        return self.substitution is not None or self.speculate


def check(plan: Plan, info: MapInfo) -> None:
    """Raises PyorchError for a plan that cannot be measured with this model."""
    for prefetch in plan.prefetches:
        check_prefetch(Prefetch.parse(prefetch), info.n_moe_layers)
    for policy in plan.policies:
        policies().choose(policy)
    for peer in plan.peers:
        if peer not in PEERS:
            raise PyorchError(f'--compare "{peer}" is not known: use {" or ".join(PEERS)}')
    if plan.goals and plan.lossy:
        raise PyorchError("--goals are for lossless runs: measure lossy ones with --budget")
    if plan.goals and (len(plan.prefetches) > 1 or len(plan.policies) > 1):
        raise PyorchError("--goals are measured with one --prefetch and one --policy")


def fits(info: MapInfo) -> bool:
    """Whether all experts can be resident, beside what else a process needs."""
    limit = memory.memory_limit()
    return info.slots_bytes + info.dense_bytes + memory.margin_bytes(limit) < limit.free_bytes


def configurations(plan: Plan, info: MapInfo) -> tuple[list[Config], list[tuple[Config, Config]]]:
    """What is measured: the reference, which is all resident, first; and of these, pairs of a lossy
    configuration and the lossless one that differs in nothing else."""
    if plan.goals:
        return goals.goal_configs(info.file_bytes, plan.policies[0], plan.prefetches[0]), []
    configs = [goals.RESIDENT, *_budgets(plan, info)]
    limit_bytes = _limit_bytes(plan, info)
    if "mmap" in plan.peers:
        configs.append(goals.mmap_config(limit_bytes, plan.memory_limit))
    if "stock" in plan.peers:
        configs += (goals.RESIDENT_PLAIN, goals.STOCK_PLAIN)
    pairs = _lossy_pairs(plan, configs)
    return configs + [lossy for lossy, _ in pairs], pairs


def _budgets(plan: Plan, info: MapInfo) -> list[Config]:
    limit_bytes = _limit_bytes(plan, info)
    budgets = plan.budgets or (("25%", "40%", "60%", "100%") if not plan.memory_limit and fits(info) else ("auto",))
    configs = []
    for budget in budgets:
        if Budget.parse(budget).amount is not None:
            Budget.parse(budget).resolve(info)
        for policy, prefetch in itertools.product(plan.policies, plan.prefetches):
            config = goals.budget_config(budget, policy, prefetch, limit_bytes, plan.memory_limit)
            label = [config.label]
            if len(plan.policies) > 1:
                label.append(policy)
            if len(plan.prefetches) > 1:
                label.append(f"prefetch {prefetch}")
            configs.append(replace(config, label=", ".join(label)))
    return configs


def _limit_bytes(plan: Plan, info: MapInfo) -> int:
    return Budget.parse(plan.memory_limit).amount.of(info.file_bytes) if plan.memory_limit else 0


def _lossy_pairs(plan: Plan, configs: Sequence[Config]) -> list[tuple[Config, Config]]:
    if plan.speculate:
        label, change = "speculating", {"speculate": True}
    elif plan.substitution is not None:
        label, change = str(plan.substitution), {"substitution": str(plan.substitution), "buddies": plan.buddies or ""}
    else:
        return []
    lossless = [config for config in configs if config.mode == ENGINE and not config.preload]
    return [(replace(config, label=f"{config.label}, lossy {label}", **change), config) for config in lossless]
