"""Searches the setting that reads least among those that keep the accuracy, or the predictions.

Four dials, each from closed (little is substituted) to open (no limit): rho, the most substitutions of a token in
a layer; tau, below which entropy a token is left alone, as a percentile; alpha, how far down the lists buddies
are taken; beta, from which share of absent experts on all are fetched. The search assumes that opening a dial
replaces more and never improves accuracy, which holds but for chance:

1. With all dials open: which weight a buddy gets and in which order absent experts are replaced, by what loses least.
2. Each dial alone: by bisection, the most open position that reaches the goal. Where no dial does, the one that helps
   most is closed and the others are tried with it.
3. From the best of these: a dial as far open as reaches the goal, if need be with another closed by one position;
   again from there while less is read and trials are left.

What a setting reads for a token is one expert for each slot whose expert is absent and not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pyorch.eval.method import Slots
from pyorch.library import choices
from pyorch.settings.substitution import Percentile, Substitution

DIALS = ("rho", "tau", "alpha", "beta")

_TAU_PERCENTS = (90, 80, 70, 60, 50, 40, 30, 20, 10, 5)
_ALPHAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Outcome:
    """What a setting does. accuracy: average over the files; None, and kl_divergence None, where not measured. error: the
    standard error of how far the accuracy is from the original's, question by question."""

    accuracy: float | None
    kl_divergence: float | None
    slots: Slots
    error: float = 0.0

    @property
    def least_accuracy(self) -> float:
        """Which it has, but for chance: two standard errors below what was measured."""
        return self.accuracy - 2 * self.error


@dataclass(frozen=True)
class Goal:
    """The asked share of the original's accuracy, which settings have to keep beyond chance, and the most divergence, in
    nats. None: not asked."""

    min_accuracy: float | None
    max_kl: float | None

    def reached(self, outcome: Outcome, original: Outcome) -> bool:
        if self.min_accuracy is not None and not outcome.least_accuracy >= self.min_accuracy * original.accuracy:
            return False
        return self.max_kl is None or outcome.kl_divergence <= self.max_kl

    def loss(self, outcome: Outcome, original: Outcome) -> float:
        """How much of what may be lost is lost; above 1 the goal is missed. Orders settings that replace alike."""
        losses = [0.0]
        if self.min_accuracy is not None:
            losses.append(
                (original.accuracy - outcome.least_accuracy) / max((1 - self.min_accuracy) * original.accuracy, 1e-9)
            )
        if self.max_kl is not None:
            losses.append(outcome.kl_divergence / max(self.max_kl, 1e-9))
        return max(losses)


@dataclass(frozen=True)
class Trial:
    substitution: Substitution
    outcome: Outcome
    loss: float
    reached: bool


Judge = Callable[["Substitution | None"], Outcome]


