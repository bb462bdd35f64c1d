"""`pyorch ghosts`: fits estimates of the outputs of absent experts, from a trace."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.options import add_model, add_output_options, answer, check_output
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table
from pyorch.errors import PyorchError
from pyorch.sizes import Amount, format_bytes

if TYPE_CHECKING:
    from pyorch.convert.ghosts import Built

EXAMPLE = "pyorch ghosts olmoe.gguf --trace olmoe.trace --bytes 3%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " A ghost is the mean output of an expert plus a small linear map of the expert's input. It estimates the "
        "output of an absent expert if the user allows it (--lossy ghosts). Ghosts are written into a file beside the "
        "model, and stay in memory."
    )
    add_model(parser)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE",
                        help="a trace that pyorch profile recorded, with --inputs")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--bytes", metavar="SIZE",
                      help="memory for all ghosts: a share of the experts such as 3%%, or a size such as 200MiB; "
                           "experts with more gain get more of it (default: 3%%)")
    size.add_argument("--rank", type=int, metavar="R",
                      help="rows of each expert's map instead; fewer if more would be worse")
    parser.add_argument("--sacred", type=int, default=2, metavar="N",
                        help="fit for sacred=N: ghosts never replace the N heaviest experts of a token (default: "
                             "%(default)s)")
    add_output_options(parser, "MODEL.ghosts.gguf beside the model")


def run(args: argparse.Namespace) -> int:
    from pyorch.convert.ghosts import SHARE, Settings, build
    from pyorch.sidecars import container, packs
    from pyorch.traces.file import Trace

    try:
        n_bytes = SHARE if args.bytes is None else Amount.parse(args.bytes)
    except ValueError:
        raise PyorchError(f'--bytes "{args.bytes}" is not understood: use a share of the experts such as 3%, or a size '
                          "such as 200MiB") from None
    settings = Settings(n_bytes, args.rank, args.sacred)
    path = (args.output or container.default_path(args.model, "ghosts")).absolute()
    check_output(path, args.model, [args.trace], force=args.force,
                 is_own=partial(container.is_sidecar_of, kind="ghosts"), by_default=args.output is None)
    with packs.open_model(args.model) as model_map:
        with Progress() as progress:
            built = build(model_map, Trace(args.trace), settings, progress.update)
        built.ghosts.write(path, model_map)
    return answer(args, {"path": path, "n_inputs": built.ghosts.n_inputs, "sacred": built.ghosts.sacred,
                         "n_bytes": built.ghosts.n_bytes, "expert_bytes": built.expert_bytes, "layers": built.layers},
                  lambda: _parts(path, built))


def _parts(path: Path, built: Built) -> list[str | Table]:
    rows = [(str(layer.il), f"{layer.n_ghosts}/{layer.n_expert}", f"{layer.mean_rank:.1f}", f"{layer.ridge:g}",
             f"{layer.left_by_means:.3f}", f"{layer.left:.3f}") for layer in built.layers]
    n = len(built.layers)
    rows.append(("mean", "", f"{sum(layer.mean_rank for layer in built.layers) / n:.1f}", "",
                 f"{sum(layer.left_by_means for layer in built.layers) / n:.3f}",
                 f"{sum(layer.left for layer in built.layers) / n:.3f}"))
    share = built.ghosts.n_bytes / built.expert_bytes
    return [
        f"{path}: ghosts of {n} layers from {built.ghosts.n_inputs} router inputs, "
        f"{format_bytes(built.ghosts.n_bytes)} in memory, {share:.1%} of the experts",
        "",
        Table(("layer", "ghosts", "mean rank", "ridge", "left by means", "left"), rows,
              title="squared error on inputs that were held out, as a share of the squared output of absent experts"),
    ]
