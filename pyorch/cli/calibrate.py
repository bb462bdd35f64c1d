"""`pyorch calibrate`: measure what predictions of experts are made with."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, add_model_options, load_arguments, print_json
from pyorch.cli.progress import Bar
from pyorch.errors import PyorchError


@dataclass(frozen=True)
class Calibration:
    path: Path
    n_tokens: int
    unused: int  # experts that no token selected


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "calibrate", "measure what experts give on average, to predict the next layer's better",
        "pyorch calibrate olmoe.gguf --data prose.txt --tokens 20000",
    )
    add_model_options(parser)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE",
                        help="plain text, or .jsonl: a field text or prompt on each line, or questions as ARC's")
    parser.add_argument("--tokens", type=int, metavar="N", help="read at most N tokens of the data (default: all)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: MODEL.predictor.gguf")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.tokens is not None and args.tokens < 1:
        raise PyorchError(f"--tokens {args.tokens} is less than 1")

    from pyorch import sidecar
    from pyorch.calibration import calibrate
    from pyorch.convert.output import check_target
    from pyorch.default_vectors import KIND
    from pyorch.modelmap import ModelMap

    output = args.output or sidecar.default_path(args.model, KIND)
    check_target(output.absolute())
    options = load_arguments(args)
    with Bar(not args.verbose) as bar:
        vectors = calibrate(args.model, args.data, args.tokens, budget=args.budget, on_progress=bar.update, **options)
    with ModelMap(args.model) as model_map:
        vectors.write(output, model_map)
    done = Calibration(output, vectors.n_tokens, sum(int((counts == 0).sum()) for counts in vectors.counts.values()))
    if args.json:
        print_json(done)
    else:
        print(f"{done.path}: default vectors from {done.n_tokens} tokens; {done.unused} experts were never selected")
    return 0
