"""The configurations that a benchmark compares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyorch.bench.job import ENGINE, UNMANAGED, Config
from pyorch.errors import PyorchError
from pyorch.library.choices import policies
from pyorch.llama import memory
from pyorch.llama.apply import check_prefetch
from pyorch.runtime.model_map import MapInfo
from pyorch.settings.budget import AUTO, BENCH_BUDGETS, Budget
from pyorch.settings.option import LOSSY, options
from pyorch.settings.settings import Settings
from pyorch.sizes import Amount, MiB, format_bytes

# llama.cpp under the same memory limit; all resident with its defaults; all resident without repacked kernels
BASELINES = ("mmap", "stock", "plain")

_ALL = Settings(budget="100%")
RESIDENT = Config("all resident", ENGINE, _ALL, preload=True)
STOCK = Config("llama.cpp, all in memory", UNMANAGED)
# The same plain kernels on both sides.
RESIDENT_PLAIN = Config("all resident, plain kernels", ENGINE, _ALL, preload=True, repack=False)
STOCK_PLAIN = Config("llama.cpp, all in memory, plain kernels", UNMANAGED, repack=False)


LEAST_LIMIT = 16 * MiB  # the memory of Python alone


@dataclass(frozen=True)
class Plan:
    """The user's request.

    Attributes:
        settings: Lossless settings of all configurations.
        lossy: Settings with which each reading configuration is measured too.
        budgets: (): pyorch chooses.
        compared: Options by name, with the values to measure for each budget.
        memory_limit: A size, or a share of the file.
        baselines: Some of BASELINES.
        busy: Numbers of busy processes with which each configuration is measured.
    """

    settings: Settings = Settings()
    lossy: tuple[Settings, ...] = ()
    budgets: tuple[Budget, ...] = ()
    compared: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    memory_limit: Amount | None = None
    baselines: tuple[str, ...] = ()
    busy: tuple[int, ...] = (0,)

    def combined(self) -> Iterator[Settings]:
        """Yields the settings with each combination of the compared options."""
        for values in itertools.product(*self.compared.values()):
            yield replace(self.settings, **dict(zip(self.compared, values)))


def read_limit(text: str | None) -> Amount | None:
    """Parses a memory limit, such as "1600MiB", or "40%" of the file. None for None.

    Raises:
        PyorchError: The text is no limit, or it is zero.
    """
    if text is None:
        return None
    try:
        amount = Amount.parse(text)
    except ValueError:
        amount = None
    if amount is None or not (amount.n_bytes or amount.share):
        raise PyorchError(
            f'memory limit "{text}" is not understood: use a size such as 1600MiB, or a share of the file such as 40%')
    return amount


def check(plan: Plan, info: MapInfo) -> None:
    """Checks a plan for a model.

    Raises:
        PyorchError: The plan cannot be measured.
    """
    for settings in plan.combined():
        check_prefetch(settings.prefetch, info.n_moe_layers)
        if settings.policy is not None:
            policies().choose(settings.policy)
    limit_bytes, limit = limit_of(plan.memory_limit, info)
    if limit and limit_bytes < LEAST_LIMIT:
        raise PyorchError(f"a memory limit of {limit} is {limit_bytes} bytes, with which no process begins: use "
                          f"{format_bytes(LEAST_LIMIT)} or more")
    for baseline in plan.baselines:
        if baseline not in BASELINES:
            raise PyorchError(f'--baseline "{baseline}" is not known: use {", ".join(BASELINES)}')


def budget_config(settings: Settings, limit_bytes: int = 0, limit: str = "") -> Config:
    label = f"budget {settings.budget}" + (f", memory {limit}" if limit else "")
    return Config(label, ENGINE, settings, limit_bytes)


def mmap_config(limit_bytes: int, limit: str) -> Config:
    return Config(
        "llama.cpp mmap" + (f", memory {limit}" if limit else ""), UNMANAGED, limit_bytes=limit_bytes, repack=False
    )


def beside(n_busy: int, config: Config) -> Config:
    """Returns the configuration with busy processes."""
    if not n_busy:
        return config
    what = "one busy process" if n_busy == 1 else f"{n_busy} busy processes"
    return replace(config, label=f"{config.label}, beside {what}", n_busy=n_busy)


def fits(info: MapInfo, n_models: int = 1) -> bool:
    """Whether all experts of n_models can be resident in addition to a process's other memory."""
    limit = memory.memory_limit()
    return n_models * (info.slots_bytes + info.dense_bytes) + limit.margin_bytes <= limit.free_bytes


def configurations(plan: Plan, info: MapInfo) -> tuple[list[Config], list[tuple[Config, Config]]]:
    """Returns all configurations, starting with the reference (all resident); and pairs that differ in one thing.

    A pair is a lossy or disturbed configuration, and the same one lossless or undisturbed.
    """
    configs = [RESIDENT, *_budgets(plan, info)]
    if "mmap" in plan.baselines:
        configs.append(mmap_config(*limit_of(plan.memory_limit, info)))
    if "stock" in plan.baselines:
        configs.append(STOCK)
    if "plain" in plan.baselines:
        configs += (RESIDENT_PLAIN, STOCK_PLAIN)
    lossy = _lossy_pairs(plan, configs)
    # After the lossless one, so that both are measured at nearly the same time.
    configs = [row for config in configs for row in (config, *(changed for changed, base in lossy if base == config))]
    pairs = [(beside(n, one), beside(n, other)) for n in plan.busy for one, other in lossy]
    if 0 in plan.busy:
        pairs += [(beside(n, config), config) for config in configs for n in plan.busy if n]
    return [beside(n, config) for config in configs for n in plan.busy], pairs


def _budgets(plan: Plan, info: MapInfo) -> list[Config]:
    suitable = BENCH_BUDGETS if plan.memory_limit is None and fits(info) else (AUTO,)
    configs = []
    for budget in plan.budgets or suitable:
        if budget.amount is not None:
            budget.resolve(info)
        for settings in plan.combined():
            config = budget_config(replace(settings, budget=budget), *limit_of(plan.memory_limit, info))
            several = [name for name, values in plan.compared.items() if len(values) > 1]
            label = [config.label, *(f"{name} {getattr(settings, name)}" for name in several)]
            configs.append(replace(config, label=", ".join(label)))
    return configs


def limit_of(memory_limit: Amount | None, info: MapInfo) -> tuple[int, str]:
    """Returns the limit in bytes, and as the user wrote it; 0 and "" without one."""
    return (0, "") if memory_limit is None else (memory_limit.of(info.file_bytes), str(memory_limit))


def _lossy_pairs(plan: Plan, configs: Sequence[Config]) -> list[tuple[Config, Config]]:
    lossless = [config for config in configs if config.mode == ENGINE and not config.preload]
    return [(_lossy(config, settings), config) for config in lossless for settings in plan.lossy]


def _lossy(config: Config, settings: Settings) -> Config:
    """Returns a lossless configuration with the lossy part of the settings."""
    names = [name for name, option in options(Settings).items() if option.group == LOSSY or name == "tuned"]
    change = {name: getattr(settings, name) for name in names}
    parts = ("speculating" if settings.speculate else None, settings.tuned or settings.substitution)
    what = " and ".join(str(part) for part in parts if part is not None)
    return replace(config, label=f"{config.label}, lossy {what}", settings=replace(config.settings, **change))
