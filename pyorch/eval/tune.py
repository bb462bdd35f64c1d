"""Finds the setting that decodes fastest among those that keep the required accuracy.

Settings are searched (pyorch.eval.search) with a static cache, which judges them reproducibly and in batches, by their
reads. Then the best few, and the original, are measured while decoding at the real budget, and the fastest wins.

The best of many trials is also the luckiest: its accuracy is a little too good on the questions that selected it. So a
setting has to keep the accuracy by two standard errors (Goal in pyorch.eval.search), and the winner answers held-out
questions in the end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from pyorch.errors import PyorchError
from pyorch.eval import arc
from pyorch.eval.judge import Judge, Judgement, OnProgress, Questions, in_turns, shuffled
from pyorch.eval.method import ORIGINAL, Method, lossy_method, read_buddies, static_model
from pyorch.eval.search import Goal, Search, Trial
from pyorch.eval.speed import Speed, measure_speed, median
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.buddies import Buddies
from pyorch.sidecars.tuned_setting import TunedSetting

_KL_TOKENS = 4096  # predicted for a divergence

# All omit the least important experts of a token first. Settings that look at several tokens at once are excluded: they
# would have to be judged token by token.
LEVERS = (
    "mode=none,miss=drop,order=weight",
    "heaviest:0.6|0.75|0.9|1.2|1.5|2",
    "mode=none,miss=drop,order=weight,sacred=1|2|3,min_entropy=p50|p30",
    "heaviest,max_replaced=1|2",
    "ghosts:0.9|1.2|1.5",
    "buddies:0.9|1.5",
    "mode=cache,order=weight,sacred=1,max_weight=0.9|1.5,among=12",
    "mode=cache,order=weight,sacred=1,max_weight=0.9,bonus=0.5|1|2",
)

MOST = 512  # settings


@dataclass(frozen=True, kw_only=True)
class Request(Questions):
    """The request to tune.

    Attributes:
        goal: The accuracy to keep.
        budget: A share of the experts, or a size.
        levers: See settings_of().
        n_candidates: Settings whose speed is measured.
        speed_tokens: Of each round. 0: reads decide instead of speed.
        n_rounds: Of each speed; the median counts.
        held_out: Files of questions that the winner answers in the end.
    """

    goal: Goal
    metric: str = "acc_norm"
    levers: tuple[str, ...] = LEVERS
    n_candidates: int = 3
    speed_tokens: int = 256
    n_rounds: int = 3
    held_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """The result of tuning.

    Attributes:
        trials: First those that reach the goal, ordered by their reads.
        speeds: Of the original (None) and of the candidates; empty if not measured.
        best: None if no setting reaches the goal.
    """

    original: Judgement
    trials: tuple[Trial, ...]
    speeds: dict[Substitution | None, Speed]
    best: Trial | None
    tuned: TunedSetting | None


def tune(request: Request, on_progress: OnProgress) -> Tuning:
    with ModelMap(request.model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{request.model} is a dense model: it has no experts that could be absent")
        model_map.check_text()
        info = model_map.info
        beside = model_map.sidecars()
        budget = request.budget
        n_bytes = budget.resolve(info) if budget.amount is not None else info.slots_bytes
    if n_bytes >= info.slots_bytes:
        raise PyorchError(
            f'budget "{request.budget}" keeps all experts, or depends on the moment: there is nothing to tune'
        )
    rate = n_bytes / info.slots_bytes
    settings = _settings(request, "ghosts" in beside, request.buddies_file is not None or "buddies" in beside)
    buddies = read_buddies(request.model, request.buddies_file, needed=False)
    with static_model(request.model, **request.options) as model:
        tasks = [shuffled(task) for task in _tasks(model, request)] if request.goal.min_accuracy is not None else []
        n_questions = sum(len(task.questions) for task in tasks)
        _tasks(model, _others(request))  # reports a mistake in them before a long search
        texts = request.data if request.goal.max_kl is not None else ()
        with Judge(model, tasks, texts, _KL_TOKENS, request.n_threads) as judging:

            def judge(setting: Substitution | None, begin: int, end: int) -> Judgement:
                return judging.judge(_method(setting), rate, buddies, parts=(begin, end))

            search = Search(judge, request.goal, settings, n_questions, request.metric,
                            partial(on_progress, "search"))
            trials = search.run()
    if request.goal.min_accuracy is not None and not search.original.average(request.metric):
        raise PyorchError(f"the lossless model answers none of {n_questions} questions rightly: there is no accuracy "
                          "to keep")
    reached = [trial for trial in trials if trial.reached]
    speeds = {}
    if reached and request.speed_tokens:
        speeds = _speeds(request, reached[: request.n_candidates], buddies, on_progress)
    best = reached[0] if reached else None
    if speeds:
        best = max(reached[: len(speeds) - 1], key=lambda trial: speeds[trial.substitution].rate)
    tuned = None
    if best is not None:
        held_out = _held_out(request, rate, buddies, best.substitution, on_progress) if request.held_out else {}
        tuned = _tuned(request, rate, n_questions, best, speeds, held_out)
    return Tuning(search.original, tuple(trials), speeds, best, tuned)


def _settings(request: Request, has_ghosts: bool, has_buddies: bool) -> list[Substitution]:
    """Returns the settings for which the files exist. PyorchError: the user's levers need other files."""
    possible = []
    for setting in settings_of(request.levers):
        missing = (("ghosts", "ghosts") if setting.needs_ghosts and not has_ghosts else
                   ("buddy lists", "buddies") if setting.needs_buddies and not has_buddies else None)
        if missing is None:
            possible.append(setting)
        elif request.levers != LEVERS:
            raise PyorchError(f"{setting} needs {missing[0]}, and there are none next to {request.model}: make them "
                              f"with `pyorch {missing[1]}`")
    return possible


