"""`pyorch calibrate`: measures the mean outputs of experts, which predictors need."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from pyorch.cli.options import (
    add_minutes_option,
    add_model_options,
    add_output_options,
    add_text_options,
    answer,
    check_output,
    note_cut_short,
    seconds_for_text,
)
from pyorch.cli.progress import Progress
from pyorch.cli.settings import given_settings
from pyorch.errors import FormatError, one_line

EXAMPLE = "pyorch calibrate olmoe.gguf --data prose.txt --tokens 20000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The predictors quasi-hidden and hybrid use these means (default vectors). The command also measures the best "
        "prefetch distance."
    )
    add_model_options(parser, without=("prefetch", "device_ahead"))  # it tries all distances itself
    add_text_options(parser)
    add_minutes_option(parser)
    add_output_options(parser, "MODEL.predictor.gguf beside the model")


def run(args: argparse.Namespace) -> int:
    from pyorch.eval.calibration import calibrate
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import container
    from pyorch.sidecars.predictor import KIND, PredictorFile

    output = args.output or container.default_path(args.model, KIND)
    check_output(output, args.model, args.data, force=args.force,
                 is_own=partial(container.is_sidecar_of, kind=KIND), by_default=args.output is None)
    with Progress(live=not args.verbose) as progress:
        calibrated = calibrate(
            args.model, args.data, args.tokens, on_progress=progress.update, verbose=args.verbose,
            seconds=seconds_for_text(args), **given_settings(args))
    if calibrated.cut_short:
        note_cut_short(args)
    vectors = calibrated.default_vectors
    with ModelMap(args.model) as model_map:
        lost = _has_estimator(output, model_map)
        PredictorFile(vectors, distance=calibrated.distance, compute_ms=calibrated.compute_ms).write(output, model_map)
    unused = sum(int((counts == 0).sum()) for counts in vectors.counts.values())
    if lost:
        print(f"pyorch: note: {one_line(str(output))} held an estimator that was trained with other default vectors: "
              "train a new one with pyorch train-predictor", file=sys.stderr)
    # unused: experts that no token selected. compute_ms: time of a decoded token without waits for experts. trials: the
    # result of each distance; the best one is chosen.
    return answer(args, {
        "path": output, "n_tokens": vectors.n_tokens, "compute_ms": calibrated.compute_ms, "unused": unused,
        "distance": calibrated.distance, "trials": calibrated.trials,
    }, lambda: [
        f"{output}: default vectors from {vectors.n_tokens} tokens; no token selected {unused} of the experts",
        _distance_sentence(calibrated),
        f"computing takes {calibrated.compute_ms:.3g} ms a token here, which replays go by",
    ])


def _distance_sentence(calibrated) -> str:
    if calibrated.distance is None:
        why = calibrated.why or "no layer with experts comes after another"
        return f"how many layers ahead to read was not tried: {why}"
    milliseconds = {trial.distance: trial.tpot_ms for trial in calibrated.trials}
    tried = ", ".join(f"{distance}: {ms:.2f}" for distance, ms in milliseconds.items() if distance)
    return (f"prefetch distance {calibrated.distance}; milliseconds a token in a replay at a budget of 40 %, by "
            f"distance: {tried}; without prefetch: {milliseconds[0]:.2f}")


def _has_estimator(path: Path, model_map) -> bool:
    """Whether the file to overwrite has an estimator. The file may belong to another model, or be damaged."""
    from pyorch.sidecars.predictor import PredictorFile

    try:
        return PredictorFile.read(path, model_map).estimator is not None
    except FormatError:
        return False
