"""`pyorch eval`: the accuracy and speed of lossy settings."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.numbers import share, whole
from pyorch.cli.options import (
    add_command,
    add_force,
    add_model_options,
    check_output,
    check_own,
    check_readable,
    print_json,
)
from pyorch.cli.progress import Progress
from pyorch.cli.settings import OPTIONS, given_settings, or_help
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError
from pyorch.library.choices import listed, predictors
from pyorch.settings.budget import AUTO
from pyorch.settings.device_options import NONE
from pyorch.settings.kernels import AUTO as AUTO_KERNELS
from pyorch.settings.kernels import REPACKED
from pyorch.settings.option import LOSSY
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.substitution import Substitution
from pyorch.sizes import counted

if TYPE_CHECKING:
    from pyorch.eval.method import Method
    from pyorch.eval.sweep import Row

EXAMPLE = "pyorch eval arc olmoe.gguf --data ARC-Easy-Dev.jsonl --cache-rate 0.5 --lossy coverage=0.95,max_replaced=3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, title="kinds")
    _add_arc(kinds)
    _add_perplexity(kinds)


def _add_arc(kinds: argparse._SubParsersAction) -> None:
    parser = add_command(
        kinds, "arc", "measure the accuracy on multiple-choice questions, and compare lossy settings",
        "pyorch eval arc olmoe.gguf --data ARC-Easy-Dev.jsonl ARC-Challenge-Dev.jsonl --cache-rate 0.75,0.5 \\\n"
        "      --lossy heaviest --lossy coverage=0.95,max_replaced=3 --speed-tokens 256 --plot sweep.png",
    )
    parser.description += (
        " It scores answers as lm-evaluation-harness does for arc_easy and arc_challenge. With --cache-rate, the table "
        "has a row for each cache rate and setting, with accuracy and speed, and a row of the lossless model."
    )
    add_arc_options(parser)
    parser.set_defaults(run=run_arc)


def add_arc_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_question_options(parser)
    sweep = parser.add_argument_group("lossy settings")
    sweep.add_argument("--cache-rate", type=_rates, metavar="SHARE,...",
                       help="keep this share of the experts of every layer in memory, such as 0.75,0.5,0.375")
    sweep.add_argument("--lossy", action="append", default=[], dest="settings", metavar="SETTINGS", type=or_help,
                       help="add a row with these settings, such as heaviest or coverage=0.95,max_replaced=3; help "
                            "lists all keys; may be repeated")
    sweep.add_argument("--speculate", action="append", default=[], metavar="PREDICTOR",
                       help="add a row that computes with predicted experts; PREDICTOR is "
                            f"{listed(predictors().executable)}; PREDICTOR+SETTINGS, such as "
                            "quasi-hidden+mode=none,miss=ghost, treats experts that the router wants and that were not "
                            "predicted as --lossy SETTINGS does; may be repeated")
    sweep.add_argument("--text", action="extend", nargs="+", default=[], metavar="FILE",
                       help="also measure the KL divergence of predictions from the lossless model's, on this text, "
                            "which should not be that of the trace")
    sweep.add_argument("--text-tokens", type=whole(1), default=4000, metavar="N",
                       help="predict at most N tokens of --text (default: 4000)")
    sweep.add_argument("--buddies-file", metavar="FILE",
                       help="lists of buddies (default: MODEL.buddies.gguf beside the model); --cache-rate keeps the "
                            "experts that their trace selected most, and without lists those that a fixed text selects")
    sweep.add_argument("--speed-tokens", type=whole(0), default=256, metavar="N",
                       help="measure speed by decoding N tokens with a real cache, for each row and round; 0: do not "
                            "measure speed (default: 256)")
    sweep.add_argument("--speed-rounds", type=whole(1), default=3, metavar="N",
                       help="measure the speed of each row in N alternating rounds; the median counts (default: 3)")
    parser.add_argument("--metric", choices=("acc_norm", "acc"), default="acc_norm",
                        help="the table shows accuracy where the answer with the highest likelihood per character "
                             "(acc_norm), or the highest likelihood (acc) counts (default: acc_norm)")
    parser.add_argument("--resume", type=Path, metavar="FILE.json",
                        help="store each measurement in this file, and do not repeat those that it holds")
    parser.add_argument("--csv", type=Path, metavar="FILE",
                        help="write the rows into this file, with both metrics and all counters")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw accuracy against speed into this file")
    add_force(parser, "")
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON array")


def add_question_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of questions and how to ask them. `pyorch tune` has them too."""
    parser.add_argument("--data", action="extend", nargs="+", required=True, metavar="FILE.jsonl",
                        help="questions in the layout of ARC")
    parser.add_argument("--shots", type=whole(0), default=0, metavar="N",
                        help="put N examples with their answers before each question (default: 0)")
    parser.add_argument("--shots-data", metavar="FILE.jsonl",
                        help="the examples are the first questions of this file (default: those of --data, which are "
                             "then not asked)")
    parser.add_argument("--limit", type=whole(1), metavar="N",
                        help="ask only the first N questions of each file (default: all)")


