"""Estimators: small networks that predict the experts of the next layer (Speculating Experts, section 6, appendix A).

They are trained by distillation from each layer's quasi-hidden state (of its residual state, its chosen experts and
their default vectors) to the distribution of the next layer's router. The model decodes while the estimator is trained,
in turn: the routers' decisions pass through a pipe and are never on a disk. Held-out requests decide when to stop, and
in which layers the estimator is better than the quasi-hidden state alone (hybrid).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyorch.convert.children import run_estimator
from pyorch.errors import PyorchError
from pyorch.llama.model import Model
from pyorch.sidecars.predictor import DefaultVectors, Estimator
from pyorch.sizes import counted
from pyorch.traces.recorder import RecordStream, trace_header

OnProgress = Callable[[str, int, int], None]  # "training", tokens decoded and steps done, the largest total


@dataclass(frozen=True)
class Settings:
    """The settings of the training.

    Attributes:
        val_share: Share of the requests that are held out.
        n_latent, n_hidden: Widths of the network.
        epochs: How often each token is trained on, at most.
        lr: Peak learning rate.

    Raises:
        PyorchError: A value is invalid.
    """

    val_share: float = 0.1
    n_latent: int = 128
    n_hidden: int = 512
    epochs: int = 2
    lr: float = 4e-3
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
    """The share of a layer's chosen experts among the k most probable of the prediction, on held-out requests."""

    il: int
    quasi_hidden: float
    estimator: float

    @property
    def hybrid(self) -> bool:
        """Whether the estimator is better."""
        return self.estimator > self.quasi_hidden


@dataclass(frozen=True)
class Trained:
    """A trained estimator.

    Attributes:
        n_training, n_held_out: Tokens.
        losses: Mean KL divergence on held-out tokens, before training and after each of its equal parts.
        best_part: The part after which the estimator was taken; 0: before training.
        curve: As in PredictorFile.
    """

    estimator: Estimator
    layers: tuple[LayerRecall, ...]
    n_training: int
    n_held_out: int
    losses: tuple[float, ...]
    best_part: int
    curve: np.ndarray


def train(
    model: Model, data: Sequence[str | os.PathLike[str]], defaults: DefaultVectors, settings: Settings, *,
    n_tokens: int | None = None, n_ctx: int | None = None, n_ubatch: int | None = None, n_threads: int | None = None,
    verbose: bool = False, on_progress: OnProgress | None = None,
) -> Trained:
    """Trains an estimator for a model, on text that the model decodes at the same time.

    The same text, settings and machine give the same weights.

    Args:
        model: The model.
        data, n_tokens, n_ctx, n_ubatch, n_threads: As for pyorch.traces.recorder.profile().
        defaults: The default vectors.
        settings: The settings.
        verbose: Show the log of the training process.
        on_progress: Called with the steps done.

    Raises:
        PyorchError: The model or the text does not suffice for an estimator, or torch is missing.
    """
    header = trace_header(model.map, "full", states=True)
    layers = header.layers
    if len(layers) < 2:
        raise PyorchError(f"{model.map.path} has no layer with experts after another one: there is nothing to predict")
    routers = {il: model.engine.router(il) for il in layers}
    arrays: dict[str, np.ndarray] = {}
    for i, il in enumerate(layers):
        arrays[f"defaults.{i}"] = defaults.vectors[il]
        arrays |= {f"{name}.{i}": array for name, array in routers[il].arrays().items()}
    arrays["eps"] = np.array([routers[il].eps for il in layers])
    arrays |= {name: np.array(value) for name, value in routers[layers[-1]].choice().items() if name != "eps"}
    with RecordStream(model, header, data, n_tokens, n_ctx, n_ubatch, n_threads) as stream:
        held_out = split(len(stream.n_tokens), settings.val_share, settings.seed)
        n_training, n_held_out = (int(stream.n_tokens[chosen].sum()) for chosen in (~held_out, held_out))
        job = {"header": header, "arrays": arrays, "n_training": n_training, **dataclasses.asdict(settings)}

        def feed(send: Callable[[object], None]) -> None:
            # Held-out requests come first, so that every evaluation uses the same tokens.
            for is_held_out, chosen in ((True, held_out), (False, ~held_out)):
                stream.send(chosen, lambda records: send((is_held_out, records)))

        weights, measured = run_estimator(
            job, feed, verbose=verbose, on_progress=on_progress and partial(on_progress, "training"))
    recalls = zip(layers[1:], measured["quasi_hidden"], measured["estimator"])
    return Trained(
        Estimator(**weights), tuple(LayerRecall(*recall) for recall in recalls), n_training, n_held_out,
        tuple(measured["losses"]), measured["best_part"], np.array(measured["curve"], np.float32),
    )


def split(n_requests: int, val_share: float, seed: int) -> np.ndarray:
    """Chooses the held-out requests, bool[n_requests]: at least one, and not all.

    Raises:
        PyorchError: There are fewer than two requests.
    """
    if n_requests < 2:
        raise PyorchError(f"the text makes {counted(n_requests, 'request')}: two are needed, one of them to be held "
                          "out; use more documents, or a smaller --ctx")
    n = min(max(1, round(val_share * n_requests)), n_requests - 1)
    held_out = np.zeros(n_requests, bool)
    held_out[np.random.default_rng(seed).choice(n_requests, n, replace=False)] = True
    return held_out
