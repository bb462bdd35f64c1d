"""Measures and prints whether pyorch reaches its goals on the benchmark model: against the roofline, against itself
without prefetching and without losses, and against llama.cpp, each as a ratio of runs of the same round.

    python -m scripts.bench_goals build/bench/bench.gguf
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from pyorch.bench import table
from pyorch.bench.bench_plan import RESIDENT, STOCK, budget_config, mmap_config
from pyorch.bench.job import Config, Job, Measurement
from pyorch.bench.rounds import Results, check_limits, run_rounds
from pyorch.bench.summary import ratios, summarize
from pyorch.cli.numbers import whole
from pyorch.cli.options import add_model
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError
from pyorch.llama.cores import physical_cores
from pyorch.llama.memory import cache_bytes
from pyorch.settings.prefetch import NONE, Prefetch
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import Substitution
from pyorch.sidecars import packs
from scripts.papers import program
from scripts.papers.tables import Goal, goal_table

_HITS = {"25%": 0.555, "40%": 0.705, "60%": 0.85}  # by budget, of the benchmark model
_LOSSY = "25%"
_LIMITS = (40, 60)  # percent of the file
_PROMPT_TOKENS, _TOKENS, _SECONDS = 512, 128, 30


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of("scripts.bench_goals", "measure the goals of the benchmark, in rounds",
                               "build/bench/bench.gguf")
    add_model(parser)
    add_settings(parser, "policy", "prefetch")
    parser.add_argument("--repeat", type=whole(1), default=3, metavar="R",
                        help="measure R rounds, and print their medians (default: 3)")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    settings, n_threads = Settings(**given_settings(args)), physical_cores()

    def job_for(config: Config) -> Job:
        return Job(args.model, config, argparse.__file__, _PROMPT_TOKENS, _TOKENS, n_threads, _SECONDS)

    with packs.open_model(args.model) as model_map, Progress() as progress:
        file_bytes = model_map.info.file_bytes
        configs = goal_configs(file_bytes, settings)
        check_limits(configs)
        results = run_rounds(job_for, configs, args.repeat, progress.update, progress.say)
        if not any(run.measurement for run in results.runs):
            raise PyorchError(results.runs[0].failure)
        header = table.header(model_map, _PROMPT_TOKENS, _TOKENS, args.repeat, n_threads)
    cached = file_bytes <= cache_bytes()
    summaries = [summarize(results, config, None if cached else RESIDENT) for config in configs]
    reached = goal_table(goals(results, file_bytes, settings))
    show([Facts(header), "", Table(*table.table(summaries), left=("configuration",)), "",
          Facts(table.footer(results, summaries[0], summaries, cached)), "",
          Table(reached.columns, reached.texts(), left=reached.words)])
    return 0


def goal_configs(file_bytes: int, settings: Settings) -> list[Config]:
    """Returns all configurations that goals() compares."""
    configs = [RESIDENT]
    for budget in _HITS:
        ours = with_budget(settings, budget)
        configs += (ours, without_guesses(ours), *([lossy(ours)] if budget == _LOSSY else []))
    configs += (with_budget(settings, "100%"), STOCK)
    for ours, theirs in _limited_pairs(file_bytes, settings):
        configs += (ours, theirs)
    return configs


def with_budget(settings: Settings, budget: str) -> Config:
    return budget_config(replace(settings, budget=budget))


def without_guesses(config: Config) -> Config:
    settings = replace(config.settings, prefetch=Prefetch(NONE))
    return replace(config, label=f"{config.label}, no guesses", settings=settings)


def lossy(config: Config) -> Config:
    heaviest = replace(config.settings, substitution=Substitution.parse("heaviest"))
    return replace(config, label=f"{config.label}, lossy heaviest", settings=heaviest)


def _limited_pairs(file_bytes: int, settings: Settings) -> Iterator[tuple[Config, Config]]:
    for percent in _LIMITS:
        limit_bytes, limit = file_bytes * percent // 100, f"{percent}%"
        yield budget_config(replace(settings, budget="auto"), limit_bytes, limit), mmap_config(limit_bytes, limit)


def goals(results: Results, file_bytes: int, settings: Settings) -> Iterator[Goal]:
    def paired(
        what: str, goal: float, config: Config, base: Config,
        value: Callable[[Measurement], float] = lambda measurement: measurement.decode.rate,
    ) -> Goal:
        each = ratios(results, config, base, value)
        return Goal(what, goal, statistics.median(each) if each else math.nan, interval=interval(each))

    for budget, hits in _HITS.items():
        ours = with_budget(settings, budget)
        summary = summarize(results, ours, RESIDENT)
        yield Goal(f"decode, hits, budget {budget}", hits, summary.decode_hit_rate)
        yield Goal(f"decode, fraction of the roofline, budget {budget}", 0.90, summary.decode_roofline)
        yield Goal(f"prefill, fraction of the roofline, budget {budget}", 0.80, summary.prefill_roofline)
        yield paired(f"decode rate / that without guesses, budget {budget}", 1.0, ours, without_guesses(ours))
        if budget == _LOSSY:
            yield paired(f"decode rate, lossy heaviest / lossless, budget {budget}", 1.8, lossy(ours), ours)
    for ours, theirs in _limited_pairs(file_bytes, settings):
        where = f"memory limited to {ours.limit_bytes * 100 / file_bytes:.0f}% of the file"
        yield paired(f"decode rate / llama.cpp mmap's, {where}", 20.0, ours, theirs)
        yield paired(f"llama.cpp mmap's time to the first token / ours, {where}", 1.0, theirs, ours,
                     lambda measurement: measurement.ttft_seconds)
    for ours in (RESIDENT, with_budget(settings, "100%")):
        yield paired(f"decode rate / llama.cpp's, {ours.label}", 0.97, ours, STOCK)
        yield paired(f"prefill rate / llama.cpp's, {ours.label}", 0.97, ours, STOCK,
                     lambda measurement: measurement.prefill.rate)
    yield paired(f"llama.cpp's time to the first token / ours, {ours.label}", 1.0, STOCK, ours,
                 lambda measurement: measurement.ttft_seconds)


def interval(each: list[float]) -> tuple[float, float] | None:
    """Returns the geometric mean minus and plus two standard errors."""
    if len(each) < 2:
        return None
    logs = [math.log(one) for one in each]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - 2 * error), math.exp(mean + 2 * error)


if __name__ == "__main__":
    sys.exit(main())
