"""Predictors of the small model, whatever each of them needs: nobody trained it."""

from __future__ import annotations

import numpy as np

from pyorch.library.choices import Needs, predictors
from pyorch.llama.model import Model
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.predictor import Estimator

N_EXPERT, N_LAYERS = 64, 8


def any_estimator(n_embd: int) -> Estimator:
    rng, n_latent, n_hidden = np.random.default_rng(0), 8, 12
    shapes = {
        "in_weight": (n_latent, n_embd), "in_bias": (n_latent,), "position": (N_LAYERS - 1, n_latent),
        "up_weight": (n_hidden, n_latent), "up_bias": (n_hidden,), "down_weight": (n_latent, n_hidden),
        "down_bias": (n_latent,), "norm_weight": (n_latent,), "norm_bias": (n_latent,),
        "head_weight": (N_LAYERS - 1, N_EXPERT, n_latent), "head_bias": (N_LAYERS - 1, N_EXPERT),
    }
    return Estimator(**{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def predict(model: Model, predictor: str, distance: int, min_precision: float | None = None) -> None:
    """From now on, by one of pyorch.library.choices.predictors()."""
    if predictor in predictors().needing(Needs.HISTORY):
        model.engine.set_history(ExpertMaps.for_model(model.map))
    if predictor in predictors().needing(Needs.ESTIMATOR):
        model.engine.set_estimator(any_estimator(model.llama.n_embd()).arrays())
        model.engine.set_hybrid([il % 2 for il in range(N_LAYERS)])
    model.engine.set_prefetch(predictor, distance, min_precision)
