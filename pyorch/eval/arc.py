"""Multiple-choice questions by log-likelihood, as lm-evaluation-harness defines arc_easy and arc_challenge.

A question's context is "Question: {question}\\nAnswer:", after the examples, if any, each with its right answer
and an empty line; a choice's continuation is " {choice}". A choice is worth the sum of the log-probabilities of
its continuation's tokens. `acc` counts the questions whose right choice has the highest sum, `acc_norm` those
where it has the highest sum divided by the number of characters of the choice, the leading space not counted.

Tokens: the context, and the context with a continuation, are each tokenized as one text. The continuation's
tokens are those beyond as many as the context has. White space at the context's end belongs to the
continuation. A BOS token comes first where the model's tokenizer adds one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.errors import PyorchError
from pyorch.eval.logits import log_probabilities
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.traces.data import Question, read_questions

N_BATCH = 512  # tokens of several questions that are computed at once
_N_SEQ_MAX = 64
_OUTPUT_BYTES = 64 << 20  # for logits, unless one question needs more
_MIN_PREFIX = 16  # tokens that all questions must begin with to be worth keeping

OnProgress = Callable[[int], None]  # questions done


@dataclass(frozen=True)
class Prompt:
    """The tokens of a question. A choice is context + continuation."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def n_tokens(self) -> int:
        """To be computed when the choices share the context: nothing follows a choice's last token."""
        return len(self.context) + sum(len(continuation) - 1 for continuation in self.continuations)

    @property
    def n_outputs(self) -> int:
        """Rows of logits that the choices need."""
        return 1 + sum(len(continuation) - 1 for continuation in self.continuations)

    @property
    def length(self) -> int:
        """Of the longest choice, with the context."""
        return len(self.context) + max(map(len, self.continuations))


@dataclass(frozen=True)
class Task:
    """Questions of one file, tokenized for one model."""

    path: str
    questions: tuple[Question, ...]
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Score:
    """log_likelihoods: of the choices, float64[n_choices], in nats."""

    question: Question
    log_likelihoods: np.ndarray

    @property
    def choice(self) -> int:
        """The choice that acc takes."""
        return int(self.log_likelihoods.argmax())

    @property
    def choice_norm(self) -> int:
        """The choice that acc_norm takes."""
        return int((self.log_likelihoods / [len(choice) for choice in self.question.choices]).argmax())


@dataclass(frozen=True)
class Accuracy:
    """Shares of n questions."""

    n: int
    acc: float
    acc_norm: float

    def stderr(self, metric: str) -> float:
        """Standard error of acc or acc_norm; nan for a single question."""
        share = getattr(self, metric)
        return math.sqrt(share * (1 - share) / (self.n - 1)) if self.n > 1 else float("nan")


def accuracy(scores: Sequence[Score]) -> Accuracy:
    n = len(scores)
    acc = sum(score.choice == score.question.answer for score in scores) / n
    acc_norm = sum(score.choice_norm == score.question.answer for score in scores) / n
    return Accuracy(n, acc, acc_norm)


def read_task(
    model: Model,
    path: str | os.PathLike[str],
    n_shots: int = 0,
    shots_path: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Task:
    """The questions of a file in ARC's layout, tokenized.

    Args:
        n_shots: examples before each question: the first ones of shots_path, by default those of the file
            itself, which are then not among the questions.
        limit: questions at most.

    Raises:
        FormatError: a file is not as it should be; names the line.
        PyorchError: too few questions, or one that is longer than what the model was trained with.
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
        # The context never ends with white space: no space has to be moved to the continuation.
        continuation = tokenize(tokenizer, f"{context} {choice}")[len(tokens):]
        if not choice or not continuation:
            raise PyorchError(f"{path}: question {question.id}: choice {label} is empty")
        continuations.append(continuation)
    return Prompt(tokens, tuple(continuations))


def tokenize(tokenizer: llama_cpp.Llama, text: str) -> tuple[int, ...]:
    """With a BOS token where the model's tokenizer adds one; never an EOS, nothing in the text is special."""
    bos = ()
    vocab = llama.llama_model_get_vocab(tokenizer.model)
    if llama.llama_vocab_get_add_bos(vocab):
        bos = (llama.llama_vocab_bos(vocab),)
    return (*bos, *tokenizer.tokenize(text.encode(), add_bos=False, special=False))


def score(
    model: Model,
    task: Task,
    n_ubatch: int = N_BATCH,
    together: bool | None = None,
    n_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Score]:
    """Scores the questions of a task as the model computes now: under its budget, its substitution, its cache.

    Args:
        n_ubatch: tokens that are computed at once; with 1 each token finds what residency those before it
            left, as in decoding.
        together: several questions in one batch, the choices of a question sharing what is computed of its
            context, and all questions what their contexts begin with. Otherwise each choice is computed
            whole, by itself. The log-likelihoods then differ by float rounding, about 1e-6: attention sums
            over keys that lie elsewhere in the cache. Rarely that makes a router choose another expert.
            None: where the model can, which recurrent ones cannot.

    Raises:
        ExpertReadError: an expert could not be read.
    """
    handle = model.llama.model
    if together is None:
        together = not (llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle))
    method = _together if together else _one_by_one
    scores = []
    for log_likelihoods in method(handle, task.prompts, n_ubatch, n_threads):
        scores.append(Score(task.questions[len(scores)], log_likelihoods))
        if on_progress is not None:
            on_progress(len(scores))
    return scores


