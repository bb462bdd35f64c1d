"""`pyorch train-predictor`: train an estimator of the next layer's experts, from a trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError


@dataclass(frozen=True)
class Report:
    """What --json prints. layers: pyorch.convert.estimator.LayerRecall of each layer that is predicted."""

    path: Path
    n_parameters: int
    n_training: int
    n_held_out: int
    losses: tuple[float, ...]
    best_epoch: int
    layers: tuple[object, ...]


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "train-predictor", summary,
        "pyorch profile olmoe.gguf --data prose.txt --router full --states -o olmoe.trace\n"
        "  pyorch train-predictor olmoe.gguf olmoe.trace",
    )
    parser.description += (
        " The predictor is a small neural network, called estimator. The predictor hybrid uses it in those layers "
        "where it "
        "is better than quasi-hidden."
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="the model, a GGUF file")
    parser.add_argument("trace", type=Path, metavar="FILE.trace",
                        help="a trace that pyorch profile --router full --states recorded")
    parser.add_argument("--val-share", type=float, default=0.1, metavar="S",
                        help="hold out this share of the requests; the recall on them says when to stop (default: "
                             "%(default)s)")
    parser.add_argument("--latent", type=int, default=256, metavar="N",
                        help="width of the network (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N",
                        help="width of the hidden layer in each of its blocks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N",
                        help="pass over the trace at most N times (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, metavar="RATE",
                        help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="seed of the first weights and of the order (default: %(default)s)")
    parser.add_argument("--predictor-file", type=Path, metavar="FILE",
                        help="the file that pyorch calibrate wrote (default: MODEL.predictor.gguf beside the model)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="the file to write (default: the predictor file, to which the estimator is added)")
    parser.add_argument("--verbose", action="store_true", help="show the log of the training")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    import dataclasses

    from pyorch.sidecars import container
    from pyorch.convert.estimator import Settings, check, train
    from pyorch.files import check_target
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars.predictor import KIND, PredictorFile
    from pyorch.traces.file import Trace

    settings = Settings(args.val_share, args.latent, args.hidden, args.epochs, args.lr, args.seed)
    source = args.predictor_file or container.default_path(args.model, KIND)
    output = args.output or source
    check_target(output.absolute())
    trace = Trace(args.trace)
    with ModelMap(args.model) as model_map:
        check(trace, model_map)
        file = PredictorFile.read(source, model_map) if source.exists() else PredictorFile()
        if file.default_vectors is None:
            raise PyorchError(f"{source} has no default vectors, of which an estimator's inputs are made: "
                              "run pyorch calibrate first")
        routers = _routers(args.model, trace.header.layers)
        with Progress(live=not args.verbose) as progress:
            trained = train(trace, model_map, file.default_vectors, routers, settings, args.verbose, progress.update)
        hybrid = {il: False for il in file.default_vectors.vectors}
        hybrid |= {layer.il: layer.hybrid for layer in trained.layers}
        dataclasses.replace(file, estimator=trained.estimator, hybrid=hybrid).write(output, model_map)
    report = Report(output, trained.estimator.n_parameters, trained.n_training, trained.n_held_out, trained.losses,
                    trained.best_epoch, trained.layers)
    if args.json:
        print_json(report)
    else:
        show(_parts(report))
    return 0


def _routers(model: str, layers: tuple[int, ...]) -> dict:
    """Of the layers, as a graph of the model has them; by il."""
    from pyorch.llama.model import load

    with load(model, n_ctx=64, n_batch=64, prefetch="none") as loaded:
        if loaded.engine is None:
            raise PyorchError(
                loaded.note or f"{model}: pyorch does not manage its experts, so it does not see its routers")
        return {il: loaded.engine.router(il) for il in layers}


def _parts(report: Report) -> list[str | Table]:
    n = len(report.layers)
    better = sum(layer.hybrid for layer in report.layers)
    rows = [(str(layer.il), f"{layer.quasi_hidden:.1%}", f"{layer.estimator:.1%}") for layer in report.layers]
    means = (sum(getattr(layer, name) for layer in report.layers) / n for name in ("quasi_hidden", "estimator"))
    rows.append(("mean", *(f"{mean:.1%}" for mean in means)))
    return [
        Table(("layer", "quasi-hidden", "estimator"), rows,
              title=f"recall of both predictors on {report.n_held_out} tokens that were held out"),
        "",
        f"{report.path}: an estimator of {report.n_parameters} parameters, trained on {report.n_training} tokens, as "
        "it was "
        f"after {report.best_epoch} of {len(report.losses) - 1} epochs; hybrid uses it in {better} of {n} layers",
    ]