class Search:
    """Tries settings, max_trials at most. judge: what a setting does, None being the original, which replaces
    nothing; n_expert_used: experts of a token in a layer; weights: of buddies, that may be tried, None: all."""

    def __init__(
        self,
        judge: Judge,
        goal: Goal,
        n_expert_used: int,
        max_trials: int,
        on_trial: Callable[[int, int], None] = lambda done, total: None,
        weights: Sequence[str] | None = None,
    ) -> None:
        self._judge = judge
        self._goal = goal
        self._max_trials = max_trials
        self._on_trial = on_trial
        self._weights = weights if weights is not None else tuple(choices.substitution("weight"))
        self._trials: dict[Substitution, Trial] = {}
        self._positions = positions(n_expert_used)
        self.original = judge(None)

    def run(self, start: Substitution = Substitution(alpha=1.0)) -> list[Trial]:
        """Returns all trials, those that reach the goal first, of these the one that reads least first."""
        self._search(start)
        return sorted(self._trials.values(), key=lambda trial: (not trial.reached, _reads(trial), trial.loss))

    def _search(self, start: Substitution) -> None:
        start = self._least_loss(replace(start, weight=weight) for weight in self._weights)
        # With all dials open every absent expert is replaced, and the order says little: the lowest weight first, then.
        start = self._least_loss(replace(start, order=order) for order in ("weight", "rank"))
        if self._trials[start].reached:
            return
        best = self._first_reached(start)
        while best is not None:
            best = self._exchange(best)

    def _first_reached(self, setting: Substitution) -> Trial | None:
        """With as few dials closed as possible."""
        left = list(DIALS)
        while left:
            reached = [trial for trial in (self._open(setting, dial) for dial in left) if trial is not None]
            if reached:
                return min(reached, key=_reads)
            closed = {dial: self._set(setting, dial, 0) for dial in left}
            tried = [dial for dial in left if closed[dial] in self._trials]
            if not tried:
                return None
            dial = min(tried, key=lambda dial: self._trials[closed[dial]].loss)
            setting = closed[dial]
            left.remove(dial)
        return None

    def _exchange(self, best: Trial) -> Trial | None:
        """A setting that reaches the goal and reads less: a dial more open than the best, perhaps another closed."""
        closed = [None, *(dial for dial in DIALS if self._position(best.substitution, dial) > 0)]
        for dial in closed:
            narrower = best.substitution
            if dial is not None:
                narrower = self._set(narrower, dial, self._position(narrower, dial) - 1)
            for other in DIALS:
                trial = self._widen(narrower, other) if other != dial else None
                if trial is not None and _reads(trial) < _reads(best):
                    return trial
        return None

    def _least_loss(self, settings: Iterator[Substitution]) -> Substitution:
        """Of settings that differ in how they replace, not in how much."""
        return min((self._try(setting) for setting in settings), key=lambda trial: trial.loss).substitution

    def _open(self, setting: Substitution, dial: str) -> Trial | None:
        """The most open position of the dial that reaches the goal, below the setting's own, which does not."""
        return self._bisect(setting, dial, -1, self._position(setting, dial))

    def _widen(self, setting: Substitution, dial: str) -> Trial | None:
        """The most open position of the dial that reaches the goal, above the setting's own, which does."""
        return self._bisect(setting, dial, self._position(setting, dial), len(self._positions[dial]))

    def _bisect(self, setting: Substitution, dial: str, reached: int, missed: int) -> Trial | None:
        """Between a position that reaches the goal, as is known or taken for granted, and one that misses it."""
        best = None
        while missed - reached > 1 and len(self._trials) < self._max_trials:
            middle = (reached + missed) // 2
            trial = self._try(self._set(setting, dial, middle))
            if trial.reached:
                best, reached = trial, middle
            else:
                missed = middle
        return best

    def _position(self, setting: Substitution, dial: str) -> int:
        return self._positions[dial].index(getattr(setting, dial))

    def _set(self, setting: Substitution, dial: str, position: int) -> Substitution:
        return replace(setting, **{dial: self._positions[dial][position]})

    def _try(self, setting: Substitution) -> Trial:
        if setting not in self._trials:
            self._on_trial(len(self._trials), self._max_trials)
            outcome = self._judge(setting)
            loss = self._goal.loss(outcome, self.original)
            reached = self._goal.reached(outcome, self.original)
            self._trials[setting] = Trial(setting, outcome, loss, reached)
        return self._trials[setting]


def _reads(trial: Trial) -> float:
    return trial.outcome.slots.read_per_token


def positions(n_expert_used: int) -> dict[str, list]:
    """Of each dial, from closed to open. None, the last, is no limit."""
    return {
        "rho": [*range(1, n_expert_used), None],
        "tau": [*(Percentile(float(percent)) for percent in _TAU_PERCENTS), None],
        # 1: all buddies that there are. None would be the lists' own alpha.
        "alpha": [*_ALPHAS, 1.0],
        # Between the shares that one token can have: position i lets i + 1 absent experts pass.
        "beta": [*(round((i + 1.5) / n_expert_used, 3) for i in range(n_expert_used - 1)), None],
    }
