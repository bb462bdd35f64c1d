"""`pyorch bench`: measure speed under budgets and memory limits, against llama.cpp and the roofline."""

from __future__ import annotations

import argparse
import os
import sys

from pyorch.cli.options import add_command, add_substitution_options, print_json, substitution_arguments
from pyorch.errors import PyorchError


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "bench", "measure speed under budgets",
        "pyorch bench olmoe.gguf --budget 25%,50% --memory-limit 40% --compare mmap",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--budget", metavar="SIZE,...",
                        help="budgets to measure (default: 25%%,40%%,60%%,100%%; under a memory limit: auto)")
    parser.add_argument("--memory-limit", metavar="SIZE",
                        help="limit each process to this much memory, page cache included: 1600MiB, or 40%% of the file")
    parser.add_argument("--compare", default="", metavar="WHAT,...",
                        help="also measure llama.cpp without pyorch: mmap, under the same limit; stock, all resident, same kernels")
    parser.add_argument("--goals", action="store_true", help="measure and print the project's speed goals; replaces the above")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens to decode (default: 128)")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="tokens of the prompt (default: 512)")
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="rounds, of which medians are taken (default: 3)")
    parser.add_argument("--data", metavar="FILE", help="text to feed (default: a module of Python's library)")
    parser.add_argument("--policy", default="finemoe", metavar="NAME,...",
                        help="measure each budget with each of these: lru, lfu, finemoe (default: finemoe)")
    parser.add_argument("--prefetch", default="auto", metavar="WHAT,...",
                        help="measure each budget with each of these, as `pyorch run --prefetch` takes them (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: the physical cores)")
    parser.add_argument("--max-seconds", type=float, default=30, metavar="S",
                        help="end a decode that takes longer, after at least one token (default: 30)")
    add_substitution_options(parser)
    parser.add_argument("--json", action="store_true", help="print everything that was measured as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.bench import goals, plan, rounds, table
    from pyorch.bench.job import Config, Job
    from pyorch.bench.summary import summarize
    from pyorch.llama.memory import physical_cores
    from pyorch.runtime.model_map import ModelMap

    for name in ("tokens", "prompt_tokens", "repeat"):
        if getattr(args, name) < 1:
            raise PyorchError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if args.data and not os.access(args.data, os.R_OK):
        raise PyorchError(f"{args.data} cannot be read: --data names a text file")
    n_threads = args.threads or physical_cores()
    asked = plan.Plan(
        budgets=_words(args.budget), memory_limit=args.memory_limit or "", peers=_words(args.compare), goals=args.goals,
        policies=_words(args.policy), prefetches=_words(args.prefetch), **substitution_arguments(args),
    )

    def job_for(config: Config) -> Job:
        data = args.data or argparse.__file__
        return Job(args.model, config, data, args.prompt_tokens, args.tokens, n_threads, args.max_seconds)

    with ModelMap(args.model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{args.model} is a dense model: there are no experts to measure")
        plan.check(asked, model_map.info)
        configs, pairs = plan.configurations(asked, model_map.info)
        if not plan.fits(model_map.info):
            _say("the model does not fit in memory: there is no reference for the roofline, and nothing with all experts")
            configs = [config for config in configs if not config.preload]
        rounds.check_limits(configs)
        results = rounds.run_rounds(job_for, configs, args.repeat, _say)
        if not any(run.measurement for run in results.runs):
            raise PyorchError(results.runs[0].failure)
        summaries = [summarize(results, config, goals.RESIDENT) for config in configs]
        reached = (
            list(goals.goals(results, model_map.info.file_bytes, args.policy, args.prefetch)) if args.goals else [])
        if args.json:
            print_json({
                "machine": table.machine(), "model": model_map.path, "info": model_map.info,
                "tokens": args.tokens, "prompt_tokens": args.prompt_tokens, "repeat": args.repeat,
                "summaries": summaries, "goals": reached, "bandwidths": results.bandwidths, "runs": results.runs,
            })
            return 0
        resident = next((summary for summary in summaries if summary.config == goals.RESIDENT), None)
        lines = table.header(model_map, args.prompt_tokens, args.tokens, args.repeat, n_threads)
    lines += ["", *table.table(summaries), "", *table.footer(results, resident)]
    if pairs:
        lines += ["", *table.lossy_lines(results, pairs)]
    if reached:
        lines += ["", *goals.goal_lines(reached)]
    print("\n".join(lines))
    return 0


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _say(what: str) -> None:
    print(f"pyorch: {what}", file=sys.stderr, flush=True)
