"""`pyorch bench`: measure speed under budgets and memory limits, against llama.cpp and the roofline."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from pyorch.cli.numbers import number, whole
from pyorch.cli.options import add_force, add_model, answer, check_own, check_readable
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings, listed, one_by_one
from pyorch.cli.tables import Facts, Table
from pyorch.errors import PyorchError
from pyorch.settings.budget import BENCH_BUDGETS
from pyorch.settings.device_options import NONE
from pyorch.settings.option import EXPERTS, LOSSY
from pyorch.settings.settings import Settings

EXAMPLE = """pyorch bench olmoe.gguf --budget 25%,50% --memory-limit 40% --baseline mmap
  pyorch bench olmoe.gguf --budget 25%,50% --lossy heaviest --plot read.png
  pyorch bench olmoe.gguf --budget 60% --baseline stock --busy 0,1,2
  pyorch bench olmoe.gguf --budget 25%,50% --device CUDA0 --vram-budget 25%"""

_COMPARED = ("policy", "prefetch", "recovery", "kernels")  # options that take several values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Each configuration runs in its own process, in alternating rounds. The report compares it with the roofline, "
        "the larger of the time to compute and the time to read missed bytes."
    )
    add_model(parser)
    add_settings(parser, EXPERTS, "n_threads", "cpus", LOSSY, "tuned",
                 lists=("budget", *_COMPARED), repeated=("substitution",),
                 defaults={"budget": ",".join(map(str, BENCH_BUDGETS)) + "; under a memory limit, auto"})
    parser.add_argument("--memory-limit", metavar="SIZE",
                        help="limit the memory of each process, page cache included: 1600MiB, or 40%% of the file")
    parser.add_argument("--baseline", default="", metavar="WHAT,...",
                        help="also measure llama.cpp without pyorch: mmap (under the same limit), stock (all in "
                             "memory, its default), plain (all in memory; llama.cpp and pyorch without repacked "
                             "kernels)")
    parser.add_argument("--tokens", type=whole(1), default=128, metavar="N", help="decode N tokens (default: 128)")
    parser.add_argument("--prompt-tokens", type=whole(1), default=512, metavar="N",
                        help="compute a prompt of N tokens first (default: 512)")
    parser.add_argument("--repeat", type=whole(1), default=3, metavar="R",
                        help="measure R rounds and print their medians (default: 3)")
    parser.add_argument("--data", metavar="FILE",
                        help="the text to compute (default: a module of Python's standard library)")
    parser.add_argument("--max-seconds", type=number(above=0), default=30, metavar="S",
                        help="stop decoding after S seconds, but not before the first token (default: 30)")
    parser.add_argument("--busy", type=_numbers, default=(0,), metavar="N,...",
                        help="measure while N other processes keep a processor busy each (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png",
                        help="with a lossy setting, draw the bytes read over time, lossless and lossy, into this file")
    add_force(parser, "")
    parser.add_argument("--json", action="store_true", help="print all measurements as one JSON object")


def run(args: argparse.Namespace) -> int:
    from pyorch.bench import bench_plan, rounds, table
    from pyorch.bench.job import Config, Job
    from pyorch.bench.summary import summarize
    from pyorch.bench.table import draw
    from pyorch.llama.apply import find_buddies, find_ghosts
    from pyorch.llama.cores import physical_cores
    from pyorch.llama.memory import cache_bytes
    from pyorch.pictures import check_plot
    from pyorch.runtime.devices import find_devices
    from pyorch.sidecars import packs
    from pyorch.sidecars.beside import Sidecars

    check_readable([args.data])
    if args.plot is not None:
        check_plot(args.plot)
        check_own(args.plot, args.model, args.force)
    # Checks here that the other options fit the first value of each.
    compared = {name: given for name in _COMPARED if (given := listed(args, name))}
    first = {name: values[0] for name, values in compared.items()}
    each = [Settings(**given_settings(one, "budget", *_COMPARED), **first)
            for one in one_by_one(args, "substitution")]
    if each[0].device != NONE:
        find_devices(each[0].device)  # refuses now, before hours of measuring
    n_threads = each[0].n_threads or physical_cores()
    lossless = replace(each[0], substitution=None, buddies=None, speculate=False, tuned=None, n_threads=0)
    asked = bench_plan.Plan(
        lossless, tuple(settings for settings in each if settings.lossy), listed(args, "budget"),
        compared, bench_plan.read_limit(args.memory_limit), _words(args.baseline), args.busy,
    )

    def job_for(config: Config) -> Job:
        data = args.data or argparse.__file__
        return Job(args.model, config, data, args.prompt_tokens, args.tokens, n_threads, args.max_seconds)

    with packs.open_model(args.model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{args.model} is a dense model: there are no experts to measure")
        model_map.check_text()
        bench_plan.check(asked, model_map.info)
        configs, pairs = bench_plan.configurations(asked, model_map.info)
        if not bench_plan.fits(model_map.info):
            print("pyorch: note: the model does not fit in memory: nothing is measured with all experts resident, and "
                  "there is no reference for the roofline", file=sys.stderr)
            configs = [config for config in configs if not config.preload]
        rounds.check_limits(configs)
        beside = Sidecars(model_map)
        for settings in asked.lossy:  # refuses missing sidecars now, before hours of measuring
            find_ghosts(settings.substitution, beside)
            find_buddies(settings.substitution, settings.buddies, beside)
        if args.plot is not None and not asked.lossy:
            raise PyorchError("--plot draws what lossy settings read: give one with --lossy")
        with Progress() as progress:
            results = rounds.run_rounds(job_for, configs, args.repeat, progress.update, progress.say)
        if not any(run.measurement for run in results.runs):
            raise PyorchError(results.runs[0].failure)
        cached = model_map.info.file_bytes <= cache_bytes()
        # The reference computes on the processor, so it is no bound for a device.
        summaries = [summarize(results, config, None if cached or config.on_device
                               else bench_plan.beside(config.n_busy, bench_plan.RESIDENT)) for config in configs]
        if args.plot is not None:
            draw(results, [pair for pair in pairs if pair[0].lossy], args.plot)
        header = table.header(model_map, args.prompt_tokens, args.tokens, args.repeat, n_threads)
    resident = next((summary for summary in summaries if summary.config.preload), None)
    return answer(args, {
        "machine": table.machine(), "model": model_map.path, "info": model_map.info,
        "tokens": args.tokens, "prompt_tokens": args.prompt_tokens, "repeat": args.repeat,
        "summaries": summaries, "bandwidths": results.bandwidths, "runs": results.runs,
    }, lambda: [
        Facts(header), "",
        Table(*table.table(summaries), left=("configuration",)), "",
        Facts(table.footer(results, resident, summaries, cached)),
        *(["", *table.ratio_lines(results, pairs)] if pairs else []),
    ])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole(0, 1024), text.split(","))))


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
