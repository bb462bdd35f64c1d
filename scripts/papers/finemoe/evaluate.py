"""Evaluates predictors and their effects: the figures of FineMoE and of Speculating Experts."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from pyorch import pictures
from pyorch.cli.numbers import number, rate, whole
from pyorch.cli.options import add_model, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.library.choices import predictors
from pyorch.runtime import disk
from pyorch.settings.budget import Budget
from pyorch.sidecars import packs
from pyorch.traces.file import Trace
from pyorch.traces.recorder import profile
from scripts.papers import program
from scripts.papers.finemoe import measure, plots, replays, report, serving
from scripts.papers.tables import write_csv


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.finemoe.evaluate", "compare predictors of experts and eviction policies on held-out text",
        "olmoe.gguf --history chats.jsonl --data prose.txt -o evaluation")
    add_model(parser)
    data = parser.add_argument_group(
        "text", "Seven of ten requests of --data are the past that predictors know, unless --history gives one. "
                "The other requests are held out: the predictors are evaluated on them.")
    data.add_argument("--data", action="extend", nargs="+", default=[], metavar="FILE",
                      help="plain text, or .jsonl with a field text or prompt on each line, or with questions in the "
                           "layout of ARC")
    data.add_argument("--history", action="extend", nargs="+", default=[], metavar="FILE",
                      help="the past: text in the same formats")
    data.add_argument("--trace", type=Path, metavar="FILE",
                      help="in place of --data: a trace of pyorch profile --router full --states")
    data.add_argument("--history-trace", type=Path, metavar="FILE",
                      help="in place of --history: such a trace of the past")
    data.add_argument("--tokens", type=whole(1), default=8000, metavar="N",
                      help="record N tokens in all, the same number of each file (default: %(default)s)")
    replay = parser.add_argument_group("replay")
    replay.add_argument("--budget", default="25%,40%,60%", metavar="SIZE,...",
                        help="memory for the experts (default: 25%%,40%%,60%%)")
    replay.add_argument("--read-bandwidth", type=rate, metavar="RATE",
                        help="speed of the disk: bytes a second, such as 1GB (default: measured)")
    replay.add_argument("--compute-ms", type=number(above=0), metavar="MS",
                        help="time to decode a token when all experts are resident (default: measured)")
    replay.add_argument("--distance", default="1,2,3", metavar="N,...",
                        help="predict this many layers ahead; each pair of predictor and policy uses the best of these "
                             "(default: %(default)s)")
    replay.add_argument("--min-precision", default="0,0.3,0.6", metavar="P,...",
                        help="prefetch an expert only if similar predictions were right this often; each pair of "
                             "predictor and policy uses the best of these (default: %(default)s)")
    replay.add_argument("--capacity", type=whole(1), default=1000, metavar="N",
                        help="the store of expert maps holds N tokens (default: %(default)s)")
    measured = parser.add_argument_group("measure")
    measured.add_argument("--measure", action="store_true",
                         help="also decode for real, which takes minutes: on demand and with --prefetch auto, after "
                              "prompts of several lengths, at the first budget; and with each predictor when all "
                              "experts are resident")
    measured.add_argument("--context", default="256,512,1024,2048,4096", metavar="N,...",
                         help="lengths of these prompts, in tokens; lengths beyond the model's training context are "
                              "left out (default: %(default)s)")
    measured.add_argument("--decode", type=whole(1), default=96, metavar="N",
                         help="decode N tokens after each prompt (default: %(default)s)")
    measured.add_argument("--rounds", type=whole(1), default=3, metavar="N",
                         help="repeat these measurements N times (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: the physical cores)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR",
                        help="write the tables as CSV files, and pictures, into this directory")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return program.run(parser, run, argv)


def run(args: argparse.Namespace) -> int:
    given = _check(args)
    if args.output is not None:
        pictures.check(args.output)
    with packs.open_model(args.model) as model_map, Progress() as progress:
        for budget in given.budgets:
            Budget.parse(budget).resolve(model_map.info)
        if max(given.distances) > len(model_map.layers):
            raise PyorchError(
                f"--distance {max(given.distances)} is more than the {len(model_map.layers)} layers with experts")
        with tempfile.TemporaryDirectory(prefix="pyorch-") as directory:
            past, present = _traces(args, Path(directory), progress)
            conditions = _measured_conditions(args, given, model_map, progress)
            material = replays.Material(model_map, past, present, conditions)
            evaluation = replays.evaluate(material, progress.update)
            evaluation = serving.evaluate(material, evaluation, progress.update)
            if args.measure:
                evaluation = _measured(args, given, evaluation, progress)
    if args.output is not None:
        directory = args.output.absolute()
        paths = write_csv(report.tables(evaluation), directory) + plots.draw(evaluation, directory)
    if args.json:
        goals = [vars(goal) | {"met": goal.met} for goal in report.goals(evaluation)]
        print_json(vars(evaluation) | {"goals": goals})
        return 0
    for table in report.for_terminal(evaluation):
        show([Table(table.columns, table.texts(), table.words, table.title), ""])
    show(f"note: {note}" for note in evaluation.notes)
    if args.output is not None:
        print(f"{len(paths)} files in {args.output}: {', '.join(path.name for path in paths)}")
    return 0


@dataclass(frozen=True)
class _Given:
    """Arguments that have several parts, parsed. read_bandwidth: None: to be measured."""

    budgets: tuple[str, ...]
    distances: tuple[int, ...]
    min_precisions: tuple[float, ...]
    contexts: tuple[int, ...]
    read_bandwidth: float | None


def _check(args: argparse.Namespace) -> _Given:
    """Raises PyorchError for impossible arguments, before recording."""
    if bool(args.data) == (args.trace is not None):
        raise PyorchError("predictors are evaluated on text or on a trace: give --data or --trace, one of them")
    if args.history and args.history_trace is not None:
        raise PyorchError("the past is text or a trace: give --history or --history-trace, not both")
    if args.measure and not args.data:
        raise PyorchError("--measure decodes text: give --data")
    if not args.data and args.compute_ms is None:
        raise PyorchError("without text nothing can be decoded to measure how long a token takes: give --compute-ms")
    return _Given(
        tuple(dict.fromkeys(args.budget.split(","))), _numbers("--distance", args.distance, int, 1),
        _numbers("--min-precision", args.min_precision, float, 0, 1), _numbers("--context", args.context, int, 1),
        args.read_bandwidth,
    )


def _numbers(option: str, text: str, kind: type, least: float, most: float = float("inf")) -> tuple:
    """Returns the numbers of a list, within bounds. PyorchError: the text is no such list."""
    try:
        values = tuple(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError:
        values = ()
    if not values or not all(least <= value <= most for value in values):
        span = f"{least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"
        raise PyorchError(f'{option} "{text}" is not a list of numbers, {span}, with commas between them')
    return values


def _traces(args: argparse.Namespace, directory: Path, progress):
    """Returns the traces of the past and of held-out requests."""
    has_past = args.history or args.history_trace is not None
    present = Trace(args.trace) if args.trace is not None else _record(
        args, args.data, directory / "data.trace", args.tokens * 3 // 10 if has_past else args.tokens, progress)
    if args.history_trace is not None:
        return Trace(args.history_trace), present
    if args.history:
        return _record(args, args.history, directory / "history.trace", args.tokens * 7 // 10, progress), present
    return replays.split(present)


def _record(args: argparse.Namespace, data: list[str], path: Path, n_tokens: int, progress):
    for file in data:
        profile(args.model, [file], path, n_tokens=max(1, n_tokens // len(data)), router="full", states=True,
                append=True, n_ctx=replays.REQUEST_TOKENS, n_threads=args.threads, on_progress=progress.update)
    return Trace(path)


def _measured_conditions(args: argparse.Namespace, given: _Given, model_map, progress):
    bandwidth, compute_ms = given.read_bandwidth, args.compute_ms
    if bandwidth is None:
        progress.update("disk", 0, 1)
        bandwidth = disk.measure_bandwidth(model_map, 3.0).bytes_per_second
    if compute_ms is None:
        progress.update("computing", 0, 1)
        compute_ms = measure.compute_ms(args.model, args.data, args.threads)
    return replays.Conditions(given.budgets, bandwidth, compute_ms, given.distances, given.min_precisions,
                              args.capacity)


def _measured(args: argparse.Namespace, given: _Given, evaluation, progress):
    return replace(
        evaluation,
        contexts=measure.measure_contexts(
            args.model, args.data, given.budgets[0], given.contexts, args.decode, args.rounds, progress.update,
            n_threads=args.threads),
        overheads=measure.measure_overheads(
            args.model, args.data,
            [row.predictor for row in evaluation.recalls if row.predictor in predictors().present], 8, progress.update,
            args.threads),
    )


if __name__ == "__main__":
    sys.exit(main())
