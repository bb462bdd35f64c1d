"""`pyorch train-predictor`: train an estimator of the next layer's experts, from a trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, print_json
from pyorch.cli.progress import Bar
from pyorch.errors import PyorchError


@dataclass(frozen=True)
class Report:
    """What --json prints. layers: pyorch.convert.estimator.LayerRecall of each layer that is guessed."""

    path: Path
    n_parameters: int
    n_training: int
    n_held_out: int
    losses: tuple[float, ...]
    best_epoch: int
    layers: tuple[object, ...]


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "train-predictor", "train an estimator of the next layer's experts, from a trace",
        "pyorch profile olmoe.gguf --data prose.txt --router full --states -o olmoe.trace\n"
        "  pyorch train-predictor olmoe.gguf olmoe.trace",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("trace", type=Path, metavar="FILE.trace", help="recorded with --router full --states")
    parser.add_argument("--val-share", type=float, default=0.1, metavar="S",
                        help="hold out this share of the requests, to know when to stop (default: %(default)s)")
    parser.add_argument("--latent", type=int, default=256, metavar="N",
                        help="width of the network (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N",
                        help="width inside its MLP (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N",
                        help="passes over the trace at most (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, metavar="RATE",
                        help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    parser.add_argument("--predictor-file", type=Path, metavar="FILE",
                        help="what pyorch calibrate wrote (default: MODEL.predictor.gguf)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="default: the predictor file, to which the estimator is added")
    parser.add_argument("--verbose", action="store_true", help="show the log of the training")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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
        with Bar(not args.verbose) as bar:
            trained = train(trace, model_map, file.default_vectors, routers, settings, args.verbose, bar.update)
        hybrid = {il: False for il in file.default_vectors.vectors} | {it.il: it.hybrid for it in trained.layers}
        dataclasses.replace(file, estimator=trained.estimator, hybrid=hybrid).write(output, model_map)
    report = Report(output, trained.estimator.n_parameters, trained.n_training, trained.n_held_out, trained.losses,
                    trained.best_epoch, trained.layers)
    if args.json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    return 0


def _routers(model: str, layers: tuple[int, ...]) -> dict:
    """Of the layers, as a graph of the model has them; by il."""
    from pyorch.llama.model import load

    with load(model, n_ctx=64, n_batch=64, prefetch="none") as loaded:
        if loaded.engine is None:
            raise PyorchError(loaded.note or f"{model}: nothing manages its experts, so its routers are not seen")
        return {il: loaded.engine.router(il) for il in layers}


def _lines(it: Report) -> list[str]:
    n = len(it.layers)
    better = sum(layer.hybrid for layer in it.layers)
    lines = ["layer  quasi-hidden  estimator"]
    lines += [f"{layer.il:5}  {layer.quasi_hidden:12.1%}  {layer.estimator:9.1%}" for layer in it.layers]
    means = (sum(getattr(layer, name) for layer in it.layers) / n for name in ("quasi_hidden", "estimator"))
    lines.append(" mean  {:12.1%}  {:9.1%}".format(*means))
    lines.append(f"{it.path}: an estimator of {it.n_parameters} parameters from {it.n_training} tokens, as it was "
                 f"after {it.best_epoch} of {len(it.losses) - 1} epochs; recall on {it.n_held_out} tokens that were held "
                 f"out; hybrid takes it for {better} of {n} layers")
    return lines
