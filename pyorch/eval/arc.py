"""Multiple-choice questions by log-likelihood, as lm-evaluation-harness defines arc_easy and arc_challenge.

A question's context is "Question: {question}\\nAnswer:", after the examples, if any, each with its right answer and an
empty line. A choice's continuation is " {choice}", and its score is the sum of the log-probabilities of the
continuation's tokens. `acc` counts the questions whose right choice has the highest score. `acc_norm` divides the score
by the number of characters of the choice, without the leading space.

Tokens: the context, and the context with a continuation, are each tokenized as one text. The continuation's tokens are
all after the number of tokens of the context. White space at the context's end belongs to the continuation. A BOS token
comes first if the model's tokenizer adds one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.errors import PyorchError
from pyorch.eval.likelihood import N_BATCH, Prompt, likelihoods, tokenize
from pyorch.llama.model import Model
from pyorch.traces.data import Question, read_questions

OnProgress = Callable[[int], None]  # questions done


@dataclass(frozen=True)
class Task:
    """Questions of one file, tokenized for one model."""

    path: str
    questions: tuple[Question, ...]
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Score:
    """The scores of a question. log_likelihoods: of its choices, float64[n_choices], in nats."""

    question: Question
    log_likelihoods: np.ndarray

    @property
    def choice(self) -> int:
        """The choice with the highest score, for acc."""
        return int(self.log_likelihoods.argmax())

    @property
    def choice_norm(self) -> int:
        """The choice with the highest normalized score, for acc_norm."""
        return int((self.log_likelihoods / [len(choice) for choice in self.question.choices]).argmax())


@dataclass(frozen=True)
class Accuracy:
    """The results of a file's questions. right, right_norm: "1" or "0" for each question, for acc and for acc_norm."""

    right: str
    right_norm: str

    def __add__(self, more: Accuracy) -> Accuracy:
        """Returns the results of both files' questions."""
        return Accuracy(self.right + more.right, self.right_norm + more.right_norm)

    @property
    def n(self) -> int:
        return len(self.right)

    @property
    def acc(self) -> float:
        return self.right.count("1") / self.n

    @property
    def acc_norm(self) -> float:
        return self.right_norm.count("1") / self.n

    def stderr(self, metric: str) -> float:
        """Returns the standard error of acc or acc_norm; nan for a single question."""
        share = getattr(self, metric)
        return math.sqrt(share * (1 - share) / (self.n - 1)) if self.n > 1 else float("nan")

    def counts(self, metric: str) -> np.ndarray:
        """Returns float64[n], 1 for the questions that count and 0 for the others."""
        return np.array([float(one) for one in (self.right if metric == "acc" else self.right_norm)])


@dataclass(frozen=True)
class Difference:
    """The difference of two averages over the same questions. stderr: of the paired differences; nan for one."""

    mean: float
    stderr: float


def difference(one: Sequence[Accuracy], other: Sequence[Accuracy], metric: str) -> Difference:
    """Returns how much higher the first results are on the same questions, as the average over files."""
    pairs = [mine.counts(metric) - its.counts(metric) for mine, its in zip(one, other, strict=True)]
    errors = [pair.var(ddof=1) / len(pair) if len(pair) > 1 else float("nan") for pair in pairs]
    return Difference(float(np.mean([pair.mean() for pair in pairs])), math.sqrt(sum(errors)) / len(pairs))


def average(accuracies: Sequence[Accuracy], metric: str) -> float:
    """Returns the average over files, as in the papers."""
    return sum(getattr(one, metric) for one in accuracies) / len(accuracies)


def accuracy(scores: Sequence[Score]) -> Accuracy:
    right = "".join(str(int(score.choice == score.question.answer)) for score in scores)
    right_norm = "".join(str(int(score.choice_norm == score.question.answer)) for score in scores)
    return Accuracy(right, right_norm)


def read_task(
    model: Model, path: str | os.PathLike[str], n_shots: int = 0, shots_path: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Task:
    """Reads and tokenizes the questions of a file in ARC's layout.

    Args:
        model: Its tokenizer is used.
        path: The file.
        n_shots: Examples before each question: the first ones of shots_path. By default they are taken from the file
            itself, which then does not ask them.
        shots_path: Another file of examples.
        limit: Questions at most.

    Raises:
        FormatError: A file is invalid; the message names the line.
        PyorchError: There are too few questions, or one exceeds the model's training context.
    """
    path = os.fspath(path)
    questions = read_questions(path)
    examples = questions if shots_path is None else read_questions(shots_path)
    if len(examples) < n_shots:
        raise PyorchError(f"{shots_path or path} has {len(examples)} questions, {n_shots} examples are asked for")
    if shots_path is None:
        questions = questions[n_shots:]
    questions = questions[:limit]
    if not questions:
        raise PyorchError(f"{path}: no question is left besides {n_shots} examples")
    shots = "".join(f"{context_text(example)} {example.choices[example.answer]}\n\n" for example in examples[:n_shots])
    n_ctx_train = llama.llama_model_n_ctx_train(model.llama.model)
    prompts = []
    for question in questions:
        prompt = _prompt(model.llama, shots, question, path)
        if prompt.length > n_ctx_train:
            advice = "give fewer --shots" if n_shots else "it cannot be judged with this model"
            raise PyorchError(f"{path}: question {question.id} with {n_shots} examples has {prompt.length} tokens, "
                              f"the model was trained with {n_ctx_train}: {advice}")
        prompts.append(prompt)
    return Task(path, tuple(questions), tuple(prompts))


def context_text(question: Question) -> str:
    return f"Question: {question.question}\nAnswer:"


def _prompt(tokenizer: llama_cpp.Llama, shots: str, question: Question, path: str) -> Prompt:
    context = shots + context_text(question)
    tokens = tokenize(tokenizer, context)
    continuations = []
    for choice, label in zip(question.choices, question.labels):
        # The context never ends with white space, so no space moves to the continuation.
        continuation = tokenize(tokenizer, f"{context} {choice}")[len(tokens):]
        if not choice or not continuation:
            raise PyorchError(f"{path}: question {question.id}: choice {label} is empty")
        continuations.append(continuation)
    return Prompt(tokens, tuple(continuations))


def score(
    model: Model, task: Task, n_ubatch: int = N_BATCH, together: bool | None = None, n_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Score]:
    """Scores the questions of a task with the model's present budget, substitution and cache.

    n_ubatch, together: see likelihoods().

    Raises:
        ExpertReadError: An expert could not be read.
    """
    scores: list[Score] = []
    if not task.prompts:
        return scores
    for found in likelihoods(model, task.prompts, n_ubatch, together, n_threads):
        scores.append(Score(task.questions[len(scores)], found.sums))
        if on_progress is not None:
            on_progress(len(scores))
    return scores
