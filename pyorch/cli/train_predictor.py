"""`pyorch train-predictor`: trains an estimator of the next layer's experts on text that the model decodes."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.options import add_model_options, add_output_options, add_text_options, answer, check_output
from pyorch.cli.progress import Progress
from pyorch.cli.settings import given_settings
from pyorch.cli.tables import Table
from pyorch.errors import PyorchError
from pyorch.settings.option import CONTEXT

if TYPE_CHECKING:
    from pyorch.convert.estimator import Trained

EXAMPLE = "pyorch train-predictor olmoe.gguf --data prose.txt --tokens 1000000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The estimator is a small neural network. The predictor hybrid uses it in the layers in which it is better "
        "than quasi-hidden."
    )
    add_model_options(parser, CONTEXT)
    add_text_options(parser)
    parser.add_argument("--val-share", type=float, default=0.1, metavar="S",
                        help="hold out this share of the requests; training stops by the recall on them (default: "
                             "%(default)s)")
    parser.add_argument("--latent", type=int, default=128, metavar="N",
                        help="width of the network (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N",
                        help="width of the hidden layer in each of its blocks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N",
                        help="train on each token at most N times (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, metavar="RATE",
                        help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="seed of the first weights and of the order (default: %(default)s)")
    parser.add_argument("--predictor-file", type=Path, metavar="FILE",
                        help="the file that pyorch calibrate wrote (default: MODEL.predictor.gguf beside the model)")
    add_output_options(parser, "the predictor file, to which the estimator is added")


def run(args: argparse.Namespace) -> int:
    from pyorch.convert.estimator import Settings, train
    from pyorch.llama.model import load
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import container
    from pyorch.sidecars.predictor import KIND, PredictorFile
    from pyorch.traces.data import read_documents

    settings = Settings(args.val_share, args.latent, args.hidden, args.epochs, args.lr, args.seed)
    source = args.predictor_file or container.default_path(args.model, KIND)
    output = args.output or source
    check_output(output, args.model, args.data, force=args.force,
                 is_own=partial(container.is_sidecar_of, kind=KIND),
                 by_default=args.output is args.predictor_file is None)
    for _ in read_documents(args.data):
        pass  # refuses a wrong last line now, before hours of training
    with ModelMap(args.model) as model_map:
        file = PredictorFile.read(source, model_map) if source.exists() else PredictorFile()
        if file.default_vectors is None:
            lack = "has no default vectors" if source.exists() else "does not exist, which would have default vectors"
            raise PyorchError(f"{source} {lack}, of which an estimator's inputs are made: run pyorch calibrate first")
    options = given_settings(args) | {"prefetch": "none"}
    sizes = {name: options.pop(name, None) for name in ("n_ctx", "n_ubatch", "n_threads")}
    with (
        Progress(live=not args.verbose) as progress,
        load(args.model, managed=True, n_ctx=256, n_batch=256, n_threads=sizes["n_threads"],
             verbose=args.verbose, **options) as model,
    ):
        if model.engine is None:
            raise PyorchError(
                model.note or f"{args.model}: pyorch does not manage its experts, so it does not see its routers")
        trained = train(model, args.data, file.default_vectors, settings, n_tokens=args.tokens, **sizes,
                        verbose=args.verbose, on_progress=progress.update)
        hybrid = dict.fromkeys(file.default_vectors.vectors, False)
        hybrid |= {layer.il: layer.hybrid for layer in trained.layers}
        dataclasses.replace(file, estimator=trained.estimator, hybrid=hybrid,
                            curve=trained.curve).write(output, model.map)
    return answer(args, {
        "path": output, "n_parameters": trained.estimator.n_parameters, "n_training": trained.n_training,
        "n_held_out": trained.n_held_out, "losses": trained.losses, "best_part": trained.best_part,
        "layers": trained.layers,
    }, lambda: _parts(output, trained))


def _parts(output: Path, trained: Trained) -> list[str | Table]:
    n = len(trained.layers)
    better = sum(layer.hybrid for layer in trained.layers)
    rows = [(str(layer.il), f"{layer.quasi_hidden:.1%}", f"{layer.estimator:.1%}") for layer in trained.layers]
    means = (sum(getattr(layer, name) for layer in trained.layers) / n for name in ("quasi_hidden", "estimator"))
    rows.append(("mean", *(f"{mean:.1%}" for mean in means)))
    return [
        Table(("layer", "quasi-hidden", "estimator"), rows,
              title=f"recall of both predictors on {trained.n_held_out} tokens that were held out"),
        "",
        f"{output}: an estimator of {trained.estimator.n_parameters} parameters, trained on {trained.n_training} "
        f"tokens, as it was after {trained.best_part} of {len(trained.losses) - 1} parts of the training; hybrid uses "
        f"it in {better} of {n} layers",
    ]
