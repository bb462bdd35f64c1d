"""How experts are read ahead of their layer while decoding; lossless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyorch.errors import PyorchError

if TYPE_CHECKING:
    from pyorch.runtime.engine import Engine
    from pyorch.runtime.model_map import ModelMap

AUTO, NONE = "auto", "none"

DISTANCE = 2  # where nothing says better

_OF_FILE = ("quasi-hidden", "estimator", "hybrid")  # predictors that are made with the predictor file
_OF_MAPS = ("expert-map", "activation-matrix")  # and with past iterations and requests

# Those that forecast the router's distribution of the next layer.
SPECULATIVE = ("next-router", *_OF_FILE)


@dataclass(frozen=True)
class Prefetch:
    """What guesses the experts of the layers ahead, and which guesses are read.

    predictor: one of pyorch.runtime.engine.PREDICTORS, or "auto", only while it makes decoding faster: hybrid where the model
    has an estimator beside it, else quasi-hidden.
    distance: layers ahead at most; None: as many as `pyorch calibrate` found to pay, or 2. min_precision: a guess is
    read if its like came true at least this often, counted while running. Distance 2 and precision 0.6 were best, or
    next to it, at budgets of 25 and 60 % of the benchmark model on a disk of 1 GB/s:
    `pyorch bench --budget 25%,60% --prefetch none,quasi-hidden:1:0.4,quasi-hidden:2:0.6`.
    """

    predictor: str = AUTO
    distance: int | None = None
    min_precision: float = 0.6

    @classmethod
    def parse(cls, text: str) -> Prefetch:
        """From "auto", "none", or a predictor with, optionally, distance and precision: "next-router:2:0.5"."""
        predictor, *numbers = text.split(":")
        try:
            if len(numbers) > 2:
                raise ValueError(text)
            return cls(predictor, *(kind(number) for kind, number in zip((int, float), numbers)))
        except ValueError:
            raise PyorchError(f'prefetch "{text}" is not a predictor, or PREDICTOR:DISTANCE:PRECISION such as '
                              "next-router:2:0.5") from None

    @property
    def searches_maps(self) -> bool:
        """Whether it searches past iterations or requests, and adds to them."""
        return self.predictor in _OF_MAPS

    def check(self, n_layers: int) -> None:
        """PyorchError for what a model with so many layers with routed experts cannot do."""
        from pyorch.runtime.engine import FORESIGHT, PREDICTORS

        if self.predictor in FORESIGHT["predictor"]:
            raise PyorchError(f'prefetch "{self.predictor}" needs to know the future: only pyorch replay does')
        if self.predictor != AUTO and self.predictor not in PREDICTORS:
            raise PyorchError(f'prefetch "{self.predictor}" is not known: use {", ".join((AUTO, *PREDICTORS))}')
        if self.distance is not None and not 1 <= self.distance <= n_layers:
            raise PyorchError(f"prefetch distance {self.distance} is not from 1 to {n_layers}, the layers with experts")
        if not 0 <= self.min_precision <= 1:
            raise PyorchError(f"prefetch precision {self.min_precision:g} is not from 0 to 1")

    def apply(self, engine: Engine, model_map: ModelMap, il: int | None = None) -> None:
        """Sets it for all layers, or for one, with what the sidecars beside the model hold for it.

        Raises as check() does; PyorchError where a predictor lacks what it needs, and for "auto" where one layer is to
        be set; FormatError if a sidecar is damaged or another model's.
        """
        n_layers = len(engine.n_expert)
        self.check(n_layers)
        if self.predictor == AUTO and il is not None:
            raise PyorchError('prefetch "auto" watches how fast tokens come, so it is for all layers: name a predictor for one')
        predictor = _best_predictor(model_map) if self.predictor == AUTO else self.predictor
        distance = self.distance
        if predictor in _OF_FILE:
            file = _read_file(model_map)
            if predictor != "quasi-hidden" and file.estimator is None:
                raise PyorchError(f"the predictor {predictor} needs an estimator, and {model_map.path} has none beside it: "
                                  "make one with pyorch train-predictor")
            file.apply(engine)
            distance = distance or file.distance
        distance = min(distance or DISTANCE, n_layers)
        if self.searches_maps and engine.maps is None:
            from pyorch.sidecars.history import ExpertMaps

            sidecar = model_map.sidecars().get("maps")
            maps = ExpertMaps.read(sidecar, model_map) if sidecar is not None else ExpertMaps.for_model(model_map, distance=distance)
            engine.set_maps(maps)
        if il is None:
            engine.set_prefetch(predictor, distance, self.min_precision, self.predictor == AUTO)
        else:
            engine.set_layer_prefetch(il, predictor, distance, self.min_precision)

    def speculative(self, model_map: ModelMap) -> Prefetch:
        """What is executed in place of the routers' choice (Speculating Experts, section 4): itself, and for "auto"
        hybrid where the model has an estimator, else quasi-hidden.

        Raises PyorchError for a predictor whose forecasts cannot be executed.
        """
        if self.predictor == AUTO:
            return Prefetch(_best_predictor(model_map), self.distance, self.min_precision)
        if self.predictor not in SPECULATIVE:
            raise PyorchError(f'what "{self.predictor}" predicts has no weights to compute with: '
                              f"speculate with {', '.join(SPECULATIVE)}")
        return self


def _best_predictor(model_map: ModelMap) -> str:
    return "hybrid" if _read_file(model_map).estimator is not None else "quasi-hidden"


def _read_file(model_map: ModelMap):
    """The predictor file beside the model, an empty one where there is none."""
    from pyorch.sidecars.predictor import PredictorFile

    sidecar = model_map.sidecars().get("predictor")
    return PredictorFile.read(sidecar, model_map) if sidecar is not None else PredictorFile()
