"""`pyorch bench`: measure speed under budgets and memory limits, against llama.cpp and the roofline."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from dataclasses import replace

from pyorch.cli.options import add_command, add_substitution_options, print_json, substitution_arguments
from pyorch.errors import PyorchError

# Little is imported here: the measured processes import this package too.


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
    from pyorch.bench import goals, rounds, table
    from pyorch.bench.summary import summarize
    from pyorch.runtime.engine import POLICIES
    from pyorch.runtime.model_map import ModelMap
    from pyorch.settings.prefetch import Prefetch

    for name in ("tokens", "prompt_tokens", "repeat"):
        if getattr(args, name) < 1:
            raise PyorchError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if args.data and not os.access(args.data, os.R_OK):
        raise PyorchError(f"{args.data} cannot be read: --data names a text file")
    with ModelMap(args.model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{args.model} is a dense model: there are no experts to measure")
        file_bytes = model_map.info.file_bytes
        fits = _fits(model_map.info)
        lossy = substitution_arguments(args)
        if args.goals and (lossy["substitution"] is not None or lossy["speculate"]):
            raise PyorchError("--goals are for lossless runs: measure lossy ones with --budget")
        for prefetch in args.prefetch.split(","):
            Prefetch.parse(prefetch).check(model_map.info.n_moe_layers)
        for policy in args.policy.split(","):
            if policy not in POLICIES:
                raise PyorchError(f'policy "{policy}" is not known: use {", ".join(POLICIES)}')
        if args.goals and ("," in args.prefetch or "," in args.policy):
            raise PyorchError("--goals are measured with one --prefetch and one --policy")
        configs = goals.goal_configs(file_bytes, args.policy, args.prefetch) if args.goals else _configs(args, model_map.info, fits)
        pairs = _lossy_pairs(configs, lossy)
        configs += [config for config, _ in pairs]
        if not fits:
            _say("the model does not fit in memory: there is no reference for the roofline, and nothing with all experts")
            configs = [config for config in configs if not config.preload]
        rounds.check_limits(configs)
        results = rounds.run_rounds(_jobs(args), configs, args.repeat, _say)
        if not any(it.measurement for it in results.runs):
            raise PyorchError(results.runs[0].failure)
        summaries = [summarize(results, config, goals.RESIDENT) for config in configs]
        reached = list(goals.goals(results, file_bytes, args.policy, args.prefetch)) if args.goals else []
        if args.json:
            print_json({
                "machine": table.machine(), "model": model_map.path, "info": model_map.info,
                "tokens": args.tokens, "prompt_tokens": args.prompt_tokens, "repeat": args.repeat,
                "summaries": summaries, "goals": reached, "bandwidths": results.bandwidths, "runs": results.runs,
            })
            return 0
        resident = next((it for it in summaries if it.config == goals.RESIDENT), None)
        lines = table.header(model_map, args.prompt_tokens, args.tokens, args.repeat, _threads(args))
    lines += ["", *table.table(summaries), "", *table.footer(results, resident)]
    if pairs:
        lines += ["", *table.lossy_lines(results, pairs)]
    if reached:
        lines += ["", *goals.goal_lines(reached)]
    print("\n".join(lines))
    return 0


def _fits(info) -> bool:
    """Whether all experts can be resident, beside what else a process needs."""
    from pyorch.llama import memory

    limit = memory.memory_limit()
    return info.slots_bytes + info.dense_bytes + memory.margin_bytes(limit) < limit.free_bytes


def _configs(args: argparse.Namespace, info, fits: bool) -> list:
    """The reference, which is all resident, first."""
    from pyorch.llama import memory
    from pyorch.bench import goals

    compare = [word for word in args.compare.split(",") if word]
    for word in compare:
        if word not in ("mmap", "stock"):
            raise PyorchError(f'--compare "{word}" is not known: use mmap or stock')
    limit = args.memory_limit or ""
    limit_bytes = memory.parse_size(limit, info.file_bytes) if limit else 0
    budgets = args.budget or ("auto" if limit else "25%,40%,60%,100%" if fits else "auto")
    configs = [goals.RESIDENT]
    policies, prefetches = args.policy.split(","), args.prefetch.split(",")
    for budget in budgets.split(","):
        memory.parse_budget(budget, info)
        for policy, prefetch in itertools.product(policies, prefetches):
            config = goals.budget_config(budget, policy, prefetch, limit_bytes, limit)
            named = [config.label, *([policy] if len(policies) > 1 else []), *([f"prefetch {prefetch}"] if len(prefetches) > 1 else [])]
            configs.append(replace(config, label=", ".join(named)))
    if "mmap" in compare:
        configs.append(goals.mmap_config(limit_bytes, limit))
    if "stock" in compare:
        configs += (goals.RESIDENT_PLAIN, goals.STOCK_PLAIN)
    return configs


def _lossy_pairs(configs: list, lossy: dict) -> list[tuple]:
    """For each configuration that reads experts: the same with what substitution_arguments() asks for, and itself."""
    from pyorch.bench.job import ENGINE

    if lossy["speculate"]:
        label, change = "speculating", {"speculate": True}
    elif lossy["substitution"] is not None:
        label, change = str(lossy["substitution"]), {"substitution": str(lossy["substitution"]), "buddies": lossy["buddies"] or ""}
    else:
        return []
    lossless = [it for it in configs if it.mode == ENGINE and not it.preload]
    return [(replace(it, label=f"{it.label}, lossy {label}", **change), it) for it in lossless]


def _jobs(args: argparse.Namespace):
    from pyorch.bench.job import Job

    data, n_threads = args.data or argparse.__file__, _threads(args)

    def job_for(config) -> Job:
        return Job(args.model, config, data, args.prompt_tokens, args.tokens, n_threads, args.max_seconds)

    return job_for


def _threads(args: argparse.Namespace) -> int:
    from pyorch.llama.memory import physical_cores

    return args.threads or physical_cores()


def _say(what: str) -> None:
    print(f"pyorch: {what}", file=sys.stderr, flush=True)
