"""Gives an engine what settings ask for, with what the sidecars beside the model hold for it."""

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
    """PyorchError for what a model with so many layers with routed experts cannot do. in_replay: it is for one."""
    if prefetch.predictor != AUTO:
        predictors().choose(prefetch.predictor, in_replay, also=(AUTO,))
    if prefetch.distance is not None and not 1 <= prefetch.distance <= n_layers:
        raise PyorchError(f"prefetch distance {prefetch.distance} is not from 1 to {n_layers}, the layers with experts")
    if prefetch.min_precision is not None and not 0 <= prefetch.min_precision <= 1:
        raise PyorchError(f"prefetch precision {prefetch.min_precision:g} is not from 0 to 1")


def best_predictor(file: PredictorFile) -> str:
    """What "auto" is, with what the sidecar holds."""
    return "hybrid" if file.estimator is not None else "quasi-hidden"


def apply_prefetch(prefetch: Prefetch, engine: Engine, sidecars: Sidecars, il: int | None = None) -> None:
    """Sets it for all layers, or for one, which under "auto" gets the predictor that all have.

    Raises as check_prefetch() does; PyorchError where a predictor lacks what it needs; FormatError if a sidecar that it
    names is damaged or another model's.
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
                f"the predictor {predictor} needs an estimator, and {sidecars.map.path} has none beside it: "
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
    """For who named no predictor: a file that is damaged is left out with a line, no bit depends on it."""
    try:
        return sidecars.predictor
    except FormatError as error:
        from pyorch.sidecars.predictor import PredictorFile

        fatal.notice(f"note: {error}; until then experts are foreseen without it")
        return PredictorFile()


def set_uses(engine: Engine, model_map: ModelMap, uses: np.ndarray | None) -> None:
    """Ranks of experts begin with these uses: float64[n_layers, n_expert] of the layers that a decode passes; with
    nothing where None is known."""
    if uses is not None:
        for layer, of_layer in zip(model_map.decoded_layers, uses):
            engine.set_uses(layer.il, of_layer[: layer.n_expert])


def speculative(prefetch: Prefetch, sidecars: Sidecars) -> Prefetch:
    """What is executed in place of the routers' choice (Speculating Experts, section 4): itself, and for "auto"
    hybrid where the model has an estimator, else quasi-hidden.

    Raises PyorchError for a predictor whose forecasts cannot be executed.
    """
    if prefetch.predictor == AUTO:
        return Prefetch(best_predictor(sidecars.predictor), prefetch.distance, prefetch.min_precision)
    prefetch.check_executable()
    return prefetch


def check_substitution(settings: Substitution, il: int, buddies: Buddies | None) -> None:
    """PyorchError for settings that need lists where there are none."""
    if settings.needs_buddies and buddies is None:
        raise PyorchError(f"this lossy setting needs buddy lists in layer {il}: make them with `pyorch buddies`")


def apply_substitution(
    engine: Engine, il: int, substitution: Substitution | None, buddies: Buddies | None, ghosts: Ghosts | None = None
) -> None:
    """Sets what the engine does with absent experts of a layer; None: nothing, it fetches them. ghosts: see
    find_ghosts(). Raises as check_substitution() does."""
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


def find_ghosts(substitution: Substitution | None, sidecars: Sidecars) -> Ghosts | None:
    """The ghosts that a substitution needs: those beside the model.

    Raises FormatError for a sidecar that is damaged or another model's, PyorchError where there is none.
    """
    if substitution is None or not substitution.needs_ghosts or not sidecars.map.layers:
        return None
    if sidecars.ghosts is None:
        raise PyorchError(f"there are no ghosts beside {sidecars.map.path}: make them with `pyorch ghosts`")
    return sidecars.ghosts


def find_buddies(
    substitution: Substitution | None, buddies: Buddies | str | os.PathLike[str] | None, sidecars: Sidecars
) -> Buddies | None:
    """The lists that a substitution needs: those given, or the sidecar's beside the model.

    Raises FormatError for a sidecar that is damaged or another model's, PyorchError where there is none.
    """
    if buddies is None:
        if substitution is None or not substitution.needs_buddies or not sidecars.map.layers:
            return None
        if sidecars.buddies is None and substitution.mode != "buddies":
            raise PyorchError(f"percentiles such as p30 are of the trace in the buddy lists, and there are none beside "
                              f"{sidecars.map.path}: make them with `pyorch buddies`, or give numbers")
        if sidecars.buddies is None:
            raise PyorchError(
                f"there are no buddy lists beside {sidecars.map.path}: make them with `pyorch buddies`, name them with "
                "--buddies-file, or do without them with mode=none, or with heaviest or ghosts"
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
