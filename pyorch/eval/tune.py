"""Finds the setting that decodes fastest among those that keep what is asked of the accuracy.

Settings are searched (pyorch.eval.search) with a static cache, which judges them reproducibly and in batches, and
by what they would read. Then the best few, and the original, are measured as they decode at the real budget, and
the fastest wins.

The best of many trials is the luckiest, too: its accuracy is a little too good on the questions that chose it. So a
setting has to keep the asked accuracy by two standard errors, and the winner answers held-out questions in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.eval import arc, perplexity
from pyorch.eval.method import (
    ORIGINAL, Method, kernels, lossy_method, n_ubatch, read_buddies, resident_model, simulated, slots, static_model,
)
from pyorch.sidecars.tuned_setting import TunedSetting
from pyorch.eval.search import Goal, Outcome, Search, Trial
from pyorch.eval.speed import Speed, measure_speed, total
from pyorch.library import choices
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.buddies import Buddies
from pyorch.traces.data import read_documents

OnProgress = Callable[[str, int, int], None]  # step, done, total

_KL_TOKENS = 4096  # predicted for a divergence


@dataclass(frozen=True)
class Request:
    """What to tune for. budget: a share of the experts, or a size. n_candidates: settings whose speed is measured,
    by n_rounds of speed_tokens; with 0 tokens what is read decides. held_out: files of questions that the winner answers
    in the end."""

    model: str
    data: tuple[str, ...]
    budget: Budget
    goal: Goal
    metric: str = "acc_norm"
    n_shots: int = 0
    shots_data: str | None = None
    limit: int | None = None
    buddies_file: str | None = None
    max_trials: int = 48
    n_candidates: int = 3
    speed_tokens: int = 256
    n_rounds: int = 2
    n_threads: int | None = None
    load_options: dict[str, object] | None = None
    held_out: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, object]:
        return {**(self.load_options or {}), "n_threads": self.n_threads}


@dataclass(frozen=True)
class Tuning:
    """trials: those that reach the goal first, the one that reads least first. speeds: of the original (None) and
    of the candidates, empty if not measured. best: None if no setting reaches the goal."""

    original: Outcome
    trials: tuple[Trial, ...]
    speeds: dict[Substitution | None, Speed]
    best: Trial | None
    tuned: TunedSetting | None


def tune(request: Request, on_progress: OnProgress) -> Tuning:
    with ModelMap(request.model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{request.model} is a dense model: it has no experts that could be absent")
        info = model_map.info
        budget = request.budget
        n_bytes = budget.resolve(info) if budget.amount is not None else info.slots_bytes
    if n_bytes >= info.slots_bytes:
        raise PyorchError(
            f'budget "{request.budget}" keeps all experts, or depends on the moment: there is nothing to tune'
        )
    rate = n_bytes / info.slots_bytes
    buddies = read_buddies(request.model, request.buddies_file, needed=True)
    scaled = any(layer.has_scales for layer in buddies.layers.values())
    with _judge(request, rate, buddies) as (judge, n_questions):
        search = Search(
            judge, request.goal, info.n_expert_used, request.max_trials,
            lambda done, most: on_progress("search", done, most),
            [weight for weight in choices.substitution("weight") if weight != "fitted" or scaled],
        )
        trials = search.run()
    reached = [trial for trial in trials if trial.reached]
    speeds = (
        _speeds(request, reached[: request.n_candidates], buddies, on_progress)
        if reached and request.speed_tokens
        else {}
    )
    best = None
    if reached:
        best = (
            max(reached[: len(speeds) - 1], key=lambda trial: speeds[trial.substitution].rate) if speeds else reached[0]
        )
    tuned = None
    if best is not None:
        held_out = _held_out(request, rate, buddies, best.substitution, on_progress) if request.held_out else None
        tuned = _tuned(request, rate, n_questions, search.original, best, speeds, held_out)
    return Tuning(search.original, tuple(trials), speeds, best, tuned)


@contextmanager
def _judge(
    request: Request, rate: float, buddies: Buddies
) -> Iterator[tuple[Callable[[Substitution | None], Outcome], int]]:
    """What judges a setting, and the number of questions. The model is loaded once for all trials."""
    n_models = 1 + (request.goal.max_kl is not None)
    options = {**kernels(request.model, n_models), **request.options}
    with ExitStack() as stack:
        model = stack.enter_context(static_model(request.model, **options))
        tasks, texts, reference, originals = [], [], None, []
        if request.goal.min_accuracy is not None:
            tasks = [
                arc.read_task(model, path, request.n_shots, request.shots_data, request.limit) for path in request.data
            ]
        if request.goal.max_kl is not None:
            reference = stack.enter_context(resident_model(request.model, **options))
            texts = perplexity.windows(model, list(read_documents(request.data)), n_tokens=_KL_TOKENS)

        def judge(substitution: Substitution | None) -> Outcome:
            width = n_ubatch(substitution)
            method = ORIGINAL if substitution is None else lossy_method(substitution)
            with simulated(model, method, rate, buddies):
                accuracies = [
                    arc.accuracy(arc.score(model, task, width, n_threads=request.n_threads)) for task in tasks
                ]
                kl = None
                if texts:
                    kl = perplexity.measure(model, texts, reference, width, request.n_threads).kl_divergence
                done = slots(model)
            if not tasks:
                return Outcome(None, kl, done)
            if substitution is None:
                originals[:] = accuracies
            error = arc.difference(accuracies, originals, request.metric).stderr
            return Outcome(_average(accuracies, request.metric), kl, done, error)

        yield judge, sum(len(task.questions) for task in tasks)


def _average(accuracies: Sequence[arc.Accuracy], metric: str) -> float:
    return sum(getattr(accuracy, metric) for accuracy in accuracies) / len(accuracies)


@dataclass(frozen=True)
class _HeldOut:
    n_questions: int
    accuracy: float
    original_accuracy: float
    error: float


def _held_out(
    request: Request, rate: float, buddies: Buddies, best: Substitution, on_progress: OnProgress
) -> _HeldOut:
    found = []
    with static_model(request.model, **request.options) as model:
        tasks = [arc.read_task(model, path, request.n_shots, request.shots_data) for path in request.held_out]
        for done, method in enumerate((ORIGINAL, lossy_method(best))):
            on_progress("held out", done, 2)
            width = n_ubatch(method.substitution)
            with simulated(model, method, rate, buddies):
                found.append([arc.accuracy(arc.score(model, task, width, n_threads=request.n_threads))
                              for task in tasks])
    original, tuned = found
    return _HeldOut(
        sum(len(task.questions) for task in tasks), _average(tuned, request.metric),
        _average(original, request.metric), arc.difference(tuned, original, request.metric).stderr)


def _speeds(
    request: Request, trials: Sequence[Trial], buddies: Buddies, on_progress: OnProgress
) -> dict[Substitution | None, Speed]:
    """In rounds there and back: what drifts in one direction favours none."""
    methods: list[Method] = [ORIGINAL, *(lossy_method(trial.substitution) for trial in trials)]
    order = [method for i in range(request.n_rounds) for method in (methods if i % 2 == 0 else reversed(methods))]
    rounds: dict[Substitution | None, list[Speed]] = {method.substitution: [] for method in methods}
    for done, method in enumerate(order):
        on_progress("speed", done, len(order))
        rounds[method.substitution].append(measure_speed(
            request.model, method, request.budget, buddies, request.data, request.speed_tokens, **request.options,
        ))
    return {substitution: total(them) for substitution, them in rounds.items()}


def _tuned(
    request: Request, rate: float, n_questions: int, original: Outcome, best: Trial,
    speeds: dict[Substitution | None, Speed], held_out: _HeldOut | None,
) -> TunedSetting:
    speed = speeds.get(best.substitution)
    return TunedSetting(
        settings=str(best.substitution),
        budget=str(request.budget),
        cache_rate=rate,
        metric=request.metric,
        n_questions=n_questions,
        accuracy=best.outcome.accuracy,
        original_accuracy=original.accuracy,
        kl_divergence=best.outcome.kl_divergence,
        tokens_per_second=speed.rate if speed is not None else None,
        original_tokens_per_second=speeds[None].rate if speeds else None,
        bytes_read_per_token=speed.bytes_per_token if speed is not None else None,
        n_held_out=held_out.n_questions if held_out is not None else 0,
        held_out_accuracy=held_out.accuracy if held_out is not None else None,
        held_out_original_accuracy=held_out.original_accuracy if held_out is not None else None,
        held_out_error=held_out.error if held_out is not None else None,
    )
