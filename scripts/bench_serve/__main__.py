"""`python -m scripts.bench_serve`: measures the waits of requests that arrive at random times."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyorch.bench import bench_plan, rounds, table
from pyorch.cli.numbers import number, whole
from pyorch.cli.options import add_model, check_readable, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings, listed
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError
from pyorch.runtime import disk
from pyorch.settings.budget import AUTO
from pyorch.settings.option import EXPERTS, LOSSY
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from pyorch.sizes import MiB
from scripts.bench_serve.load import Lengths, poisson, read_arrivals
from scripts.bench_serve.measure import Load, Served, Summary, run_rounds, suitable, summarize
from scripts.papers import program

MAX_SLOTS = 8

_COLUMNS = ("server", "answered", "tok/s", "first token s", "p95", "p99", "ms/token", "p95", "p99", "hits", "MiB/token")


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.bench_serve", "measure how long requests wait that arrive at a server by chance",
        "olmoe.gguf --budget 40% --np 1,2,4,8 --rate 0.5\n"
        "  python -m scripts.bench_serve olmoe.gguf --memory-limit 40% --baseline mmap --requests 16 --json",
    )
    parser.description += (
        " Each server, with each number of slots, gets the same requests at the same seconds. The time to the first "
        "token counts from the arrival, so it includes the wait for a slot. At the end it recommends a value of -np."
    )
    add_model(parser)
    add_settings(parser, EXPERTS, "n_threads", LOSSY, lists=("budget",))
    parser.add_argument("--np", type=_slots, default=(1, 2, 4, 8), metavar="N,...",
                        help=f"slots: so many requests are computed at once, 1 to {MAX_SLOTS} (default: 1,2,4,8)")
    parser.add_argument("--rate", type=number(above=0), default=1.0, metavar="R",
                        help="R requests arrive in a second, on average, by a Poisson process; inf: all at once "
                             "(default: 1)")
    parser.add_argument("--requests", type=whole(1, 10_000), default=24, metavar="N", help="N of them (default: 24)")
    parser.add_argument("--arrivals", type=Path, metavar="FILE.jsonl",
                        help='take arrivals from FILE, in place of --rate and --requests: {"seconds": 0.4, '
                             '"prompt_tokens": 120, "tokens": 32} on each line, whose lengths may be omitted')
    parser.add_argument("--prompt-tokens", default="64-256", metavar="DIST",
                        help="lengths of prompts: 128, or 32-256 (each as likely), or lognormal:128:0.6 (median and "
                             "deviation) (default: 64-256)")
    parser.add_argument("--tokens", default="16-64", metavar="DIST",
                        help="lengths of answers, in the same form (default: 16-64)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and lengths (default: 0)")
    parser.add_argument("--data", metavar="FILE",
                        help="text for the prompts (default: a module of Python's standard library)")
    parser.add_argument("--memory-limit", metavar="SIZE",
                        help="limit the memory of each server, page cache included: 1600MiB, or 40%% of the file")
    parser.add_argument("--baseline", choices=("mmap", "stock"),
                        help="also measure llama.cpp without a budget: mmap (under the same limit), or stock (all in "
                             "memory, its default)")
    parser.add_argument("--repeat", type=whole(1), default=1, metavar="R",
                        help="measure R rounds: percentiles are over all of them (default: 1)")
    parser.add_argument("--max-seconds", type=number(above=0), default=120, metavar="S",
                        help="cancel requests without an answer S seconds after the first arrival (default: 120)")
    parser.add_argument("--json", action="store_true", help="print all measurements as one JSON object")
    return program.run(parser, run, argv)


def run(args: argparse.Namespace) -> int:
    prompts, answers = Lengths.parse(args.prompt_tokens), Lengths.parse(args.tokens)
    if args.arrivals is not None:
        arrivals = read_arrivals(args.arrivals, prompts, answers, args.seed)
    else:
        arrivals = poisson(args.requests, args.rate, prompts, answers, args.seed)
    text = args.data or argparse.__file__
    check_readable([text])
    settings = given_settings(args, "budget")
    n_threads = settings.pop("n_threads", None)
    with packs.open_model(args.model) as model_map:
        info = model_map.info
    ways = _ways(args, settings, info)
    rounds.check_limits([served.config for served in ways])
    with packs.open_model(args.model) as model_map:
        bandwidth = disk.measure_bandwidth(model_map, rounds.BANDWIDTH_SECONDS)
    load = Load(args.model, Path(text).read_bytes(), tuple(arrivals), args.max_seconds, n_threads)
    with Progress() as progress:
        runs = run_rounds(load, ways, args.repeat, progress.update, progress.say)
    summaries = [summarize(runs, served) for served in ways]
    if not any(summary.n_answered for summary in summaries):
        raise PyorchError(next((summary.failure for summary in summaries if summary.failure), "nothing was answered"))
    advice = _advice(summaries)
    if args.json:
        print_json({"machine": table.machine(), "bandwidth": bandwidth, "model": args.model, "info": info,
                    "arrivals": arrivals, "summaries": summaries, "runs": runs,
                    "suits": {label: summary.served.slots for label, summary in advice}})
        return 0
    header = [*_header(args, load), ("disk", table.speed([bandwidth]))]
    show([Facts(header), "", Table(_COLUMNS, [_row(summary) for summary in summaries], left=("server",)), "",
          *map(_lost, (summary for summary in summaries if summary.n_answered and summary.failure)),
          *(_sentence(label, summary, summaries) for label, summary in advice)])
    return 0


def _ways(args: argparse.Namespace, settings: dict, info: object) -> list[Served]:
    limit = bench_plan.limit_of(bench_plan.read_limit(args.memory_limit), info)
    configs = []
    for budget in listed(args, "budget") or (AUTO,):
        if budget.amount is not None:
            budget.resolve(info)
        configs.append(bench_plan.budget_config(Settings(budget=budget, **settings), *limit))
    if args.baseline == "mmap":
        configs.append(bench_plan.mmap_config(*limit))
    if args.baseline == "stock":
        configs.append(bench_plan.STOCK)
    return [Served(config, slots) for config in configs for slots in args.np]


def _advice(summaries: list[Summary]) -> list[tuple[str, Summary]]:
    """Returns for each way with several numbers of slots, by label, the best number."""
    advice = []
    for label in dict.fromkeys(summary.served.config.label for summary in summaries):
        of_label = [summary for summary in summaries if summary.served.config.label == label]
        if len(of_label) > 1 and (best := suitable(of_label)) is not None:
            advice.append((label, best))
    return advice


def _sentence(label: str, best: Summary, summaries: list[Summary]) -> str:
    most = max(summary.served.slots for summary in summaries if summary.served.config.label == label)
    widest = next(s for s in summaries if s.served.config.label == label and s.served.slots == most)
    text = f"{label}: -np {best.served.slots} suits this load: {best.throughput:.2f} tok/s"
    if widest is not best and widest.throughput == widest.throughput:
        text += f", {widest.throughput:.2f} with -np {most}"
    return text


def _lost(summary: Summary) -> str:
    lost = summary.n_requests - summary.n_answered
    return f"{summary.served.label}: {lost} of {summary.n_requests} have no answer: {summary.failure}"


def _header(args: argparse.Namespace, load: Load) -> list[tuple[str, str]]:
    facts = table.machine()
    prompt = sum(arrival.n_prompt for arrival in load.arrivals) / len(load.arrivals)
    tokens = sum(arrival.n_tokens for arrival in load.arrivals) / len(load.arrivals)
    how = f"as {args.arrivals} says" if args.arrivals is not None else (
        "all at once" if args.rate == float("inf") else f"{args.rate:g} a second by a Poisson process")
    return [
        ("machine", f"{facts['cpu']}, {facts['cores']} cores, {facts['memory']} memory, {facts['system']}"),
        ("model", load.model),
        ("load", f"{len(load.arrivals)} requests, {how}; prompts of {prompt:.0f} tokens on average, answers of "
                 f"{tokens:.0f}"),
    ]


def _row(summary: Summary) -> tuple[str, ...]:
    answered = f"{summary.n_answered} of {summary.n_requests}"
    if not summary.n_answered:
        return (summary.served.label, f"{answered}: {summary.failure}", *[""] * (len(_COLUMNS) - 2))
    return (
        summary.served.label, answered, f"{summary.throughput:.2f}", *(f"{value:.2f}" for value in summary.ttft),
        *(f"{value * 1000:.1f}" if value == value else "-" for value in summary.tpot),
        f"{summary.hit_rate:.0%}" if summary.hit_rate == summary.hit_rate else "-",
        f"{summary.bytes_per_token / MiB:.1f}" if summary.bytes_per_token == summary.bytes_per_token else "-",
    )


def _slots(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole(1, MAX_SLOTS), text.split(","))))


if __name__ == "__main__":
    sys.exit(main())
