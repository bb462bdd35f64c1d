"""The option --prefetch: which predictor prefetches experts while decoding. Lossless."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.library.choices import Needs, listed, predictors

AUTO, NONE = "auto", "none"

DISTANCE = 2  # without a calibrated distance


@dataclass(frozen=True)
class Prefetch:
    """The predictor of the next layers' experts, and the guesses that are prefetched.

    Attributes:
        predictor: One of pyorch.library.choices.predictors(), "none" or "auto". "auto" takes hybrid if the model has an
            estimator, else quasi-hidden. It predicts only while experts are absent, and stops if a trial shows that
            decoding is faster without.
        distance: Layers ahead at most. None: the distance that `pyorch calibrate` measured, or 2.
        min_precision: Prefetch a guess if similar guesses were right at least this often, counted while running.
            None: if a guess gains more than it costs.
    """

    predictor: str = AUTO
    distance: int | None = None
    min_precision: float | None = None

    @classmethod
    def parse(cls, text: str | Prefetch) -> Prefetch:
        """Parses "auto", "none", or a predictor with optional distance and precision: "quasi-hidden:2:0.5"."""
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
        """Returns the shortest text that parse() reads."""
        if self.min_precision is not None:
            return f"{self.predictor}:{self.distance or DISTANCE}:{self.min_precision:g}"
        return self.predictor if self.distance is None else f"{self.predictor}:{self.distance}"

    @property
    def searches_maps(self) -> bool:
        """Whether the predictor searches a history of iterations or requests, and adds to it."""
        return self.predictor in predictors().needing(Needs.HISTORY)

    def check_executable(self) -> None:
        """Checks that layers can compute with the predictor's forecasts.

        Raises:
            PyorchError: They cannot.
        """
        executable = predictors().executable
        if self.predictor not in (AUTO, *executable):
            raise PyorchError(f'what "{self.predictor}" predicts has no weights to compute with: '
                              f"speculate with {listed(executable)}")
