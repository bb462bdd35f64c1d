"""Measures on disks of several speeds whether defaults gain: prefetching against none, and --lossy heaviest against
lossless, each as a ratio of runs of the same round. The disks are in memory and slowed down. So it needs root, Linux,
and memory for the model in addition to the run.

    sudo .venv/bin/python -m scripts.bench_disks build/bench/bench.gguf --repeat 4
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from pyorch.bench.bench_plan import RESIDENT
from pyorch.bench.job import Config, Job
from pyorch.bench.rounds import Results, run_rounds
from pyorch.bench.summary import ratios, summarize
from pyorch.cli.numbers import whole
from pyorch.cli.options import add_model
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.llama.cores import physical_cores
from pyorch.settings.settings import Settings
from pyorch.sizes import Amount, GiB, MiB
from scripts.bench_goals import interval, lossy, with_budget, without_guesses
from scripts.disk_in_memory import disk_in_memory, slowed
from scripts.papers import program

_BUDGETS = ("25%", "40%", "60%")
_PROMPT_TOKENS, _TOKENS, _SECONDS = 64, 160, 120  # enough time for all to decode the same text to its end
_COLUMNS = ("disk", "budget", "no guesses, tok/s", "guesses / none", "", "roofline, none", "guesses",
            "heaviest / lossless", "")


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of("scripts.bench_disks", "measure defaults on disks of several speeds",
                               "build/bench/bench.gguf")
    add_model(parser)
    add_settings(parser, "policy", "prefetch")
    parser.add_argument("--disks", type=_rates, default="300MiB,1GiB,3GiB", metavar="RATES",
                        help="bytes a second (default: %(default)s)")
    parser.add_argument("--repeat", type=whole(1), default=3, metavar="R", help="measure R rounds (default: 3)")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    if os.geteuid() != 0:
        raise PyorchError("file systems in memory are mounted by root: run it with sudo")
    lossless = [with_budget(Settings(**given_settings(args)), budget) for budget in _BUDGETS]
    configs = [RESIDENT, *(each(config) for config in lossless for each in (lambda c: c, without_guesses, lossy))]
    rows = []
    with disk_in_memory(Path(args.model).stat().st_size * 21 // 20 + 64 * MiB) as disk, Progress() as progress:
        model = shutil.copy(args.model, disk.path)

        def job_for(config: Config) -> Job:
            return Job(model, config, argparse.__file__, _PROMPT_TOKENS, _TOKENS, physical_cores(), _SECONDS)

        for rate in args.disks:
            with slowed(disk, rate):
                results = _at_most(rate, run_rounds(job_for, configs, args.repeat, progress.update, progress.say))
            rows += [_row(results, rate, config) for config in lossless]
    show([Table(_COLUMNS, rows, left=("budget",))])
    return 0


def _rates(text: str) -> list[int]:
    try:
        rates = [Amount.parse(rate).n_bytes for rate in text.split(",")]
    except ValueError:
        rates = [None]
    if not all(rates):
        raise argparse.ArgumentTypeError(f'"{text}" has a rate that is no size such as 1GiB')
    return [rate for rate in rates if rate]


def _at_most(rate: float, results: Results) -> Results:
    """Limits the disk's peak, which was measured in a moment, to the disk's rate.

    A quota allows for a moment the bytes that it did not use before. Over a run it gives no more than its rate.
    """
    return replace(results, runs=tuple(replace(run, bandwidth=min(run.bandwidth, rate)) for run in results.runs))


def _row(results: Results, rate: float, config: Config) -> tuple[str, ...]:
    def compared(one: Config, other: Config) -> tuple[str, str]:
        each = ratios(results, one, other, lambda measurement: measurement.decode.rate)
        between = interval(each)
        return f"{statistics.median(each):.2f}", "{:.2f} to {:.2f}".format(*between) if between else "-"

    none = summarize(results, without_guesses(config), RESIDENT)
    return (f"{rate / GiB:.2g} GiB/s", str(config.settings.budget), f"{none.decode_rate:.1f}",
            *compared(config, without_guesses(config)), f"{none.decode_roofline:.2f}",
            f"{summarize(results, config, RESIDENT).decode_roofline:.2f}", *compared(lossy(config), config))


if __name__ == "__main__":
    sys.exit(main())
