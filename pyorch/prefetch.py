"""How experts are read ahead of their layer while decoding; lossless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyorch.errors import PyorchError

if TYPE_CHECKING:
    from pyorch.engine import Engine
    from pyorch.modelmap import ModelMap

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Prefetch:
    """What guesses the experts of the layers ahead, and which guesses are read.

    predictor: one of pyorch.engine.PREDICTORS, or "auto": quasi-hidden, only while it makes decoding faster.
    distance: layers ahead at most. min_precision: a guess is read if its like came true at least this often,
    counted while running. On a 4 GiB model and a disk of 1 GB/s, distance 2 and precision 0.6 were best
    or next to it at budgets of 25 and 60 %.
    """

    predictor: str = AUTO
    distance: int = 2
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

    def check(self, n_layers: int) -> None:
        """PyorchError for what a model with so many layers with routed experts cannot do."""
        from pyorch.engine import PREDICTORS

        if self.predictor != AUTO and self.predictor not in PREDICTORS:
            raise PyorchError(f'prefetch "{self.predictor}" is not known: use {", ".join((AUTO, *PREDICTORS))}')
        if not 1 <= self.distance <= max(n_layers, 2):
            raise PyorchError(f"prefetch distance {self.distance} is not from 1 to {n_layers}, the layers with experts")
        if not 0 <= self.min_precision <= 1:
            raise PyorchError(f"prefetch precision {self.min_precision:g} is not from 0 to 1")

    def apply(self, engine: Engine, model_map: ModelMap) -> None:
        """Sets it, with the default vectors beside the model if there are any.

        Raises as check() does, and FormatError if that sidecar is damaged or another model's.
        """
        n_layers = len(engine.n_expert)
        self.check(n_layers)
        automatic = self.predictor == AUTO
        predictor = "quasi-hidden" if automatic else self.predictor
        sidecar = model_map.sidecars().get("predictor")
        if predictor == "quasi-hidden" and sidecar is not None:
            from pyorch.default_vectors import DefaultVectors

            DefaultVectors.read(sidecar, model_map).apply(engine)
        engine.set_prefetch(predictor, min(self.distance, n_layers), self.min_precision, automatic)
