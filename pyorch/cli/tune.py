"""`pyorch tune`: finds the fastest lossy setting that keeps the accuracy."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from pyorch.cli.eval import add_question_options, question_arguments
from pyorch.cli.numbers import number, share, whole
from pyorch.cli.options import add_model_options, add_output_options, check_output, check_readable, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import or_help
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.settings.budget import Budget

EXAMPLE = (
    "pyorch tune olmoe.gguf --data train-questions.jsonl --cache-rate 0.5 --min-accuracy 0.95\n"
    '  pyorch run olmoe.gguf --tuned olmoe.tuned.json -p "Once upon a time"'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " All settings answer an eighth of the questions, the better half of them as many again, and so on. Then the "
        "command measures the speed of the best settings, and writes the winner for `pyorch run --tuned`. Because the "
        "best of many settings is also the luckiest, it must keep the accuracy by two standard errors. --held-out asks "
        "the winner other questions at the end."
    )
    add_model_options(parser, defaults={"budget": ""})
    add_question_options(parser)
    parser.add_argument("--cache-rate", type=share, metavar="SHARE",
                        help="tune for a cache with this share of the experts; give this or --budget")
    parser.add_argument("--min-accuracy", type=share, metavar="SHARE",
                        help="the setting must keep this share of the accuracy (default: 0.95, unless --max-kl is "
                             "given)")
    parser.add_argument("--held-out", action="extend", nargs="+", default=[], metavar="FILE.jsonl",
                        help="other questions, which choose no setting; the winner answers all of them at the end, "
                             "whatever --limit is")
    parser.add_argument("--max-kl", type=number(least=0), metavar="NATS",
                        help="the mean KL divergence from the lossless model, on the text of --data, must not be above "
                             "this")
    parser.add_argument("--metric", choices=("acc_norm", "acc"), default="acc_norm",
                        help="accuracy: the answer with the highest likelihood per character (acc_norm), or the "
                             "highest likelihood (acc) counts (default: acc_norm)")
    parser.add_argument("--buddies-file", metavar="FILE",
                        help="lists of buddies (default: MODEL.buddies.gguf beside the model); experts that their "
                             "trace selected most count as resident; without lists, those that a fixed text selects")
    parser.add_argument("--lever", action="append", default=[], dest="levers", metavar="SETTINGS",
                        type=or_help, help="try these settings, with alternatives between bars: heaviest:0.9|1.2 is "
                             "two; may be repeated; help lists all keys (default: omission, cache-aware routing, and "
                             "buddies and ghosts if the model has them)")
    parser.add_argument("--candidates", type=whole(1), default=3, metavar="N",
                        help="measure the speed of the best N settings (default: 3)")
    parser.add_argument("--speed-tokens", type=whole(0), default=256, metavar="N",
                        help="measure speed by decoding N tokens in three alternating rounds; the median counts; "
                             "0: do not measure, choose by bytes read (default: 256)")
    add_output_options(parser, "MODEL.tuned.json beside the model",
                       as_json="print the trials and the setting as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Tunes and writes the setting.

    Raises:
        PyorchError: No setting reaches the goal.
    """
    _check(args)
    check_readable(args.held_out)

    from pyorch.eval.method import share as share_of_experts
    from pyorch.eval.search import Goal
    from pyorch.eval.tune import LEVERS, Request, tune
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import json_file
    from pyorch.sidecars.tuned_setting import KIND, default_path, write_tuned

    output = args.output or default_path(args.model)
    check_output(output, args.model, args.data, force=args.force,
                 is_own=partial(json_file.is_written_for, kind=KIND), by_default=args.output is None)
    min_accuracy = 0.95 if args.min_accuracy is None and args.max_kl is None else args.min_accuracy
    asked = question_arguments(args)
    if args.cache_rate:
        asked["budget"] = Budget.parse(share_of_experts(args.cache_rate))
    request = Request(
        model=args.model,
        goal=Goal(min_accuracy, args.max_kl),
        metric=args.metric,
        buddies_file=args.buddies_file,
        levers=tuple(args.levers) or LEVERS,
        n_candidates=args.candidates,
        speed_tokens=args.speed_tokens,
        held_out=tuple(args.held_out),
        **asked,
    )
    with Progress(live=not args.verbose) as progress:
        progress.update("loading the model", 0, 0)
        tuning = tune(request, progress.update)
    if tuning.tuned is None:
        raise PyorchError(_unreached(tuning, request.goal))
    with ModelMap(args.model) as model_map:
        write_tuned(output, tuning.tuned, model_map)
    if args.json:
        print_json({"output": output, "tuned": tuning.tuned, "trials": _trials(tuning)})
        return 0
    tuned = tuning.tuned
    show([_table(tuning, args.metric), "", f"{output}: {_sentence(tuned)}"])
    if tuned.tokens_per_second is not None and tuned.tokens_per_second < tuned.original_tokens_per_second:
        print("pyorch: note: no setting was faster than lossless decoding here", file=sys.stderr)
    if min_accuracy is not None and _loses_more(tuned, min_accuracy):
        print(f"pyorch: note: of the held-out questions it keeps less than the {min_accuracy:.1%} asked for: tune on "
              "questions as hard as those, or ask for more", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.cache_rate is not None:
        if args.budget not in (None, "auto"):
            raise PyorchError("--cache-rate and --budget both say how many experts are kept: give one of them")
    elif args.budget in (None, "auto"):
        raise PyorchError("nothing says how many experts are kept: give --cache-rate, such as 0.5, or --budget")
    for path in args.held_out:
        if any(os.path.exists(path) and os.path.exists(data) and os.path.samefile(path, data) for data in args.data):
            raise PyorchError(f"--held-out {path} is in --data too: what settings are chosen by is not held out")


def _unreached(tuning, goal) -> str:
    closest = min(tuning.trials, key=lambda trial: trial.loss)
    wanted, got = [], []
    if goal.min_accuracy is not None:
        wanted.append(f"{goal.min_accuracy:.1%} of the accuracy")
        of_original = closest.outcome.original_accuracy
        got.append(f"{closest.outcome.accuracy / of_original:.1%} ±{2 * closest.outcome.error / of_original:.1%}")
    if goal.max_kl is not None:
        wanted.append(f"a KL divergence of {goal.max_kl:g} nats")
        got.append(f"{closest.outcome.kl_divergence:.4g} nats")
    return (f"none of {len(tuning.trials)} settings keeps {' and '.join(wanted)}; the closest, "
            f"{closest.substitution}, keeps {' and '.join(got)}: ask for less, or give it more memory")


def _loses_more(tuned, min_accuracy: float) -> bool:
    """Whether the setting keeps less than that of the accuracy on held-out questions."""
    return bool(tuned.n_held_out) and tuned.held_out_accuracy < min_accuracy * tuned.held_out_original_accuracy


def _sentence(tuned) -> str:
    parts = [f"{tuned.settings} at {tuned.budget}"]
    if tuned.accuracy is not None:
        kept = tuned.accuracy / tuned.original_accuracy
        parts.append(f"{kept:.1%} of the accuracy of {tuned.n_questions} questions")
    if tuned.n_held_out and tuned.held_out_original_accuracy:
        error = tuned.held_out_error / tuned.held_out_original_accuracy
        kept = tuned.held_out_accuracy / tuned.held_out_original_accuracy
        parts.append(f"{kept:.1%} ±{error:.1%} of that of {tuned.n_held_out} held out")
    elif tuned.n_held_out:
        parts.append(f"of {tuned.n_held_out} held out the lossless model answers none rightly")
    if tuned.kl_divergence is not None:
        parts.append(f"KL divergence {tuned.kl_divergence:.4g} nats")
    if tuned.tokens_per_second is not None:
        parts.append(f"{tuned.tokens_per_second:.2f} tok/s, lossless {tuned.original_tokens_per_second:.2f}")
    return ", ".join(parts)


def _trials(tuning) -> list[dict[str, object]]:
    rows = []
    for trial in tuning.trials:
        speed = tuning.speeds.get(trial.substitution)
        rows.append({
            "settings": str(trial.substitution),
            "reached": trial.reached,
            "tried_on": trial.outcome.share,
            "accuracy": trial.outcome.accuracy,
            "original_accuracy": trial.outcome.original_accuracy,
            "error": trial.outcome.error if trial.outcome.accuracy is not None else None,
            "kl_divergence": trial.outcome.kl_divergence,
            "absent_per_token": trial.outcome.slots.per_token("absent"),
            "experts_read_per_token": trial.outcome.slots.read_per_token,
            "tokens_per_second": speed.rate if speed is not None else None,
        })
    return rows


def _table(tuning, metric: str) -> Table:
    """Returns the table without empty columns."""
    titles = ("settings", "tried on", "accuracy", "kept", "KL", "reads/token", "tok/s", "")
    original = tuning.speeds.get(None)
    rows = [("lossless", "100%", _number(tuning.original.average(metric), ".3f"), "", "",
             _number(_absent(tuning), ".1f"), _number(original.rate if original else None, ".2f"), "")]
    for row in _trials(tuning):
        rows.append((
            row["settings"], f"{row['tried_on']:.0%}", _number(row["accuracy"], ".3f"), _kept(row),
            _number(row["kl_divergence"], ".4f"), _number(row["experts_read_per_token"], ".1f"),
            _number(row["tokens_per_second"], ".2f"),
            "" if row["reached"] else "too lossy" if row["tried_on"] == 1 else "left behind",
        ))
    told = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    return Table([titles[i] for i in told], [[row[i] for i in told] for row in rows], left=("settings", ""))


def _kept(row: dict) -> str:
    """Formats the kept accuracy with one standard error, on the same questions."""
    original = row["original_accuracy"]
    return f"{row['accuracy'] / original:.1%} ±{row['error'] / original:.1%}" if original else ""


def _absent(tuning) -> float:
    """Returns the experts that lossless decoding reads for a token with a static cache, counted by other settings."""
    return max(trial.outcome.slots.per_token("absent") for trial in tuning.trials)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
