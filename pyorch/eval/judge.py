"""Judges a setting by its answers to questions, and by the divergence of its predictions of a text from the lossless
ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pyorch.eval import arc, perplexity
from pyorch.eval.arc import Accuracy, Task
from pyorch.eval.method import Method, OnProgress, Slots, again, n_ubatch, simulated, slots
from pyorch.eval.perplexity import Divergence
from pyorch.llama.model import Model
from pyorch.settings.budget import AUTO, Budget
from pyorch.sidecars.buddies import Buddies
from pyorch.traces.data import read_documents

PARTS = 8  # the questions and the text are divided into this many


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A model and its questions.

    Attributes:
        data: Files of questions.
        limit: Questions of each file at most.
        load_options: Of pyorch.load.
    """

    model: str
    data: tuple[str, ...]
    budget: Budget = AUTO
    n_shots: int = 0
    shots_data: str | None = None
    limit: int | None = None
    buddies_file: str | None = None
    n_threads: int | None = None
    load_options: dict[str, object] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, object]:
        """All options of load()."""
        return {**self.load_options, "n_threads": self.n_threads}

    def tasks(self, model: Model) -> list[Task]:
        return [arc.read_task(model, path, self.n_shots, self.shots_data, self.limit) for path in self.data]


@dataclass(frozen=True)
class Judgement:
    """The result of judging.

    Attributes:
        accuracies: One per file.
        slots: Expert slots while the questions were answered.
        divergence: On text. None: without text.
        text_slots: Expert slots while the text was predicted.
    """

    accuracies: tuple[Accuracy, ...]
    slots: Slots
    divergence: Divergence | None = None
    text_slots: Slots = Slots(0, 0, 0, 0)

    def __add__(self, more: Judgement) -> Judgement:
        """Returns the judgement of the questions and texts of both."""
        divergence = self.divergence or more.divergence
        if self.divergence is not None and more.divergence is not None:
            divergence = self.divergence + more.divergence
        accuracies = tuple(one + other for one, other in zip(self.accuracies, more.accuracies, strict=True))
        return Judgement(accuracies, self.slots + more.slots, divergence, self.text_slots + more.text_slots)

    def average(self, metric: str) -> float | None:
        """Returns the mean over the files, as in the papers; None without questions."""
        return arc.average(self.accuracies, metric) if self.accuracies else None


class Judge:
    """A loaded model, questions and texts. Temporary files store the lossless predictions of the texts."""

    def __init__(
        self, model: Model, tasks: Sequence[Task], texts: Sequence[str] = (), n_tokens: int | None = None,
        n_threads: int | None = None,
    ) -> None:
        """Keeps the model and its questions. texts: files, of which n_tokens are predicted."""
        self._model, self._tasks, self._n_threads = model, tasks, n_threads
        self._windows = perplexity.windows(model, list(read_documents(texts)), n_tokens=n_tokens) if texts else []
        self._references: dict[tuple[int, int, int], perplexity.Reference] = {}
        self._kept = contextlib.ExitStack()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def judge(
        self, method: Method, rate: float | None, buddies: Buddies | None, on_progress: OnProgress | None = None,
        parts: tuple[int, int] = (0, PARTS),
    ) -> Judgement:
        """Judges a method at a cache rate (see method.simulated()). Afterwards the model is as before.

        Args:
            method: The method.
            rate: The cache rate. None: the model as it was loaded.
            buddies: The buddy lists, if any.
            on_progress: Called after each question and piece of text.
            parts: The first of PARTS of the questions and the text, and the end.
        """
        report = on_progress or (lambda *_: None)
        width = n_ubatch(method.substitution, bool(method.forecast))
        reference = self._reference(parts, width, report)
        tasks = [Task(task.path, part_of(task.questions, *parts), part_of(task.prompts, *parts))
                 for task in self._tasks]
        n_questions, accuracies = sum(len(task.questions) for task in tasks), []
        with simulated(self._model, method, rate, buddies, report):
            for task in tasks:
                before = sum(accuracy.n for accuracy in accuracies)
                accuracies.append(arc.accuracy(arc.score(
                    self._model, task, width, n_threads=self._n_threads,
                    on_progress=lambda n, before=before: report("questions", before + n, n_questions))))
            done = slots(self._model)
            divergence = None
            if reference is not None:
                again(self._model, method, buddies)
                divergence = reference.divergence(self._model, partial(report, "tokens"))
            text_slots = slots(self._model) - done
            return Judgement(tuple(accuracies), done if tasks else text_slots, divergence, text_slots)

    def _reference(self, parts: tuple[int, int], width: int, report: OnProgress) -> perplexity.Reference | None:
        """Returns the reference for batches of this width. The model must be lossless now."""
        windows = part_of(self._windows, *parts)
        key = *parts, width
        if windows and key not in self._references:
            report("lossless predictions", 0, 0)
            self._references[key] = self._kept.enter_context(contextlib.closing(
                perplexity.Reference(self._model, windows, width, self._n_threads)))
        return self._references.get(key)


def part_of(items: Sequence, begin: int, end: int) -> Sequence:
    """Returns a range of PARTS of the items. The first part is not empty."""
    return items[math.ceil(len(items) * begin / PARTS) : math.ceil(len(items) * end / PARTS)]


def in_turns(items: Sequence, n_rounds: int) -> Iterator:
    """Yields the items forward and backward in turn, so that a drift in one direction favours none."""
    for i in range(n_rounds):
        yield from items if i % 2 == 0 else reversed(items)


def shuffled(task: Task) -> Task:
    """Shuffles the questions, always alike: a file may be sorted by kind."""
    order = np.random.default_rng(0).permutation(len(task.questions))
    return Task(task.path, tuple(task.questions[i] for i in order), tuple(task.prompts[i] for i in order))
