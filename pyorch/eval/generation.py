"""Generates continuations of prompts, several at once, for a harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.eval.likelihood import N_BATCH
from pyorch.llama.context import Context
from pyorch.llama.model import Model


@dataclass(frozen=True)
class Request:
    """A prompt, which must not be empty, and its sampling. Generation ends at `stop`, an end of text, or max_tokens.

    temperature 0 takes the most probable token. Otherwise one is drawn from those allowed by top_k, top_p and min_p.
    top_k 0, top_p 1 and min_p 0 allow all.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass
class _Answer:
    """A text in generation."""

    index: int
    request: Request
    random: np.random.Generator
    text: bytearray = field(default_factory=bytearray)
    n_tokens: int = 0
    last: int = -1


def generate(
    model: Model, requests: Sequence[Request], n_parallel: int = 1, n_threads: int | None = None
) -> Iterator[tuple[int, str]]:
    """Continues prompts, n_parallel of them at a time.

    Tokens computed together change the rounding, as in servers; with n_parallel 1 each prompt is computed alone.

    Yields:
        The number of a request, and its text without the stop text, in the order of their ends.

    Raises:
        ExpertReadError: An expert could not be read.
    """
    longest = max(len(request.tokens) + request.max_tokens for request in requests)
    n_parallel = min(n_parallel, len(requests))
    waiting = list(enumerate(requests))[::-1]
    running: dict[int, _Answer] = {}  # by sequence
    with Context(
        model.llama.model, longest * n_parallel, max(N_BATCH, n_parallel), N_BATCH, n_parallel, n_threads,
        n_outputs=n_parallel, shared=True, exact=True,
    ) as context:
        while waiting or running:
            finished = []
            while waiting and len(running) < n_parallel:
                sequence = next(i for i in range(n_parallel) if i not in running)
                index, request = waiting.pop()
                running[sequence] = answer = _Answer(index, request, np.random.default_rng((request.seed, index)))
                if _goes_on(model, answer, _prompt_logits(context, sequence, request.tokens)):
                    continue
                finished.append(sequence)
                break
            if not finished:
                finished = _step(model, context, running)
            for sequence in finished:
                answer = running.pop(sequence)
                context.remove(sequence)
                yield answer.index, _text(answer)


def _prompt_logits(context: Context, sequence: int, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits after the last token, float32[n_vocab]."""
    for begin in range(0, len(tokens), N_BATCH):
        piece = tokens[begin : begin + N_BATCH]
        is_last = begin + N_BATCH >= len(tokens)
        logits = context.decode(piece, [sequence] * len(piece), (len(piece) - 1,) if is_last else ())
    return logits[0]


def _step(model: Model, context: Context, running: dict[int, _Answer]) -> list[int]:
    """Computes a token of each sequence. Returns the finished sequences."""
    sequences = list(running)
    logits = context.decode([running[sequence].last for sequence in sequences], sequences)
    return [sequence for sequence, row in zip(sequences, logits) if not _goes_on(model, running[sequence], row)]


def _goes_on(model: Model, answer: _Answer, logits: np.ndarray) -> bool:
    """Adds the next token to an answer, and returns whether the answer continues."""
    if answer.n_tokens >= answer.request.max_tokens:
        return False
    token = choose(logits, answer.request, answer.random)
    if llama.llama_vocab_is_eog(llama.llama_model_get_vocab(model.llama.model), token):
        return False
    answer.last = token
    answer.n_tokens += 1
    answer.text += model.llama.detokenize([token])
    text = answer.text.decode(errors="ignore")
    return answer.n_tokens < answer.request.max_tokens and not any(stop in text for stop in answer.request.stop if stop)


def _text(answer: _Answer) -> str:
    text = answer.text.decode(errors="replace")
    ends = [text.find(stop) for stop in answer.request.stop if stop and stop in text]
    return text[: min(ends)] if ends else text


def choose(logits: np.ndarray, request: Request, random: np.random.Generator) -> int:
    """Samples a token. logits: float32[n_vocab]."""
    if request.temperature <= 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if request.top_k:
        order = order[: request.top_k]
    scaled = logits[order].astype(np.float64) / request.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    # The first token always stays: the sum before it is 0, and it is itself the most probable.
    kept = (np.cumsum(p) - p < request.top_p) & (p >= request.min_p * p[0])
    p = p[kept] / p[kept].sum()
    return int(order[kept][random.choice(len(p), p=p)])
