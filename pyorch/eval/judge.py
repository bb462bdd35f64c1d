"""What a setting is judged by: its answers to questions, and how far its predictions of a text are from the lossless
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

PARTS = 8  # of the questions, and of the text


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Who is asked what. data: files of questions, of each `limit` at most. load_options: of pyorch.load."""

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
        """Of load()."""
        return {**self.load_options, "n_threads": self.n_threads}

    def tasks(self, model: Model) -> list[Task]:
        return [arc.read_task(model, path, self.n_shots, self.shots_data, self.limit) for path in self.data]


@dataclass(frozen=True)
class Judgement:
    """Accuracies, one for each file, and what was done to reach them. divergence: on text, None without; text_slots:
    what was done there."""

    accuracies: tuple[Accuracy, ...]
    slots: Slots
    divergence: Divergence | None = None
    text_slots: Slots = Slots(0, 0, 0, 0)

    def __add__(self, more: Judgement) -> Judgement:
        """Of the questions and the text of both."""
        divergence = self.divergence or more.divergence
        if self.divergence is not None and more.divergence is not None:
            divergence = self.divergence + more.divergence
        accuracies = tuple(one + other for one, other in zip(self.accuracies, more.accuracies, strict=True))
        return Judgement(accuracies, self.slots + more.slots, divergence, self.text_slots + more.text_slots)

    def average(self, metric: str) -> float | None:
        """Mean over the files, as in the papers; None without questions."""
        return arc.average(self.accuracies, metric) if self.accuracies else None


class Judge:
    """A loaded model, questions and texts. What the lossless model predicts of the texts is kept in temporary files."""

    def __init__(
        self, model: Model, tasks: Sequence[Task], texts: Sequence[str] = (), n_tokens: int | None = None,
        n_threads: int | None = None,
    ) -> None:
        """texts: files, of which n_tokens are predicted."""
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
        """What a method does at a cache rate (see method.simulated()). The model is as it was loaded before and after.

        parts: from which to which of PARTS of the questions, and of the text.
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
        """Of so wide batches; the model is lossless now."""
        windows = part_of(self._windows, *parts)
        key = *parts, width
        if windows and key not in self._references:
            report("lossless predictions", 0, 0)
            self._references[key] = self._kept.enter_context(contextlib.closing(
                perplexity.Reference(self._model, windows, width, self._n_threads)))
        return self._references.get(key)


def part_of(items: Sequence, begin: int, end: int) -> Sequence:
    """Of PARTS, of which the first is not empty."""
    return items[math.ceil(len(items) * begin / PARTS) : math.ceil(len(items) * end / PARTS)]


def in_turns(items: Sequence, n_rounds: int) -> Iterator:
    """There and back: what drifts in one direction favours none of them."""
    for i in range(n_rounds):
        yield from items if i % 2 == 0 else reversed(items)


def shuffled(task: Task) -> Task:
    """Always alike. A file may have questions of one kind after those of another."""
    order = np.random.default_rng(0).permutation(len(task.questions))
    return Task(task.path, tuple(task.questions[i] for i in order), tuple(task.prompts[i] for i in order))
