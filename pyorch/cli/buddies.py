"""`pyorch buddies`: which experts may stand in for which, from a trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, print_json
from pyorch.errors import PyorchError


@dataclass(frozen=True)
class Report:
    """What --json prints. sizes, agreement: pyorch.convert.buddies.ListSizes and Agreement of each layer."""

    path: Path
    n_tokens: int
    n_inputs: int
    settings: object
    sizes: tuple[object, ...]
    agreement: tuple[object, ...]


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "buddies", "find the experts that may stand in for others, from a trace",
        "pyorch buddies olmoe.gguf --trace olmoe.trace --similarity both --alpha 0.95",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="what pyorch profile recorded")
    parser.add_argument(
        "--similarity", choices=("coactivation", "output", "both"), default="coactivation",
        help="what makes a buddy: to be selected for the same tokens, to compute alike, or the product of both; "
             "the last two need a trace with --inputs (default: %(default)s)")
    alpha = parser.add_mutually_exclusive_group()
    alpha.add_argument("--alpha", type=float, default=0.95, metavar="A",
                       help="a list is the fewest peers that make up this share of the score (default: %(default)s)")
    alpha.add_argument("--alpha-schedule", metavar="A0:A1", help="from A0 in the first layer evenly to A1 in the last")
    parser.add_argument("--k-max", type=int, default=16, metavar="K",
                        help="buddies of an expert at most (default: %(default)s)")
    parser.add_argument(
        "--weighting", choices=("binary", "probability"), default="binary",
        help="a token that selects two experts counts for them as 1, or as the smaller of their probabilities "
             "(default: %(default)s)")
    parser.add_argument("--smoothing", type=float, default=1.0, metavar="E",
                        help="add E to the count of every pair of experts (default: %(default)g)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="W",
                        help="count the first W tokens of a request less, rising evenly (default: %(default)s)")
    parser.add_argument("--compare", action="store_true",
                        help="say whether experts that are selected together compute alike, and store how to scale "
                             "the output of a buddy; needs a trace with --inputs")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: MODEL.buddies.gguf")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.sidecars import container
    from pyorch.cli.progress import Bar
    from pyorch.convert.buddies import Settings, build
    from pyorch.files import check_target
    from pyorch.runtime.model_map import ModelMap
    from pyorch.traces.file import Trace

    settings = Settings(args.similarity, _alphas(args), args.k_max, args.weighting, args.smoothing, args.warm_up)
    path = (args.output or container.default_path(args.model, "buddies")).absolute()
    check_target(path)
    with ModelMap(args.model) as model_map:
        with Bar() as bar:
            built = build(model_map, Trace(args.trace), settings, args.compare, bar.update)
        built.buddies.write(path, model_map)
    report = Report(path, built.buddies.n_tokens, built.n_inputs, settings, built.sizes, built.agreement)
    if args.json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    return 0


def _alphas(args: argparse.Namespace) -> tuple[float, float]:
    if args.alpha_schedule is None:
        return args.alpha, args.alpha
    try:
        first, last = map(float, args.alpha_schedule.split(":"))
    except ValueError:
        raise PyorchError(f"alpha-schedule {args.alpha_schedule} is not two numbers such as 0.9:0.6") from None
    return first, last


def _lines(it: Report) -> list[str]:
    lines = [
        f"{it.path}: {len(it.sizes)} layers by {it.settings.similarity} in {it.n_tokens} tokens",
        "",
        "buddies of an expert",
        "layer  alpha  active     mean  min  median  max   capped  covered",
    ]
    for size in it.sizes:
        lengths = [n for n, count in enumerate(size.counts) for _ in range(count)]
        lines.append(f"{size.il:5}  {size.alpha:5.3f}  {size.n_active:3}/{len(lengths):<3}  {size.mean:7.1f}  "
                     f"{lengths[0]:3}  {lengths[len(lengths) // 2]:6}  {lengths[-1]:3}  {size.capped:7}  "
                     f"{size.covered:7.0%}")
    if it.agreement:
        lines += ["", *_agreement_lines(it)]
    return lines


def _agreement_lines(it: Report) -> list[str]:
    lines = [
        f"outputs on {it.n_inputs} router inputs: co-activation against the cosine of outputs",
        "layer  correlation          cosine of the peer that is           its relative error",
        "       rank    linear       most co-activated  random  best      most co-activated  random  best",
    ]
    names = ("spearman", "pearson", "coactivated_cosine", "random_cosine", "best_cosine", "coactivated_error",
             "random_error", "best_error")
    means = {name: sum(getattr(row, name) for row in it.agreement) / len(it.agreement) for name in names}

    def line(label: object, of: dict[str, float]) -> str:
        return (f"{label:>5}  {of['spearman']:+.3f}  {of['pearson']:+.3f}       "
                f"{of['coactivated_cosine']:+17.3f}  {of['random_cosine']:+.3f}  {of['best_cosine']:+.3f}    "
                f"{of['coactivated_error']:17.2f}  {of['random_error']:6.2f}  {of['best_error']:4.2f}")

    lines += [line(row.il, vars(row)) for row in it.agreement] + [line("mean", means)]
    return lines