def _method(setting: Substitution | None) -> Method:
    return ORIGINAL if setting is None else lossy_method(setting)


def _others(request: Request) -> Request:
    """Returns the request for the held-out questions."""
    return replace(request, data=request.held_out, limit=None)


def _tasks(model: Model, request: Request) -> list[arc.Task]:
    """Reads the questions. PyorchError: a file has a single one, so a difference would have no standard error."""
    tasks = request.tasks(model)
    for task in tasks:
        if len(task.questions) < 2:
            raise PyorchError(f"{task.path}: a single question cannot tell what a setting costs: give some hundred")
    return tasks


def _held_out(
    request: Request, rate: float, buddies: Buddies | None, best: Substitution, on_progress: OnProgress
) -> dict[str, float]:
    """Returns fields of TunedSetting."""
    found = []
    with static_model(request.model, **request.options) as model:
        tasks = _tasks(model, _others(request))
        with Judge(model, tasks, n_threads=request.n_threads) as judging:
            for done, setting in enumerate((None, best)):
                on_progress("held out", done, 2)
                found.append(judging.judge(_method(setting), rate, buddies).accuracies)
    original, tuned = found
    return {
        "n_held_out": sum(len(task.questions) for task in tasks),
        "held_out_accuracy": arc.average(tuned, request.metric),
        "held_out_original_accuracy": arc.average(original, request.metric),
        "held_out_error": arc.difference(tuned, original, request.metric).stderr,
    }


def _speeds(
    request: Request, trials: Sequence[Trial], buddies: Buddies | None, on_progress: OnProgress
) -> dict[Substitution | None, Speed]:
    settings = [None, *(trial.substitution for trial in trials)]
    rounds: dict[Substitution | None, list[Speed]] = {setting: [] for setting in settings}
    for done, setting in enumerate(in_turns(settings, request.n_rounds)):
        on_progress("speed", done, request.n_rounds * len(settings))
        rounds[setting].append(measure_speed(
            request.model, _method(setting), request.budget, buddies, request.data, request.speed_tokens,
            **request.options,
        ))
    return {setting: median(of_setting) for setting, of_setting in rounds.items()}


def _tuned(
    request: Request, rate: float, n_questions: int, best: Trial,
    speeds: dict[Substitution | None, Speed], held_out: dict[str, float],
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
        **held_out,
    )


def settings_of(levers: Sequence[str]) -> list[Substitution]:
    """Returns the settings of some levers, each once.

    A lever is a family of lossy settings, written like one, with alternatives between bars: "heaviest:0.9|1.2" is two
    settings. Every lossy setting can be a lever.

    Raises:
        PyorchError: A lever is invalid, or replaces nothing.
    """
    found: dict[Substitution, None] = {}
    for lever in levers:
        parts = [re.split("(?<=[=:])", part, maxsplit=1) for part in lever.split(",")]
        alternatives = [["".join((*key, value)) for value in values.split("|")] for *key, values in parts]
        for words in itertools.product(*alternatives):
            setting = Substitution.parse(",".join(words))
            if not setting.lossy:
                raise PyorchError(f'lever "{lever}" replaces nothing: there is nothing to try')
            found[setting] = None
            if len(found) > MOST:
                raise PyorchError(f"the levers stand for more than {MOST} settings: give fewer alternatives")
    return list(found)
