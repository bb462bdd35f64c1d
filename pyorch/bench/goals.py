"""The project's speed goals, and whether a run of the benchmark reached them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyorch.bench.job import ENGINE, UNMANAGED, Config
from pyorch.bench.rounds import Results
from pyorch.bench.summary import ratio, summarize
from pyorch.settings.settings import Settings

_ALL = Settings(budget="100%")
RESIDENT = Config("all resident", ENGINE, _ALL, preload=True)
STOCK = Config("llama.cpp, all in memory", UNMANAGED)
# The same plain kernels on both sides.
RESIDENT_PLAIN = Config("all resident, plain kernels", ENGINE, _ALL, preload=True, repack=False)
STOCK_PLAIN = Config("llama.cpp, all in memory, plain kernels", UNMANAGED, repack=False)

_HITS = {"25%": 0.555, "40%": 0.705, "60%": 0.85}  # by budget, of the benchmark model
_LIMITS = (40, 60)  # percent of the file


@dataclass(frozen=True)
class Goal:
    """reached: nan if it could not be measured."""

    what: str
    goal: float
    reached: float

    @property
    def met(self) -> bool:
        return self.reached >= self.goal


def budget_config(settings: Settings, limit_bytes: int = 0, limit: str = "") -> Config:
    label = f"budget {settings.budget}" + (f", memory {limit}" if limit else "")
    return Config(label, ENGINE, settings, limit_bytes)


def mmap_config(limit_bytes: int, limit: str) -> Config:
    return Config(
        "llama.cpp mmap" + (f", memory {limit}" if limit else ""), UNMANAGED, limit_bytes=limit_bytes, repack=False
    )


def beside(n_busy: int, config: Config) -> Config:
    """The same, beside busy processes."""
    if not n_busy:
        return config
    what = "one busy process" if n_busy == 1 else f"{n_busy} busy processes"
    return replace(config, label=f"{config.label}, beside {what}", n_busy=n_busy)


def goal_configs(file_bytes: int, settings: Settings) -> list[Config]:
    """All that goals() compares."""
    configs = [RESIDENT, *(budget_config(replace(settings, budget=budget)) for budget in (*_HITS, "100%"))]
    for ours, theirs in _limited_pairs(file_bytes, settings):
        configs += (ours, theirs)
    return [*configs, STOCK]


def _limited_pairs(file_bytes: int, settings: Settings) -> Iterator[tuple[Config, Config]]:
    for percent in _LIMITS:
        limit_bytes, limit = file_bytes * percent // 100, f"{percent}%"
        yield budget_config(replace(settings, budget="auto"), limit_bytes, limit), mmap_config(limit_bytes, limit)


def goals(results: Results, file_bytes: int, settings: Settings) -> Iterator[Goal]:
    for budget, hits in _HITS.items():
        summary = summarize(results, budget_config(replace(settings, budget=budget)), RESIDENT)
        yield Goal(f"decode, hits, budget {budget}", hits, summary.decode_hit_rate)
        yield Goal(f"decode, fraction of the roofline, budget {budget}", 0.90, summary.decode_roofline)
        yield Goal(f"prefill, fraction of the roofline, budget {budget}", 0.80, summary.prefill_roofline)
    for ours, theirs in _limited_pairs(file_bytes, settings):
        where = f"memory limited to {ours.limit_bytes * 100 / file_bytes:.0f}% of the file"
        yield Goal(
            f"decode rate / llama.cpp mmap's, {where}",
            20.0,
            ratio(results, ours, theirs, lambda measurement: measurement.decode.rate),
        )
        yield Goal(f"llama.cpp mmap's time to the first token / ours, {where}", 1.0,
                   ratio(results, theirs, ours, lambda measurement: measurement.ttft_seconds))
    yield Goal("decode rate / llama.cpp's, all resident", 0.97,
               ratio(results, RESIDENT, STOCK, lambda measurement: measurement.decode.rate))
    yield Goal("prefill rate / llama.cpp's, all resident", 0.97,
               ratio(results, RESIDENT, STOCK, lambda measurement: measurement.prefill.rate))


def goal_rows(reached: list[Goal]) -> list[tuple[str, ...]]:
    """Of each goal: what, at least, reached, and whether it is met."""
    return [
        (goal.what, f"{goal.goal:.2f}", f"{goal.reached:.2f}" if goal.reached == goal.reached else "-",
         "yes" if goal.met else "NO")
        for goal in reached
    ]
