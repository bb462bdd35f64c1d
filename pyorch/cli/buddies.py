"""`pyorch buddies`: which experts can replace which, from a trace."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.options import add_command, add_model, add_output_options, answer, check_output
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table
from pyorch.errors import PyorchError

if TYPE_CHECKING:
    from pyorch.convert.buddies import Built, Settings


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "buddies", summary,
        "pyorch buddies olmoe.gguf --trace olmoe.trace --similarity both --coverage 0.95",
    )
    parser.description += (
        " A buddy is a similar expert that computes in place of an absent one, where the user allows it. "
        "The list of buddies of each expert is written into a file beside the model."
    )
    add_model(parser)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE",
                        help="a trace that pyorch profile recorded")
    parser.add_argument(
        "--similarity", choices=("coactivation", "output", "both"), default="coactivation",
        help="which experts are similar: those that the router selects for the same tokens (coactivation), those that "
             "compute similar outputs (output), or the product of both scores; the last two need a trace with --inputs "
             "(default: %(default)s)")
    alpha = parser.add_mutually_exclusive_group()
    alpha.add_argument("--coverage", "--alpha", dest="alpha", type=float, default=0.95, metavar="SHARE",
                       help="a list holds the fewest buddies that have this share of the similarity score "
                            "(default: %(default)s)")
    alpha.add_argument("--alpha-schedule", metavar="FIRST:LAST",
                       help="the share changes evenly from the first layer to the last, such as 0.9:0.6")
    parser.add_argument("--k-max", type=int, default=16, metavar="K",
                        help="a list holds at most K buddies (default: %(default)s)")
    parser.add_argument(
        "--weighting", choices=("binary", "probability"), default="binary",
        help="a token that selects two experts adds to their score 1 (binary), or the smaller of their two router "
             "probabilities (default: %(default)s)")
    parser.add_argument("--smoothing", type=float, default=1.0, metavar="COUNT",
                        help="add COUNT to the score of every pair of experts (default: %(default)g)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="TOKENS",
                        help="count the first tokens of a request less: the weight rises evenly to 1 "
                             "(default: %(default)s)")
    parser.add_argument("--compare", action="store_true",
                        help="also compute the outputs of experts, and store how to scale that of a buddy; needs a "
                             "trace with --inputs")
    add_output_options(parser, "MODEL.buddies.gguf beside the model")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.convert.buddies import Settings, build
    from pyorch.sidecars import container, packs
    from pyorch.traces.file import Trace

    settings = Settings(args.similarity, _alphas(args), args.k_max, args.weighting, args.smoothing, args.warm_up)
    path = (args.output or container.default_path(args.model, "buddies")).absolute()
    check_output(path, args.model, [args.trace])
    with packs.open_model(args.model) as model_map:
        with Progress() as progress:
            built = build(model_map, Trace(args.trace), settings, args.compare, progress.update)
        built.buddies.write(path, model_map)
    return answer(args, {"path": path, "n_tokens": built.buddies.n_tokens, "n_inputs": built.n_inputs,
                         "settings": settings, "sizes": built.sizes}, lambda: _parts(path, built, settings))


def _alphas(args: argparse.Namespace) -> tuple[float, float]:
    if args.alpha_schedule is None:
        return args.alpha, args.alpha
    try:
        first, last = map(float, args.alpha_schedule.split(":"))
    except ValueError:
        raise PyorchError(f"--alpha-schedule {args.alpha_schedule} is not two numbers such as 0.9:0.6") from None
    return first, last


def _parts(path: Path, built: Built, settings: Settings) -> list[str | Table]:
    rows = []
    for size in built.sizes:
        lengths = [n for n, count in enumerate(size.counts) for _ in range(count)]
        rows.append((
            str(size.il), f"{size.alpha:.3f}", f"{size.n_active}/{len(lengths)}", f"{size.mean:.1f}", str(lengths[0]),
            str(lengths[len(lengths) // 2]), str(lengths[-1]), str(size.capped), f"{size.covered:.0%}",
        ))
    return [
        f"{path}: {len(built.sizes)} layers by {settings.similarity} in {built.buddies.n_tokens} tokens",
        "",
        Table(("layer", "alpha", "active experts", "mean", "min", "median", "max", "at k-max", "covered"), rows,
              title="buddies of an expert"),
    ]
