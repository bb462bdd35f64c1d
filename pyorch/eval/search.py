"""Searches the setting that reads least among those that keep the accuracy, or the predictions: successive halving.

All settings are tried on an eighth of the questions; the better half of them on as many again; and so on, until an
eighth of the settings has answered all. Better is what promises more: the experts that a setting need not read, times
how likely it is that it reaches the goal in the end, by what its answers have shown so far.

What a setting reads for a token is one expert for each slot whose expert is absent and not replaced.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyorch.eval import arc
from pyorch.eval.judge import PARTS, Judgement
from pyorch.eval.method import Slots
from pyorch.settings.substitution import Substitution

_RUNGS = (1, 2, 4, 8)  # parts that settings have been tried on, before a half of them goes
_LEAST_QUESTIONS = 25  # that a setting goes by


@dataclass(frozen=True)
class Outcome:
    """What a setting does, by the share of questions and text that it was tried on.

    accuracy: average over the files, beside the original's on the same questions; None, and kl_divergence None, where
    not measured. error, kl_error: standard errors, of how far the accuracy is from the original's, question by
    question, and of the divergence.
    """

    accuracy: float | None
    original_accuracy: float | None
    error: float
    kl_divergence: float | None
    kl_error: float
    slots: Slots
    share: float = 1.0

    @property
    def least_accuracy(self) -> float:
        """Which it has, but for chance: two standard errors below what was measured."""
        return self.accuracy - 2 * self.error


@dataclass(frozen=True)
class Goal:
    """The asked share of the original's accuracy, which settings have to keep beyond chance, and the most divergence,
    in nats. None: not asked."""

    min_accuracy: float | None
    max_kl: float | None

    def reached(self, outcome: Outcome) -> bool:
        """By all questions."""
        least = 0.0 if self.min_accuracy is None else self.min_accuracy * outcome.original_accuracy
        if self.min_accuracy is not None and not outcome.least_accuracy >= least:
            return False
        return self.max_kl is None or outcome.kl_divergence <= self.max_kl

    def chance(self, outcome: Outcome) -> float:
        """How likely it is that this is reached when all questions are answered. 0 or 1 when they are."""
        if outcome.share == 1:
            return float(self.reached(outcome))
        chance, share = 1.0, outcome.share
        if self.min_accuracy is not None:
            # The error shrinks by the root of the share, and what is known already cannot change.
            margin = outcome.accuracy - 2 * outcome.error * math.sqrt(share)
            margin -= self.min_accuracy * outcome.original_accuracy
            chance *= _normal(margin, outcome.error * math.sqrt(1 - share))
        if self.max_kl is not None:
            chance *= _normal(self.max_kl - outcome.kl_divergence, outcome.kl_error * math.sqrt(1 - share))
        return chance

    def loss(self, outcome: Outcome) -> float:
        """How much of what may be lost is lost; above 1 the goal is missed."""
        losses = [0.0]
        if self.min_accuracy is not None:
            original = outcome.original_accuracy
            losses.append((original - outcome.least_accuracy) / max((1 - self.min_accuracy) * original, 1e-9))
        if self.max_kl is not None:
            losses.append(outcome.kl_divergence / max(self.max_kl, 1e-9))
        return max(losses)


def _normal(margin: float, error: float) -> float:
    """How likely a number is above 0 that is estimated as margin, with an error."""
    return statistics.NormalDist(0, error).cdf(margin) if error > 0 else float(margin >= 0)


@dataclass(frozen=True)
class Trial:
    """reached: the goal, by all questions; no setting that was left behind has."""

    substitution: Substitution
    outcome: Outcome
    loss: float
    reached: bool


Judging = Callable[["Substitution | None", int, int], Judgement]  # on parts from ... to ..., None: the original
OnTrial = Callable[[int, int], None]  # parts done, of all


class Search:
    """Tries settings. judge: what one does, None being the original, which replaces nothing; n_questions: of all files,
    0 where there is only text."""

    def __init__(
        self, judge: Judging, goal: Goal, settings: Sequence[Substitution], n_questions: int, metric: str = "acc_norm",
        on_trial: OnTrial = lambda done, total: None,
    ) -> None:
        self._judge = judge
        self._goal = goal
        self._settings = settings
        self._metric = metric
        self._on_trial = on_trial
        least = _LEAST_QUESTIONS * PARTS if n_questions else 0
        self._rungs = [n for n in _RUNGS if n == PARTS or n * n_questions >= least]
        self._seen: dict[Substitution | None, Judgement] = {}
        self._n_done = 0

    def run(self) -> list[Trial]:
        """All of them, those that reach the goal first, of these the one that reads least first."""
        trials: dict[Substitution, Trial] = {}
        left, before = list(self._settings), 0
        for rung in self._rungs:
            for setting in (None, *left):
                self._try(setting, before, rung)
            for setting in left:
                trials[setting] = self._trial(setting, rung)
            left = sorted(left, key=lambda setting: self._order(trials[setting]))[: math.ceil(len(left) / 2)]
            before = rung
        return sorted(trials.values(), key=lambda trial: (
            not trial.reached, -trial.outcome.share, _reads(trial) if trial.reached else trial.loss))

    @property
    def original(self) -> Judgement:
        """On all questions, after run()."""
        return self._seen[None]

    @property
    def n_parts(self) -> int:
        """That all trials together will compute."""
        n, total, before = len(self._settings), 0, 0
        for rung in self._rungs:
            total += (rung - before) * (n + 1)
            n, before = math.ceil(n / 2), rung
        return total

    def _try(self, setting: Substitution | None, begin: int, end: int) -> None:
        self._on_trial(self._n_done, self.n_parts)
        found = self._judge(setting, begin, end)
        self._seen[setting] = self._seen[setting] + found if setting in self._seen else found
        self._n_done += end - begin

    def _trial(self, setting: Substitution, n_parts: int) -> Trial:
        found, original = self._seen[setting], self._seen[None]
        accuracy = error = None
        if found.accuracies:
            accuracy = found.average(self._metric)
            error = arc.difference(found.accuracies, original.accuracies, self._metric).stderr
            least = 1 / sum(one.n for one in found.accuracies)
            if n_parts < PARTS and not error >= least:  # of a few questions, that all answers are alike is no proof
                error = least
        kl = found.divergence
        outcome = Outcome(
            accuracy, original.average(self._metric), error or 0.0, kl.mean if kl is not None else None,
            kl.stderr if kl is not None else 0.0, found.slots, n_parts / PARTS)
        return Trial(setting, outcome, self._goal.loss(outcome), n_parts == PARTS and self._goal.reached(outcome))

    def _order(self, trial: Trial) -> tuple[float, float]:
        """Ascending: what promises most first; where nothing does, what loses least."""
        slots = trial.outcome.slots
        saved = slots.per_token("absent") - slots.read_per_token
        return -self._goal.chance(trial.outcome) * saved, trial.loss


def _reads(trial: Trial) -> float:
    return trial.outcome.slots.read_per_token
