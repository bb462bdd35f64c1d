"""Measures what pyorch wants to reach on the benchmark model, and prints whether it does.

    python -m scripts.bench_goals build/bench/bench.gguf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from pyorch.bench import table
from pyorch.bench.job import Config, Job
from pyorch.bench.plan import RESIDENT, STOCK, budget_config, mmap_config
from pyorch.bench.rounds import Results, check_limits, run_rounds
from pyorch.bench.summary import ratio, summarize
from pyorch.cli.numbers import whole
from pyorch.cli.options import add_model
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError
from pyorch.llama.cores import physical_cores
from pyorch.llama.memory import cache_bytes
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from scripts.papers import program
from scripts.papers.tables import Goal, goal_table

_HITS = {"25%": 0.555, "40%": 0.705, "60%": 0.85}  # by budget, of the benchmark model
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


if __name__ == "__main__":
    sys.exit(main())