def _one_by_one(
    model: int, prompts: Sequence[Prompt], n_ubatch: int, n_threads: int | None
) -> Iterator[np.ndarray]:
    n_ctx = max(prompt.length for prompt in prompts)
    n_outputs = max(len(tokens) for prompt in prompts for tokens in prompt.continuations)
    with Context(model, n_ctx, n_ctx, n_ubatch, n_threads=n_threads, n_outputs=n_outputs, exact=True) as context:
        for prompt in prompts:
            log_likelihoods = []
            for continuation in prompt.continuations:
                context.clear()
                tokens = prompt.context + continuation[:-1]
                logits = context.decode(tokens, outputs=range(len(prompt.context) - 1, len(tokens)))
                log_likelihoods.append(log_probabilities(logits, np.array(continuation)).sum())
            yield np.array(log_likelihoods)


def _together(
    model: int, prompts: Sequence[Prompt], n_ubatch: int, n_threads: int | None
) -> Iterator[np.ndarray]:
    """Sequence 0 holds what all contexts begin with; each choice of a batch has a sequence of its own."""
    prefix = _common_prefix(prompts)
    rests = [Prompt(prompt.context[len(prefix):], prompt.continuations) for prompt in prompts]
    row_bytes = 4 * llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    n_batch = max(N_BATCH, len(prefix), *(rest.n_tokens for rest in rests))
    n_outputs = max(min(n_batch, _OUTPUT_BYTES // row_bytes), *(rest.n_outputs for rest in rests))
    n_ctx = len(prefix) + n_batch
    with Context(
        model, n_ctx, n_batch, n_ubatch, _N_SEQ_MAX, n_threads, n_outputs, shared=True, exact=True
    ) as context:
        if prefix:
            context.decode(prefix, outputs=())
        for batch in _batches(rests, n_batch, n_outputs):
            yield from _score_batch(context, batch)


def _common_prefix(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """What all contexts begin with, their last token left out, which must say what comes next."""
    first, last = min(prompt.context for prompt in prompts), max(prompt.context for prompt in prompts)
    n = min(len(prompt.context) for prompt in prompts) - 1
    n = next((i for i in range(n) if first[i] != last[i]), n)
    return first[:n] if n >= _MIN_PREFIX else ()


def _batches(prompts: Iterable[Prompt], n_batch: int, n_outputs: int) -> Iterator[list[Prompt]]:
    """Consecutive prompts, as many as fit into one decode."""
    batch: list[Prompt] = []
    tokens = outputs = sequences = 0
    for prompt in prompts:
        tokens += prompt.n_tokens
        outputs += prompt.n_outputs
        sequences += len(prompt.continuations)
        if batch and (tokens > n_batch or outputs > n_outputs or sequences > _N_SEQ_MAX - 1):
            yield batch
            batch = []
            tokens, outputs, sequences = prompt.n_tokens, prompt.n_outputs, len(prompt.continuations)
        batch.append(prompt)
    if batch:
        yield batch


def _score_batch(context: Context, prompts: Sequence[Prompt]) -> Iterator[np.ndarray]:
    tokens: list[int] = []
    sequences: list[Sequence[int]] = []
    outputs: list[int] = []
    n_used = 1
    for prompt in prompts:
        of_choices = range(n_used, n_used + len(prompt.continuations))
        n_used = of_choices.stop
        tokens += prompt.context
        sequences += [of_choices] * len(prompt.context)
        outputs.append(len(tokens) - 1)
        for sequence, continuation in zip(of_choices, prompt.continuations):
            outputs += range(len(tokens), len(tokens) + len(continuation) - 1)
            tokens += continuation[:-1]
            sequences += [(sequence,)] * (len(continuation) - 1)
    for sequence in range(1, n_used):
        context.copy(0, sequence)
    try:
        logits = context.decode(tokens, sequences, outputs)
    finally:
        for sequence in range(1, n_used):
            context.remove(sequence)
    row = 0
    for prompt in prompts:
        begin, row = row, row + 1
        log_likelihoods = []
        for continuation in prompt.continuations:
            n = len(continuation) - 1
            rows = logits[[begin, *range(row, row + n)]]
            row += n
            log_likelihoods.append(log_probabilities(rows, np.array(continuation)).sum())
        yield np.array(log_likelihoods)
