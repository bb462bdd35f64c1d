"""Log-likelihoods of continuations, for multiple-choice questions and harnesses.

The log-likelihood of a continuation is the sum of the log-probabilities of its tokens, each after those before it.
A batch has several prompts. The continuations of a prompt share the computing of its context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.llama.context import Context, log_softmax
from pyorch.llama.model import Model

N_BATCH = 512  # tokens of several prompts computed at once
MAX_CONTINUATIONS = 63  # of one prompt
_N_SEQ_MAX = MAX_CONTINUATIONS + 1
_OUTPUT_BYTES = 64 << 20  # for logits, unless one prompt needs more
_MIN_PREFIX = 16  # shorter common beginnings of all prompts are not shared


@dataclass(frozen=True)
class Prompt:
    """Tokens of a context, which must not be empty, and of its possible continuations."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def n_tokens(self) -> int:
        """Tokens to compute if the continuations share the context. A last token is not computed: nothing follows."""
        return len(self.context) + sum(len(continuation) - 1 for continuation in self.continuations)

    @property
    def n_outputs(self) -> int:
        """Rows of logits that the continuations need."""
        return 1 + sum(len(continuation) - 1 for continuation in self.continuations)

    @property
    def length(self) -> int:
        """Tokens of the context with the longest continuation."""
        return len(self.context) + max(map(len, self.continuations))


@dataclass(frozen=True)
class Likelihoods:
    """The results of a prompt's continuations.

    Attributes:
        sums: Of log-probabilities, in nats, float64[n].
        greedy: bool[n], whether each token of the continuation is the most probable one.
    """

    sums: np.ndarray
    greedy: np.ndarray


def tokenize(tokenizer: llama_cpp.Llama, text: str) -> tuple[int, ...]:
    """Tokenizes a text, with BOS if the model's tokenizer adds it, without EOS, and without special tokens."""
    bos = ()
    vocab = llama.llama_model_get_vocab(tokenizer.model)
    if llama.llama_vocab_get_add_bos(vocab):
        bos = (llama.llama_vocab_bos(vocab),)
    return (*bos, *tokenizer.tokenize(text.encode(), add_bos=False, special=False))


def likelihoods(
    model: Model, prompts: Sequence[Prompt], n_ubatch: int = N_BATCH, together: bool | None = None,
    n_threads: int | None = None,
) -> Iterator[Likelihoods]:
    """Yields the log-likelihoods of each prompt with the model's present budget, substitution and cache.

    Args:
        model: The model.
        prompts: The prompts.
        n_ubatch: Tokens computed at once. With 1, each token finds the residency that earlier ones left, as in
            decoding.
        together: Compute several prompts in one batch. The continuations of a prompt (MAX_CONTINUATIONS at most) share
            its context, and all prompts share the beginning of their contexts. Otherwise each continuation is computed
            alone with its context. The log-likelihoods differ by float rounding, about 1e-6, because attention sums
            over keys in another order. Rarely, a router then chooses another expert. None: True if the model can,
            which recurrent ones cannot.
        n_threads: Threads that compute. Default: the physical cores.

    Raises:
        ExpertReadError: An expert could not be read.
    """
    handle = model.llama.model
    if together is None:
        together = not (llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle))
    method = _together if together else _one_by_one
    return method(handle, prompts, n_ubatch, n_threads)


def _likelihood(rows: np.ndarray, tokens: Sequence[int]) -> tuple[float, bool]:
    """Returns the log-likelihood of tokens and whether each is the most probable one.

    rows: [n, n_vocab], the logits before each token.
    """
    return log_probabilities(rows, np.array(tokens)).sum(), bool((rows.argmax(-1) == tokens).all())


def _of_prompt(found: Iterable[tuple[float, bool]]) -> Likelihoods:
    sums, greedy = zip(*found)
    return Likelihoods(np.array(sums), np.array(greedy))


def _one_by_one(
    model: int, prompts: Sequence[Prompt], n_ubatch: int, n_threads: int | None
) -> Iterator[Likelihoods]:
    n_ctx = max(prompt.length for prompt in prompts)
    n_batch = min(n_ctx, max(1, min(N_BATCH, _OUTPUT_BYTES // _row_bytes(model))))
    with Context(model, n_ctx, n_batch, n_ubatch, n_threads=n_threads, exact=True) as context:
        for prompt in prompts:
            yield _of_prompt(_alone(context, n_batch, prompt.context, tokens) for tokens in prompt.continuations)


def _alone(context: Context, n_batch: int, before: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Computes one continuation in pieces: all logits of a long one would not fit into memory."""
    context.clear()
    tokens = (*before, *continuation[:-1])
    first = len(before) - 1  # the token before the continuation
    total, greedy = 0.0, True
    for begin in range(0, len(tokens), n_batch):
        piece = tokens[begin : begin + n_batch]
        outputs = range(max(0, first - begin), len(piece))
        rows = context.decode(piece, outputs=outputs)
        if len(outputs):
            at = begin + outputs.start - first
            log_likelihood, most_probable = _likelihood(rows, continuation[at : at + len(outputs)])
            total, greedy = total + log_likelihood, greedy and most_probable
    return total, greedy


def _row_bytes(model: int) -> int:
    """Returns the bytes of the logits after one token."""
    return 4 * llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))


def _together(
    model: int, prompts: Sequence[Prompt], n_ubatch: int, n_threads: int | None
) -> Iterator[Likelihoods]:
    """Computes prompts in batches. Sequence 0 has the common prefix; each continuation has its own sequence."""
    prefix = _common_prefix(prompts)
    rests = [Prompt(prompt.context[len(prefix):], prompt.continuations) for prompt in prompts]
    row_bytes = _row_bytes(model)
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
    """Returns the common beginning of all contexts, without any last token, whose logits each context needs."""
    first, last = min(prompt.context for prompt in prompts), max(prompt.context for prompt in prompts)
    n = min(len(prompt.context) for prompt in prompts) - 1
    n = next((i for i in range(n) if first[i] != last[i]), n)
    return first[:n] if n >= _MIN_PREFIX else ()


def _batches(prompts: Iterable[Prompt], n_batch: int, n_outputs: int) -> Iterator[list[Prompt]]:
    """Yields groups of consecutive prompts that fit into one decode."""
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


def _score_batch(context: Context, prompts: Sequence[Prompt]) -> Iterator[Likelihoods]:
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
        found = []
        for continuation in prompt.continuations:
            n = len(continuation) - 1
            found.append(_likelihood(logits[[begin, *range(row, row + n)]], continuation))
            row += n
        yield _of_prompt(found)


def log_probabilities(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns log-probabilities of the token after each row, float64[n]. logits: [n, n_vocab], tokens: int[n]."""
    # Row by row: float64 of all rows would be large.
    return np.array([log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)], np.float64)


def kl_divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the divergence of each row's distribution from the reference's, in nats, float64[n].

    Both arrays are [n, n_vocab].
    """
    result = np.empty(len(reference), np.float64)
    for i, (p, q) in enumerate(zip(reference, logits, strict=True)):
        p, q = log_softmax(p), log_softmax(q)
        result[i] = (np.exp(p) * (p - q)).sum()
    return result


def top1_agreements(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns whether the most probable tokens are equal, bool[n]."""
    return reference.argmax(-1) == logits.argmax(-1)
