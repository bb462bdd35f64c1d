"""How experts are read ahead of their layer while decoding; lossless."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.library.choices import Needs, listed, predictors

AUTO, NONE = "auto", "none"

DISTANCE = 2  # where nothing says better


@dataclass(frozen=True)
class Prefetch:
    """What predicts the experts of the layers ahead, and which guesses are read.

    predictor: one of pyorch.library.choices.predictors(), or "auto": hybrid where the model has an estimator beside it,
    else quasi-hidden, while experts are absent, unless a trial tells that decoding is sooner without.
    distance: layers ahead at most; None: as many as `pyorch calibrate` found to pay, or 2. min_precision: a guess is
    read if its like came true at least this often, counted while running; None: if it gains more than it costs.
    """

    predictor: str = AUTO
    distance: int | None = None
    min_precision: float | None = None

    @classmethod
    def parse(cls, text: str | Prefetch) -> Prefetch:
        """From "auto", "none", or a predictor with, optionally, distance and precision: "quasi-hidden:2:0.5"."""
        if isinstance(text, Prefetch):
            return text
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
        predictor, *numbers = text.split(":")
        try:
            if len(numbers) > 2:
                raise ValueError(text)
            return cls(predictor, *(kind(number) for kind, number in zip((int, float), numbers)))
        except ValueError:
            raise PyorchError(f'prefetch "{text}" is not a predictor, or PREDICTOR:DISTANCE:PRECISION such as '
                              "quasi-hidden:2:0.5") from None

    def __str__(self) -> str:
        """What parse() reads, as short as may be."""
        if self.min_precision is not None:
            return f"{self.predictor}:{self.distance or DISTANCE}:{self.min_precision:g}"
        return self.predictor if self.distance is None else f"{self.predictor}:{self.distance}"

    @property
    def searches_maps(self) -> bool:
        """Whether it searches past iterations or requests, and adds to them."""
        return self.predictor in predictors().needing(Needs.HISTORY)

    def check_executable(self) -> None:
        """PyorchError for a predictor whose forecasts layers cannot compute with."""
        executable = predictors().executable
        if self.predictor not in (AUTO, *executable):
            raise PyorchError(f'what "{self.predictor}" predicts has no weights to compute with: '
                              f"speculate with {listed(executable)}")
