"""`pyorch buddies`: finds, from a trace, the experts that can replace each expert."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.options import add_model, add_output_options, answer, check_output
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table

if TYPE_CHECKING:
    from pyorch.convert.buddies import Built

EXAMPLE = "pyorch buddies olmoe.gguf --trace olmoe.trace --coverage 0.95:0.8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " A buddy is an expert that the router often selects together with another one. It can replace the other one "
        "if that is absent, and if the user allows it. "
        "The lists of buddies are written into a file beside the model."
    )
    add_model(parser)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE",
                        help="a trace that pyorch profile recorded")
    parser.add_argument("--coverage", "--alpha", dest="alpha", type=_alphas, default=(0.95,), metavar="SHARE[:SHARE]",
                        help="a list holds the fewest experts that make up this share of the expert's co-activations; "
                             "0.95:0.8 falls evenly from the first layer to the last; more shares are spread evenly "
                             "over the layers (default: 0.95)")
    parser.add_argument("--k-max", type=int, default=16, metavar="K",
                        help="a list holds at most K buddies (default: %(default)s)")
    parser.add_argument("--weighting", choices=("binary", "probability"), default="binary",
                        help="a token that selects two experts counts as 1 (binary), or as the smaller of their "
                             "probabilities (probability) (default: %(default)s)")
    parser.add_argument("--smoothing", type=float, default=1.0, metavar="COUNT",
                        help="add COUNT to the co-activations of every pair of experts (Laplace smoothing; default: "
                             "%(default)g)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="TOKENS",
                        help="weight of the first TOKENS tokens of a request rises evenly to 1 (default: %(default)s)")
    parser.add_argument("--similarity", choices=("coactivation", "output", "both"), default="coactivation",
                        help="similarity of buddies: selected for the same tokens (coactivation), similar outputs "
                             "(output), or the product of both scores (both); the last two need a trace of pyorch "
                             "profile --inputs 512 (default: %(default)s)")
    add_output_options(parser, "MODEL.buddies.gguf beside the model")


def run(args: argparse.Namespace) -> int:
    from pyorch.convert.buddies import Settings, build
    from pyorch.sidecars import container, packs
    from pyorch.traces.file import Trace

    settings = Settings(args.alpha, args.k_max, args.weighting, args.smoothing, args.warm_up, args.similarity)
    path = (args.output or container.default_path(args.model, "buddies")).absolute()
    check_output(path, args.model, [args.trace], force=args.force,
                 is_own=partial(container.is_sidecar_of, kind="buddies"), by_default=args.output is None)
    with packs.open_model(args.model) as model_map:
        with Progress() as progress:
            built = build(model_map, Trace(args.trace), settings, progress.update)
        built.buddies.write(path, model_map)
    return answer(args, {"path": path, "n_tokens": built.buddies.n_tokens, "settings": settings, "sizes": built.sizes},
                  lambda: _parts(path, built))


def _alphas(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(":")))
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is no share such as 0.95, nor several such as 0.95:0.8') from None


def _parts(path: Path, built: Built) -> list[str | Table]:
    rows = []
    for size in built.sizes:
        lengths = [n for n, count in enumerate(size.counts) for _ in range(count)]
        rows.append((
            str(size.il), f"{size.alpha:.3g}", f"{size.n_active}/{len(lengths)}", f"{size.mean:.1f}", str(lengths[0]),
            str(lengths[len(lengths) // 2]), str(lengths[-1]), str(size.capped), f"{size.covered:.0%}",
        ))
    return [
        f"{path}: {len(built.sizes)} layers, by {built.buddies.n_tokens} tokens",
        "",
        Table(("layer", "coverage", "active experts", "mean", "min", "median", "max", "at k-max", "covered"), rows,
              title="buddies of an expert"),
    ]
