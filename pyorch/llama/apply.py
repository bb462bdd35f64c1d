"""Applies settings to an engine, with the data of the sidecars next to the model."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from pyorch.errors import FormatError, PyorchError
from pyorch.library import choices
from pyorch.library.choices import Needs, predictors
from pyorch.runtime import fatal
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.prefetch import AUTO, DISTANCE, Prefetch
from pyorch.settings.substitution import OFF, Percentile, Substitution

if TYPE_CHECKING:
    import numpy as np

    from pyorch.sidecars.beside import Sidecars
    from pyorch.sidecars.buddies import Buddies, LayerBuddies
    from pyorch.sidecars.ghosts import Ghosts
    from pyorch.sidecars.predictor import PredictorFile


def check_prefetch(prefetch: Prefetch, n_layers: int, in_replay: bool = False) -> None:
    """Checks a prefetch for a model with n_layers layers with routed experts, or for its replay.

    Raises:
        PyorchError: The predictor is unknown, or the distance or precision is out of range.
    """
    if prefetch.predictor != AUTO:
        predictors().choose(prefetch.predictor, in_replay, also=(AUTO,))
    if prefetch.distance is not None and not 1 <= prefetch.distance <= n_layers:
        raise PyorchError(f"prefetch distance {prefetch.distance} is not from 1 to {n_layers}, the layers with experts")
    if prefetch.min_precision is not None and not 0 <= prefetch.min_precision <= 1:
        raise PyorchError(f"prefetch precision {prefetch.min_precision:g} is not from 0 to 1")


def best_predictor(file: PredictorFile) -> str:
    """Returns the predictor that "auto" uses with this sidecar."""
    return "hybrid" if file.estimator is not None else "quasi-hidden"


def apply_prefetch(prefetch: Prefetch, engine: Engine, sidecars: Sidecars, il: int | None = None) -> None:
    """Sets the prefetch of all layers, or of one. "auto" chooses one predictor for all layers.

    Raises:
        FormatError: A sidecar that the predictor needs is damaged or belongs to another model.
        PyorchError: The predictor is unknown, lacks its sidecar, or a number is out of range.
    """
    n_layers = len(engine.n_expert)
    check_prefetch(prefetch, n_layers)
    file = _usable_predictor(sidecars) if prefetch.predictor == AUTO else None
    predictor = prefetch.predictor if file is None else best_predictor(file)
    distance = prefetch.distance
    choice = predictors()[predictor]
    if (Needs.ESTIMATOR | Needs.DEFAULT_VECTORS) & (choice.needs | choice.uses):
        file = file or sidecars.predictor
        if Needs.ESTIMATOR & choice.needs and file.estimator is None:
            raise PyorchError(
                f"the predictor {predictor} needs an estimator, and {sidecars.map.path} has none next to it: "
                "make one with pyorch train-predictor"
            )
        file.apply(engine)
        distance = distance or file.distance
    distance = min(distance or DISTANCE, n_layers)
    if prefetch.searches_maps and engine.history is None:
        engine.set_history(sidecars.new_maps(distance))
    of = -1 if il is None else il
    engine.set_prefetch(predictor, distance, prefetch.min_precision, prefetch.predictor == AUTO, of)


def _usable_predictor(sidecars: Sidecars) -> PredictorFile:
    """Returns the predictor file for "auto". A damaged file is ignored with a note, because no result depends on it."""
    try:
        return sidecars.predictor
    except FormatError as error:
        from pyorch.sidecars.predictor import PredictorFile

        fatal.notice(f"note: {error}; until then pyorch predicts experts without it")
        return PredictorFile()


def set_uses(engine: Engine, model_map: ModelMap, uses: np.ndarray | None) -> None:
    """Sets the counts with which ranks of experts begin.

    uses: float64[n_layers, n_expert] of the layers that a decode computes, or None: no counts are known.
    """
    if uses is not None:
        for layer, of_layer in zip(model_map.decoded_layers, uses):
            engine.set_uses(layer.il, of_layer[: layer.n_expert])


def speculative(prefetch: Prefetch, sidecars: Sidecars) -> Prefetch:
    """Returns the prefetch whose forecasts replace the routers' choice (Speculating Experts, section 4).

    "auto" becomes hybrid if the model has an estimator, otherwise quasi-hidden.

    Raises:
        PyorchError: Layers cannot compute with the predictor's forecasts.
    """
    if prefetch.predictor == AUTO:
        return Prefetch(best_predictor(sidecars.predictor), prefetch.distance, prefetch.min_precision)
    prefetch.check_executable()
    return prefetch


def check_substitution(settings: Substitution, il: int, buddies: Buddies | None) -> None:
    """Checks that buddy lists exist if the settings need them.

    Raises:
        PyorchError: They are missing.
    """
    if settings.needs_buddies and buddies is None:
        raise PyorchError(f"this lossy setting needs buddy lists in layer {il}: make them with `pyorch buddies`")


def apply_substitution(
    engine: Engine, il: int, substitution: Substitution | None, buddies: Buddies | None, ghosts: Ghosts | None = None
) -> None:
    """Sets an engine's treatment of absent experts in a layer.

    Args:
        engine: The engine.
        il: The layer.
        substitution: The settings. None: load absent experts.
        buddies: The lists that the settings need, if any.
        ghosts: From find_ghosts().

    Raises:
        PyorchError: The settings need buddy lists.
    """
    settings = substitution or OFF
    check_substitution(settings, il, buddies)
    if ghosts is not None:
        ghosts.apply(engine, il)
    layer = buddies.layers[il] if buddies is not None else None
    if settings.mode == "buddies":
        lists = layer.cut(buddies.alpha[il] if settings.alpha is None else settings.alpha, settings.k)
        engine.set_buddies(il, lists.ids, lists.q)
    given = {
        "prefill": settings.prefill, "max_per_token": settings.rho, "max_all_layers": settings.rho_token,
        "seed": settings.seed, "sacred": settings.sacred, "among": settings.among, "beta": settings.beta,
        "bonus": settings.bonus, "max_weight": settings.max_weight, "temperature": settings.temperature,
        "read_budget": settings.read_budget, "eta": settings.eta, "kappa": settings.kappa, "reuse": settings.reuse,
        "tau": _threshold(settings.tau, layer, "tae_percentiles"),
        "gamma": _threshold(settings.gamma, layer, "margin_percentiles"),
        **{field: choices.substitution(name)[getattr(settings, name)].value for field, name in (
            ("mode", "mode"), ("order", "order"), ("on_miss", "miss"))},
    }
    engine.set_substitution(il, {name: value for name, value in given.items() if value is not None})
    if settings.lossy:
        engine.lossy_layers.add(il)
    else:
        engine.lossy_layers.discard(il)


def find_ghosts(substitution: Substitution | None, sidecars: Sidecars) -> Ghosts | None:
    """Returns the ghosts next to the model, if a substitution needs ghosts.

    Raises:
        FormatError: The sidecar is damaged or belongs to another model.
        PyorchError: There is no sidecar.
    """
    if substitution is None or not substitution.needs_ghosts or not sidecars.map.layers:
        return None
    if sidecars.ghosts is None:
        raise PyorchError(f"there are no ghosts next to {sidecars.map.path}: make them with `pyorch ghosts`")
    return sidecars.ghosts


def find_buddies(
    substitution: Substitution | None, buddies: Buddies | str | os.PathLike[str] | None, sidecars: Sidecars
) -> Buddies | None:
    """Returns the given buddy lists, or the sidecar's if the substitution needs lists.

    Raises:
        FormatError: The sidecar is damaged or belongs to another model.
        PyorchError: There is no sidecar.
    """
    if buddies is None:
        if substitution is None or not substitution.needs_buddies or not sidecars.map.layers:
            return None
        if sidecars.buddies is None and substitution.mode != "buddies":
            raise PyorchError("percentiles such as p30 need buddy lists, which store them for their trace, and there "
                              f"are none next to {sidecars.map.path}: make them with `pyorch buddies`, or give numbers")
        if sidecars.buddies is None:
            raise PyorchError(
                f"there are no buddy lists next to {sidecars.map.path}: make them with `pyorch buddies`, name them "
                "with --buddies-file, or use no lists with mode=none, or with heaviest or ghosts"
            )
        return sidecars.buddies
    from pyorch.sidecars.buddies import Buddies  # see pyorch.sidecars.beside

    return buddies if isinstance(buddies, Buddies) else Buddies.read(buddies, sidecars.map)


def _threshold(value: float | Percentile | None, layer: LayerBuddies | None, distribution: str) -> float | None:
    if not isinstance(value, Percentile):
        return value
    percentiles = getattr(layer, distribution)
    low = math.floor(value.percent)
    high = min(low + 1, len(percentiles) - 1)
    return float(percentiles[low] + (value.percent - low) * (percentiles[high] - percentiles[low]))
