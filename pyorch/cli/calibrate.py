"""`pyorch calibrate`: measure what predictions of experts are made with."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, add_model_options, load_arguments, print_json
from pyorch.cli.progress import Bar
from pyorch.errors import PyorchError


@dataclass(frozen=True)
class Calibration:
    """What --json prints. trials: pyorch.eval.calibration.Trial of each distance, of which the chosen one is the best."""

    path: Path
    n_tokens: int
    unused: int  # experts that no token selected
    distance: int | None
    trials: tuple[object, ...]


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

    from pyorch.sidecars import container
    from pyorch.eval.calibration import calibrate
    from pyorch.files import check_target
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars.predictor import KIND, PredictorFile

    output = args.output or container.default_path(args.model, KIND)
    check_target(output.absolute())
    options = load_arguments(args)
    with Bar(not args.verbose) as bar:
        calibrated = calibrate(args.model, args.data, args.tokens, budget=args.budget, on_progress=bar.update, **options)
    vectors = calibrated.default_vectors
    with ModelMap(args.model) as model_map:
        lost = _has_estimator(output, model_map)
        PredictorFile(vectors, distance=calibrated.distance).write(output, model_map)
    unused = sum(int((counts == 0).sum()) for counts in vectors.counts.values())
    done = Calibration(output, vectors.n_tokens, unused, calibrated.distance, calibrated.trials)
    if lost:
        print(f"pyorch: note: {output} held an estimator, which was trained with other default vectors: train it again "
              "with pyorch train-predictor", file=sys.stderr)
    if args.json:
        print_json(done)
    else:
        print(f"{done.path}: default vectors from {done.n_tokens} tokens; {done.unused} experts were never selected")
        print(_distance_sentence(calibrated))
    return 0


def _distance_sentence(it) -> str:
    if it.distance is None:
        return f"how far ahead to read was not tried: {it.why or 'no layer with experts comes after another'}"
    milliseconds = {trial.distance: trial.tpot_ms for trial in it.trials}
    tried = ", ".join(f"{distance} {ms:.2f}" for distance, ms in milliseconds.items() if distance)
    return (f"prefetch distance {it.distance}: ms a token in a replay at a budget of 40 %, by distance: {tried}; "
            f"{milliseconds[0]:.2f} without prefetch")


def _has_estimator(path: Path, model_map) -> bool:
    """Of what is overwritten; it may be of another model, or damaged."""
    from pyorch.errors import FormatError
    from pyorch.sidecars.predictor import PredictorFile

    try:
        return PredictorFile.read(path, model_map).estimator is not None
    except FormatError:
        return False
