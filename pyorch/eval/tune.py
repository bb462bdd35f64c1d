"""Finds the setting that decodes fastest among those that keep what is asked of the accuracy.

Settings are searched (pyorch.eval.search) with a static cache, which judges them reproducibly and in batches, and
by what they would read. Then the best few, and the original, are measured as they decode at the real budget, and
the fastest wins.

The best of many trials is the luckiest, too: its accuracy is a little too good on the questions that chose it. So a
setting has to keep the asked accuracy by two standard errors, and the winner answers held-out questions in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyorch.errors import PyorchError
from pyorch.eval import arc, levers, perplexity
from pyorch.eval.method import ORIGINAL, Method, lossy_method, n_ubatch, read_buddies, simulated, slots, static_model
from pyorch.eval.search import PARTS, Evidence, Goal, Judge, Search, Trial
from pyorch.eval.speed import Speed, measure_speed, median
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.buddies import Buddies
from pyorch.sidecars.tuned_setting import TunedSetting
from pyorch.traces.data import read_documents

OnProgress = Callable[[str, int, int], None]  # step, done, total

_KL_TOKENS = 4096  # predicted for a divergence


@dataclass(frozen=True)
class Request:
    """What to tune for. budget: a share of the experts, or a size. levers: see pyorch.eval.levers. n_candidates:
    settings whose speed is measured, the median of n_rounds of speed_tokens; with 0 tokens what is read decides.
    held_out: files of questions that the winner answers in the end."""

    model: str
    data: tuple[str, ...]
    budget: Budget
    goal: Goal
    metric: str = "acc_norm"
    n_shots: int = 0
    shots_data: str | None = None
    limit: int | None = None
    buddies_file: str | None = None
    levers: tuple[str, ...] = levers.LEVERS
    n_candidates: int = 3
    speed_tokens: int = 256
    n_rounds: int = 3
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

    original: Evidence
    trials: tuple[Trial, ...]
    speeds: dict[Substitution | None, Speed]
    best: Trial | None
    tuned: TunedSetting | None


def tune(request: Request, on_progress: OnProgress) -> Tuning:
    with ModelMap(request.model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{request.model} is a dense model: it has no experts that could be absent")
        info = model_map.info
        has_ghosts = "ghosts" in model_map.sidecars()
        budget = request.budget
        n_bytes = budget.resolve(info) if budget.amount is not None else info.slots_bytes
    if n_bytes >= info.slots_bytes:
        raise PyorchError(
            f'budget "{request.budget}" keeps all experts, or depends on the moment: there is nothing to tune'
        )
    rate = n_bytes / info.slots_bytes
    buddies = read_buddies(request.model, request.buddies_file, needed=True)
    with _judge(request, rate, buddies) as (judge, n_questions):
        search = Search(judge, request.goal, _settings(request, buddies, has_ghosts), n_questions, request.metric,
                        partial(on_progress, "search"))
        trials = search.run()
    if request.goal.min_accuracy is not None and not search.original.accuracy(request.metric):
        raise PyorchError(f"the lossless model answers none of {n_questions} questions rightly: there is no accuracy "
                          "to keep")
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
        tuned = _tuned(request, rate, n_questions, best, speeds, held_out)
    return Tuning(search.original, tuple(trials), speeds, best, tuned)


def _settings(request: Request, buddies: Buddies, has_ghosts: bool) -> list[Substitution]:
    """What can be tried with the files that there are: without scales, weights cannot be fitted."""
    scaled = any(layer.has_scales for layer in buddies.layers.values())
    asked = levers.settings(request.levers)
    possible = [setting for setting in asked
                if (setting.weight != "fitted" or scaled) and (not setting.needs_ghosts or has_ghosts)]
    if not possible:
        if asked[0].needs_ghosts:
            raise PyorchError(f"there are no ghosts beside {request.model}: make them with `pyorch ghosts`")
        raise PyorchError("weight=fitted needs lists of buddies with scales: make them with `pyorch buddies --compare`")
    return possible


@contextmanager
def _judge(request: Request, rate: float, buddies: Buddies) -> Iterator[tuple[Judge, int]]:
    """What judges a setting, and the number of questions. The model is loaded once for all trials."""
    with ExitStack() as stack:
        model = stack.enter_context(static_model(request.model, **request.options))
        tasks, texts = [], []
        if request.goal.min_accuracy is not None:
            tasks = [_shuffled(task) for task in _tasks(model, request, request.data, request.limit)]
        _tasks(model, request, request.held_out)  # else a long search would end in a mistake in them
        if request.goal.max_kl is not None:
            texts = perplexity.windows(model, list(read_documents(request.data)), n_tokens=_KL_TOKENS)
        references: dict[tuple[int, int, int], perplexity.Reference] = {}

        def judge(substitution: Substitution | None, begin: int, end: int) -> Evidence:
            width = n_ubatch(substitution)
            windows = _parts(texts, begin, end)
            key = begin, end, width
            if windows and key not in references:
                references[key] = stack.enter_context(
                    closing(perplexity.Reference(model, windows, width, request.n_threads)))
            method = ORIGINAL if substitution is None else lossy_method(substitution)
            with simulated(model, method, rate, buddies):
                accuracies = tuple(
                    arc.accuracy(arc.score(model, part, width, n_threads=request.n_threads))
                    for part in (_part(task, begin, end) for task in tasks)
                )
                divergence = references[key].divergence(model) if windows else None
                return Evidence(accuracies, divergence, slots(model))

        yield judge, sum(len(task.questions) for task in tasks)


def _tasks(model: Model, request: Request, paths: Sequence[str], limit: int | None = None) -> list[arc.Task]:
    """PyorchError for a file of a single question: how far two accuracies are apart would have no standard error."""
    tasks = [arc.read_task(model, path, request.n_shots, request.shots_data, limit) for path in paths]
    for task in tasks:
        if len(task.questions) < 2:
            raise PyorchError(f"{task.path}: a single question cannot tell what a setting costs: give some hundred")
    return tasks


def _shuffled(task: arc.Task) -> arc.Task:
    """Always alike. A file may have questions of one kind after those of another."""
    order = np.random.default_rng(0).permutation(len(task.questions))
    return arc.Task(task.path, tuple(task.questions[i] for i in order), tuple(task.prompts[i] for i in order))


def _part(task: arc.Task, begin: int, end: int) -> arc.Task:
    return arc.Task(task.path, _parts(task.questions, begin, end), _parts(task.prompts, begin, end))


def _parts(items: Sequence, begin: int, end: int) -> Sequence:
    """Of PARTS, of which the first is not empty."""
    return items[math.ceil(len(items) * begin / PARTS) : math.ceil(len(items) * end / PARTS)]


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
        tasks = _tasks(model, request, request.held_out)
        for done, method in enumerate((ORIGINAL, lossy_method(best))):
            on_progress("held out", done, 2)
            width = n_ubatch(method.substitution)
            with simulated(model, method, rate, buddies):
                found.append([arc.accuracy(arc.score(model, task, width, n_threads=request.n_threads))
                              for task in tasks])
    original, tuned = found
    return _HeldOut(
        sum(len(task.questions) for task in tasks), arc.average(tuned, request.metric),
        arc.average(original, request.metric), arc.difference(tuned, original, request.metric).stderr)


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
    return {substitution: median(them) for substitution, them in rounds.items()}


def _tuned(
    request: Request, rate: float, n_questions: int, best: Trial,
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
        original_accuracy=best.outcome.original_accuracy,
        kl_divergence=best.outcome.kl_divergence,
        tokens_per_second=speed.rate if speed is not None else None,
        original_tokens_per_second=speeds[None].rate if speeds else None,
        bytes_read_per_token=speed.bytes_per_token if speed is not None else None,
        n_held_out=held_out.n_questions if held_out is not None else 0,
        held_out_accuracy=held_out.accuracy if held_out is not None else None,
        held_out_original_accuracy=held_out.original_accuracy if held_out is not None else None,
        held_out_error=held_out.error if held_out is not None else None,
    )
