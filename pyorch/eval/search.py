"""Searches, by successive halving, the setting that reads least and keeps the accuracy or the predictions.

All settings are tried on an eighth of the questions, the better half of them on as many again, and so on, until an
eighth of the settings has answered all. Settings are ordered by their promise: the experts that a setting need not
read, times the probability that it reaches the goal in the end, estimated from its answers so far.

A setting reads one expert for each slot of a token whose expert is absent and not replaced.
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

_RUNGS = (1, 2, 4, 8)  # parts on which settings have been tried, before half of them is discarded
_LEAST_QUESTIONS = 25  # before a setting may be discarded


@dataclass(frozen=True)
class Outcome:
    """The results of a setting on a share of the questions and text.

    Attributes:
        accuracy: Average over the files. None: not measured.
        original: The original's accuracy on the same questions.
        error: Standard error of the difference between both, question by question.
        kl_divergence: None: not measured.
        kl_error: Standard error of the divergence.
        slots: Expert slots.
        share: Of the questions and text.
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
        """The accuracy minus two standard errors, which chance rarely exceeds."""
        return self.accuracy - 2 * self.error


@dataclass(frozen=True)
class Goal:
    """The share of the original's accuracy to keep beyond chance, and the largest divergence in nats.

    None: no such goal.
    """

    min_accuracy: float | None
    max_kl: float | None

    def reached(self, outcome: Outcome) -> bool:
        """Returns whether the goal is reached, given the results of all questions."""
        least = 0.0 if self.min_accuracy is None else self.min_accuracy * outcome.original_accuracy
        if self.min_accuracy is not None and not outcome.least_accuracy >= least:
            return False
        return self.max_kl is None or outcome.kl_divergence <= self.max_kl

    def chance(self, outcome: Outcome) -> float:
        """Returns the probability that the goal is reached when all questions are answered; 0 or 1 if they are."""
        if outcome.share == 1:
            return float(self.reached(outcome))
        chance, share = 1.0, outcome.share
        if self.min_accuracy is not None:
            # The error shrinks with the root of the share, and known answers cannot change.
            margin = outcome.accuracy - 2 * outcome.error * math.sqrt(share)
            margin -= self.min_accuracy * outcome.original_accuracy
            chance *= _normal(margin, outcome.error * math.sqrt(1 - share))
        if self.max_kl is not None:
            chance *= _normal(self.max_kl - outcome.kl_divergence, outcome.kl_error * math.sqrt(1 - share))
        return chance

    def loss(self, outcome: Outcome) -> float:
        """Returns the loss relative to the allowed one; above 1 the goal is missed."""
        losses = [0.0]
        if self.min_accuracy is not None:
            original = outcome.original_accuracy
            losses.append((original - outcome.least_accuracy) / max((1 - self.min_accuracy) * original, 1e-9))
        if self.max_kl is not None:
            losses.append(outcome.kl_divergence / max(self.max_kl, 1e-9))
        return max(losses)


def _normal(margin: float, error: float) -> float:
    """Returns the probability that a number estimated as `margin`, with an error, is above 0."""
    return statistics.NormalDist(0, error).cdf(margin) if error > 0 else float(margin >= 0)


@dataclass(frozen=True)
class Trial:
    """A setting and its results. reached: it reaches the goal on all questions; False for discarded settings."""

    substitution: Substitution
    outcome: Outcome
    loss: float
    reached: bool


Judging = Callable[["Substitution | None", int, int], Judgement]  # on a range of parts; None: the original
OnTrial = Callable[[int, int], None]  # parts done, total


class Search:
    """Tries settings.

    Args:
        judge: Judges a setting. None is the original, which replaces nothing.
        goal: The goal.
        settings: The settings.
        n_questions: Of all files; 0: only text.
        metric: Of accuracy.
        on_trial: Called before each trial.
    """

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
        """Tries all. Returns first the trials that reach the goal, ordered by their reads, and then the others."""
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
        """The original's results on all questions, after run()."""
        return self._seen[None]

    @property
    def n_parts(self) -> int:
        """The parts that all trials together will compute."""
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
            if n_parts < PARTS and not error >= least:  # equal answers to a few questions are no proof
                error = least
        kl = found.divergence
        outcome = Outcome(
            accuracy, original.average(self._metric), error or 0.0, kl.mean if kl is not None else None,
            kl.stderr if kl is not None else 0.0, found.slots, n_parts / PARTS)
        return Trial(setting, outcome, self._goal.loss(outcome), n_parts == PARTS and self._goal.reached(outcome))

    def _order(self, trial: Trial) -> tuple[float, float]:
        """Returns a sort key: the highest promise first, and without promise the least loss."""
        slots = trial.outcome.slots
        saved = slots.per_token("absent") - slots.read_per_token
        return -self._goal.chance(trial.outcome) * saved, trial.loss


def _reads(trial: Trial) -> float:
    return trial.outcome.slots.read_per_token