def _add_perplexity(kinds: argparse._SubParsersAction) -> None:
    parser = add_command(
        kinds, "perplexity", "perplexity of texts, and KL divergence from the lossless model",
        "pyorch eval perplexity olmoe.gguf --data book.txt --cache-rate 0.5 --lossy coverage=0.95,max_replaced=3",
    )
    add_model_options(parser, LOSSY)
    parser.add_argument("--data", action="extend", nargs="+", required=True, metavar="FILE",
                        help="plain text, or .jsonl with a field text or prompt on each line")
    parser.add_argument("--window", type=whole(1), default=512, metavar="N",
                        help="cut the text into windows of N tokens, each of which is predicted on its own (default: "
                             "512)")
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="predict at most N tokens (default: all)")
    parser.add_argument("--cache-rate", type=share, metavar="SHARE",
                        help="for a lossy setting: keep this share of the experts in memory, alike in all layers")
    parser.add_argument("--compare", metavar="MODEL.gguf",
                        help="measure the KL divergence from this model (default: with a lossy setting, from the model "
                             "itself)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run_perplexity)


def run_arc(args: argparse.Namespace) -> int:
    from pyorch.eval import report

    rows = swept(args, methods_of(args))
    show_rows(args, rows, report.to_json(rows, args.data))
    return 0


def swept(args: argparse.Namespace, methods: Sequence[Method]) -> list[Row]:
    """Returns a row for each cache rate and method.

    Raises:
        PyorchError: The options contradict each other.
    """
    _check_arc(args)

    from pyorch.eval import sweep
    from pyorch.eval.sweep import Record
    from pyorch.pictures import check_plot

    plan = sweep.Plan(
        model=args.model,
        rates=args.cache_rate or (),
        methods=tuple(dict.fromkeys(methods)),
        texts=tuple(args.text),
        n_text_tokens=args.text_tokens,
        buddies_file=args.buddies_file,
        speed_tokens=args.speed_tokens,
        n_rounds=args.speed_rounds,
        **question_arguments(args),
    )
    if args.plot is not None:
        check_plot(args.plot)
        check_own(args.plot, args.model, args.force)
    if args.csv is not None:
        check_output(args.csv, args.model, [*args.data, *args.text, args.resume], force=args.force)
    record = Record(args.resume, sweep.conditions(plan) if args.resume is not None else {})
    with Progress(live=not args.verbose) as progress:
        progress.update("loading the model", 0, 0)
        return sweep.run(plan, record, progress.update)


def show_rows(args: argparse.Namespace, rows: Sequence[Row], objects: Sequence[dict[str, object]]) -> None:
    """Shows rows. objects: the same rows as dictionaries, for JSON and CSV."""
    from pyorch.eval import report
    from pyorch.eval.report import draw
    from pyorch.files import write_text

    if args.csv is not None:
        write_text(args.csv, report.to_csv(objects))
    if args.plot is not None:
        draw(rows, args.metric, args.plot)
    if args.json:
        print_json(objects)
        return
    show([Table(*report.table(rows, args.data, args.metric), left=report.WORDS)])
    print(_footnote(rows, args), file=sys.stderr)


def question_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Returns the values of add_question_options() and add_model_options(), as sweep.Plan takes them."""
    check_readable([*args.data, args.shots_data])
    settings = given_settings(args)
    return {
        "data": tuple(args.data), "n_shots": args.shots, "shots_data": args.shots_data, "limit": args.limit,
        "n_threads": settings.pop("n_threads", None), "budget": settings.pop("budget", AUTO),
        "load_options": settings | {"verbose": args.verbose},
    }


def _rates(text: str) -> tuple[float, ...]:
    """Parses cache rates, and refuses duplicates."""
    return tuple(dict.fromkeys(map(share, text.split(","))))


def methods_of(args: argparse.Namespace) -> list[Method]:
    from pyorch.eval.method import ORIGINAL, lossy_method, speculation

    methods = [ORIGINAL]
    for settings in args.settings:
        substitution = Substitution.parse(settings)
        if not substitution.lossy:
            raise PyorchError(f'--lossy "{settings}" replaces nothing: that is the row original')
        methods.append(lossy_method(substitution))
    return [*methods, *map(speculation, args.speculate)]


def _check_arc(args: argparse.Namespace) -> None:
    if args.cache_rate is None:
        if args.settings or args.speculate:
            raise PyorchError("lossy settings work where experts are absent: give --cache-rate, such as 0.5")
        if args.plot is not None:
            raise PyorchError("a plot of accuracy against throughput needs --cache-rate")
    elif args.budget not in (None, "auto"):
        raise PyorchError("--cache-rate and --budget both say how many experts are kept: give one of them")
    if args.plot is not None and not args.speed_tokens:
        raise PyorchError("a plot of accuracy against throughput needs --speed-tokens")
    check_readable(args.text)


def _footnote(rows, args: argparse.Namespace) -> str:
    accuracies = rows[0].judgement.accuracies
    counts = ", ".join(str(accuracy.n) for accuracy in accuracies)
    error = max(accuracy.stderr(args.metric) for accuracy in accuracies)
    return f"{args.metric} of {counts} questions; standard error of one accuracy up to {error:.3f}"


def run_perplexity(args: argparse.Namespace) -> int:
    settings = given_settings(args)
    substitution = settings.get("substitution")
    if settings.get("speculate") and substitution is None:
        if args.cache_rate is not None:
            raise PyorchError("with --speculate no expert is absent: leave out --cache-rate, or say with --lossy how "
                              "experts are treated that were not predicted")
    elif (args.cache_rate is not None) != (substitution is not None):
        raise PyorchError(
            "--cache-rate makes experts absent and --lossy replaces them: give both, or neither")
    if args.cache_rate is not None and args.budget not in (None, "auto"):
        raise PyorchError("--cache-rate and --budget both say how many experts are kept: give one of them")

    with Progress(live=not args.verbose) as progress:
        progress.update("loading the model", 0, 0)
        result, done, speculated = _perplexity(args, settings, substitution, progress)
    if args.json:
        fields = ("n_tokens", "n_windows", "perplexity", "log_likelihood", "reference_perplexity",
                  "reference_log_likelihood", "kl_divergence", "top1_agreement")
        measured = {name: getattr(result, name) for name in fields}
        print_json(measured | {"substitution": done, "speculation": speculated})
        return 0
    facts = []
    if result.kl_divergence is not None:
        facts.append(("reference", f"perplexity {result.reference_perplexity:.3f}"))
    label = "lossy" if done is not None or speculated is not None else "model"
    facts.append((label, f"perplexity {result.perplexity:.3f} over {result.n_tokens} tokens in "
                         f"{counted(result.n_windows, 'window')}"))
    if result.kl_divergence is not None:
        facts.append(("compared", f"KL divergence {result.kl_divergence:.4g} nats, same top token "
                                  f"{result.top1_agreement:.1%}"))
    if speculated is not None:
        facts.append(("speculated", f"{speculated.slots} expert slots computed as predicted, {speculated.right} of "
                                    "them as their routers chose"))
    if done is not None:
        facts.append(("replaced", f"{done.substituted / result.n_tokens:.2f} expert slots substituted a token, "
                                  f"{done.dropped / result.n_tokens:.2f} dropped, "
                                  f"{done.ghosts / result.n_tokens:.2f} computed by ghosts"))
    show([Facts(facts)])
    return 0


def _perplexity(args: argparse.Namespace, settings: dict[str, Any], substitution, progress):
    """Returns the result, and the statistics of substitution and speculation, or None."""
    from pyorch.eval import method, perplexity
    from pyorch.llama.model import load
    from pyorch.traces.data import read_documents

    documents = list(read_documents(args.data))
    budget = settings.get("budget", AUTO)
    options = {name: value for name, value in settings.items() if OPTIONS[name].group != LOSSY and name != "budget"}
    compared = bool(args.compare or substitution is not None or args.speculate)
    wanted = options.get("kernels", AUTO_KERNELS)
    options |= {"verbose": args.verbose} | method.kernels(args.model, 1 + compared, wanted)
    if "use_extra_bufts" not in options and settings.get("device", NONE) == NONE:
        options.setdefault("kernels", REPACKED)  # the same order as the reference
    with contextlib.ExitStack() as stack:
        if substitution is None:
            model = stack.enter_context(load(args.model, budget=budget, **{**options, "n_ctx": 64}))
        else:
            lossy = method.lossy_method(substitution)
            buddies = method.read_buddies(args.model, settings.get("buddies"), needed=substitution.needs_buddies)
            whole = stack.enter_context(method.static_model(args.model, **options))
            model = stack.enter_context(
                method.simulated(whole, lossy, args.cache_rate, buddies, progress.update))
        reference = None
        if args.speculate:
            model.speculate(settings.get("prefetch", Prefetch()), prompts=True)
        if compared:
            reference = stack.enter_context(method.resident_model(args.compare or args.model, **options))
        texts = perplexity.windows(model, documents, args.window, args.tokens)
        found = perplexity.measure(
            model, texts, reference, method.n_ubatch(substitution, bool(args.speculate)), settings.get("n_threads"),
            partial(progress.update, "tokens"),
        )
        return found, model.stats().substitution, model.stats().speculation
