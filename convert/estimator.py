"""Estimators: small networks that guess the experts of the next layer (Speculating Experts, section 6, appendix A).

Trained by distillation from a trace: of each layer's quasi-hidden state, which its residual state, the experts that
it chose and their default vectors give, to the distribution of the router of the layer after it. Requests that are
held out say when to stop, and in which layers the estimator is better than the quasi-hidden state alone (hybrid).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

import numpy as np

from pyorch.convert.children import run_estimator
from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.routers import Router
from pyorch.sidecars import container
from pyorch.sidecars.predictor import DefaultVectors, Estimator
from pyorch.traces.file import Trace

OnProgress = Callable[[str, int, int], None]  # "training", steps done, of at most


@dataclass(frozen=True)
class Settings:
    """How an estimator is trained. Raises PyorchError for values that cannot be.

    val_share: of the requests, held out. n_latent, n_hidden: widths of the network. epochs: passes over the trace at
    most. lr: peak learning rate.
    """

    val_share: float = 0.1
    n_latent: int = 256
    n_hidden: int = 1024
    epochs: int = 8
    lr: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_latent", "n_hidden", "epochs"):
            if getattr(self, name) < 1:
                raise PyorchError(f"{name} is {getattr(self, name)}: use 1 or more")
        if not 0 < self.val_share < 1:
            raise PyorchError(f"val_share is {self.val_share:g}: use a share of the requests between 0 and 1")
        if not 0 < self.lr < 1:
            raise PyorchError(f"lr is {self.lr:g}: use a rate between 0 and 1")
        if self.seed < 0:
            raise PyorchError(f"seed is {self.seed}: use 0 or more")


@dataclass(frozen=True)
class LayerRecall:
    """How many of the experts that a layer chose were the k likeliest of the guess, on held-out requests."""

    il: int
    quasi_hidden: float
    estimator: float

    @property
    def hybrid(self) -> bool:
        """Whether the estimator is the better one."""
        return self.estimator > self.quasi_hidden


@dataclass(frozen=True)
class Trained:
    """losses: mean KL divergence on held-out tokens, before training and after each epoch."""

    estimator: Estimator
    layers: tuple[LayerRecall, ...]
    n_training: int
    n_held_out: int
    losses: tuple[float, ...]
    best_epoch: int


def train(
    trace: Trace, model_map: ModelMap, defaults: DefaultVectors, routers: dict[int, Router], settings: Settings,
    verbose: bool = False, on_progress: OnProgress | None = None,
) -> Trained:
    """Trains an estimator for the layers of a trace. The same trace, settings and machine give the same weights.

    Args:
        routers: of the layers, by il: see Engine.router().
        verbose: show the log of the process that trains.

    Raises PyorchError for a trace that says too little or is of another model, or where torch is missing.
    """
    check(trace, model_map)
    layers = trace.header.layers
    training, held_out = split(trace.records["request"], settings.val_share, settings.seed)
    arrays: dict[str, np.ndarray] = {"training": training, "held_out": held_out}
    for i, il in enumerate(layers):
        arrays[f"defaults.{i}"] = defaults.vectors[il]
        arrays |= {f"{name}.{i}": array for name, array in routers[il].arrays().items()}
    arrays["eps"] = np.array([routers[il].eps for il in layers])
    arrays |= {name: np.array(value) for name, value in routers[layers[-1]].choice().items() if name != "eps"}
    with tempfile.TemporaryDirectory(prefix="pyorch-") as directory:
        given, output = Path(directory) / "job.npz", Path(directory) / "weights.npz"
        try:
            np.savez(given, **arrays)
        except OSError as error:  # numpy's of a short write has no reason
            raise PyorchError(
                f"{directory} cannot be written: {error.strerror or 'the disk is full or at its limit'}"
            ) from None
        job = {
            "trace": str(trace.path.absolute()), "arrays": str(given), "output": str(output),
            "n_latent": settings.n_latent, "n_hidden": settings.n_hidden, "epochs": settings.epochs,
            "lr": settings.lr, "seed": settings.seed,
        }
        run_estimator(job, verbose=verbose, on_progress=on_progress and partial(on_progress, "training"))
        measured = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
        with np.load(output) as weights:
            estimator = Estimator(**weights)
    recalls = zip(layers[1:], measured["quasi_hidden"], measured["estimator"])
    return Trained(
        estimator, tuple(LayerRecall(*recall) for recall in recalls), len(training), len(held_out),
        tuple(measured["losses"]), measured["best_epoch"],
    )


def check(trace: Trace, model_map: ModelMap) -> None:
    """Raises PyorchError for a trace that no estimator of this model can be trained with."""
    header = trace.header
    if header.fingerprint != container.fingerprint(model_map):
        raise PyorchError(f"{trace.path} was recorded with another model than {model_map.path}: "
                          "record one with this model")
    if not header.states or header.router != "full":
        raise PyorchError(f"{trace.path} does not have what an estimator learns from: record it with "
                          "pyorch profile --states --router full")
    if len(header.layers) < 2:
        raise PyorchError(f"{model_map.path} has no layer with experts after another one: there is nothing to predict")


def split(requests: np.ndarray, val_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Records for training and records that are held out, int64[n] each, ascending; no request is in both.

    Raises PyorchError for fewer than two requests.
    """
    numbers = np.unique(requests)
    if len(numbers) < 2:
        raise PyorchError(f"the trace holds {len(numbers)} requests: two are needed, one of them to be held out; "
                          "record more documents, or with a smaller --ctx")
    n = min(max(1, round(val_share * len(numbers))), len(numbers) - 1)
    chosen = np.random.default_rng(seed).choice(numbers, n, replace=False)
    held_out = np.isin(requests, chosen)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
