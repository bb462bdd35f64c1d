"""Compares compressed experts and their plan with other ways to keep experts: ZipMoE's figures 7, 8 and 10."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyorch import pictures
from pyorch.bench.bench_plan import read_limit
from pyorch.cli.numbers import number, rate, whole
from pyorch.cli.options import add_model, check_readable, print_json
from pyorch.cli.plan import measured_machine
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, listed
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.library.choices import policies
from pyorch.llama.cores import physical_cores
from pyorch.settings.budget import Budget
from pyorch.sidecars import container, packs
from pyorch.sizes import Amount
from pyorch.traces.data import read_documents
from pyorch.traces.file import Trace
from pyorch.traces.recorder import profile
from scripts.papers import program
from scripts.papers.tables import write_csv
from scripts.papers.zipmoe import caching, measure, plots, report

CACHING, LATENCY, THROUGHPUT = WHAT = ("caching", "latency", "throughput")
BUDGETS = "20%,30%,40%,60%"


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.zipmoe.evaluate", "compare compressed experts and their plan with other ways to keep experts",
        "olmoe.gguf --data prose.txt --compare caching,latency,throughput -o evaluation")
    parser.description += (
        " caching: a recorded routing is replayed in simulated time, with eviction policies and forms of experts; "
        f"nothing is prefetched, and the policy {', '.join(policies().foreseeing)} knows the future. "
        "latency: the model decodes, cold and under memory limits: with llama.cpp's mmap, with whole experts, with the "
        "compressed pack, and as planned. throughput: the same, with several sequences at once. Without "
        "MODEL.plan.json next to the model, the plan is made during loading."
    )
    add_model(parser, "with a compressed pack beside it")
    parser.add_argument("--compare", default=CACHING, metavar="WHAT,...",
                        help=f"several of {', '.join(WHAT)}; the last two take minutes (default: {CACHING})")
    parser.add_argument("--data", action="extend", nargs="+", default=[], metavar="FILE",
                        help="text to record and to decode: plain text, or .jsonl with a field text or prompt "
                             "on each line")
    replay = parser.add_argument_group("caching")
    replay.add_argument("--trace", type=Path, metavar="FILE.trace",
                        help="the routing, in place of the one of --data: a trace of pyorch profile")
    replay.add_argument("--tokens", type=whole(2), default=8000, metavar="N",
                        help="record N tokens; the plan knows the first half, and the second half counts (default: "
                             "8000)")
    add_settings(replay, "budget", "policy", lists=("budget", "policy"),
                 defaults={"budget": f"{BUDGETS}; not auto", "policy": "lru,fifo,marking,lfu,learned,belady"})
    replay.add_argument("--read-bandwidth", type=rate, metavar="RATE",
                        help="speed of the disk, such as 1GB/s (default: measured on the model's file)")
    replay.add_argument("--decode-bandwidth", type=rate, metavar="RATE",
                        help="bytes of matrices that one thread recovers in a second (default: measured on the pack)")
    replay.add_argument("--workers", type=whole(1, 512), metavar="N",
                        help="threads that decode (default: an engine's number)")
    replay.add_argument("--compute-ms", type=number(least=0), default=30.0, metavar="MS",
                        help="time to decode a token when all experts are resident (default: 30)")
    measured = parser.add_argument_group("latency and throughput")
    measured.add_argument("--memory-limit", default=BUDGETS, metavar="SIZE,...",
                         help="memory of each process, page cache included: 1600MiB, or 40%% of the model's file "
                              f"(default: {BUDGETS.replace('%', '%%')})")
    measured.add_argument("--plain", metavar="MODEL.gguf",
                         help="the same model, as a link or a copy with a plain pack next to it, from which whole "
                              "experts are read (default: they are read from the model)")
    measured.add_argument("--batch", default="1,4,16", metavar="N,...",
                         help="sequences at once (default: 1,4,16)")
    measured.add_argument("--batch-limit", default="40%", metavar="SIZE",
                         help="memory of each process that decodes several sequences (default: 40%%)")
    measured.add_argument("--prompt-tokens", type=whole(1), default=128, metavar="N",
                         help="begin each sequence with a prompt of N tokens (default: 128)")
    measured.add_argument("--decode", type=whole(1), default=64, metavar="N",
                         help="decode N tokens of each sequence (default: 64)")
    measured.add_argument("--max-seconds", type=number(above=0), default=30, metavar="S",
                         help="stop decoding after S seconds, but not before the first token (default: 30)")
    measured.add_argument("--rounds", type=whole(1), default=3, metavar="N",
                         help="measure everything N times, in turns (default: 3)")
    measured.add_argument("--resume", type=Path, metavar="FILE.json",
                         help="store each measurement in this file, and do not repeat those that it holds")
    measured.add_argument("--threads", type=whole(1, 512), metavar="N",
                         help="compute threads (default: the physical cores)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR",
                        help="write the tables as CSV files, and pictures, into this directory")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return program.run(parser, run, argv)


def run(args: argparse.Namespace) -> int:
    given = _check(args)
    if args.output is not None:
        pictures.check(args.output)
    with (packs.open_model(args.model) as plain, packs.open_model(args.model) as packed, Progress() as progress,
          tempfile.TemporaryDirectory(prefix="pyorch-") as directory):
        if plain.pack is not None:
            raise PyorchError(f"{args.model} is slim: what is compared with its pack needs the whole model")
        packs.require_compressed(packed)
        # Reports impossible measurements before recording.
        measurements = None if given.what == (CACHING,) else _measurements(args, given, plain, Path(directory))
        conditions, played, measured, goals = None, [], [], []
        if CACHING in given.what:
            conditions, played = _caching(args, given, plain, packed, Path(directory), progress)
            goals += report.caching_goals(played, conditions)
        if measurements is not None:
            measurements.run(progress.update, progress.say)
            measured = measurements.rows()
            goals += report.measured_goals(measurements, measured)
    evaluation = report.Evaluation(conditions, played, measured, goals)
    tables = report.tables(evaluation)
    if args.output is not None:
        directory = args.output.absolute()
        paths = write_csv(tables, directory) + plots.draw(evaluation, directory)
    if args.json:
        print_json(vars(evaluation) | {"goals": [vars(goal) | {"met": goal.met} for goal in goals]})
        return 0
    for table in tables:
        show([Table(table.columns, table.texts(), table.words, table.title), ""])
    if args.output is not None:
        print(f"{len(paths)} files in {args.output}: {', '.join(path.name for path in paths)}")
    return 0


@dataclass(frozen=True)
class _Given:
    """Arguments that have several parts, parsed."""

    what: tuple[str, ...]
    budgets: tuple[Budget, ...]
    policies: tuple[str, ...]
    limits: tuple[Amount, ...]
    batches: tuple[int, ...]
    batch_limit: Amount


def _check(args: argparse.Namespace) -> _Given:
    """Raises PyorchError for impossible arguments, before recording."""
    what = tuple(dict.fromkeys(args.compare.split(",")))
    for name in what:
        if name not in WHAT:
            raise PyorchError(f'--compare "{name}" is not known: name some of {", ".join(WHAT)}')
    if what == (CACHING,) and bool(args.data) == (args.trace is not None):
        raise PyorchError("strategies are compared on text or on a trace: give --data or --trace, one of them")
    if what != (CACHING,) and not args.data:
        raise PyorchError("latency and throughput are measured on text: give --data")
    if what == (CACHING,) and args.resume is not None:
        raise PyorchError("--resume keeps what is measured, and caching measures nothing: leave it out, or ask for "
                          "--compare latency or throughput")
    check_readable([*args.data, args.trace])
    budgets = listed(args, "budget") or tuple(map(Budget.parse, BUDGETS.split(",")))
    for budget in budgets:
        if budget.amount is None:
            raise PyorchError(f'strategies are compared at a size or a share of the experts, and not at "{budget}"')
    chosen = listed(args, "policy") or caching.POLICIES
    for policy in chosen:
        policies().choose(policy, in_replay=True)
    try:
        batches = tuple(dict.fromkeys(map(whole(1, 256), args.batch.split(","))))
    except argparse.ArgumentTypeError as error:
        raise PyorchError(f"--batch: {error}") from None
    limits = tuple(dict.fromkeys(map(read_limit, args.memory_limit.split(","))))
    return _Given(what, budgets, chosen, limits, batches, read_limit(args.batch_limit))


def _caching(args: argparse.Namespace, given: _Given, plain, packed, directory: Path, progress):
    """Returns conditions and rows."""
    for budget in given.budgets:
        budget.resolve(plain.info)
    trace = args.trace
    if trace is None:
        trace = directory / "data.trace"
        for data in args.data:
            profile(args.model, [data], trace, n_tokens=max(1, args.tokens // len(args.data)), append=True,
                    n_threads=args.threads, on_progress=progress.update)
    progress.update("measuring reading and decoding", 0, 0)
    conditions = caching.Conditions(given.budgets, given.policies, measured_machine(args, packed), args.compute_ms)
    return conditions, caching.compare(plain, packed, Trace(trace), conditions, progress.update)


def _measurements(args: argparse.Namespace, given: _Given, model_map, directory: Path):
    if args.plain is not None:
        with packs.open_model(args.plain) as other:
            if container.fingerprint(other) != container.fingerprint(model_map):
                raise PyorchError(f"{args.plain} is another model than {args.model}: --plain is the same one")
    text = directory / "text"
    text.write_text("\n".join(document.text for document in read_documents(args.data)), encoding="utf-8")
    cases = measure.cases(given.limits if LATENCY in given.what else (),
                               given.batches if THROUGHPUT in given.what else (), given.batch_limit)
    work = measure.Work(args.model, args.plain, str(text), args.prompt_tokens, args.decode,
                             args.threads or physical_cores(), args.rounds, args.max_seconds)
    return measure.Measurements(work, model_map, cases, args.resume)


if __name__ == "__main__":
    sys.exit(main())
