"""Perplexity of texts, and how far a model's predictions are from those of a reference.

A text is divided into windows of at most n_window tokens, each computed from nothing but itself. In a window every
token is predicted by those before it; where the model's tokenizer adds a BOS token each window begins with one.
Each token of a text is predicted once, the very first one only after a BOS token.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.errors import PyorchError
from pyorch.eval.likelihood import N_BATCH, kl_divergences, log_probabilities, tokenize, top1_agreements
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sizes import format_bytes
from pyorch.traces.data import Document

_OUTPUT_BYTES = 64 << 20  # for logits

OnProgress = Callable[[int, int], None]  # tokens done, total

_BLOCK = 32  # consecutive tokens: their divergences are alike, so errors are estimated from the means of such blocks


@dataclass(frozen=True)
class Window:
    """inputs and what follows each of them, of equal length."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Perplexity:
    """Over n_tokens that were predicted. The last three are None without a reference.

    log_likelihood: mean, in nats per token. kl_divergence: mean, in nats, of the model's distributions from the
    reference's. top1_agreement: share of tokens for which both hold the same to be the most probable.
    """

    n_tokens: int
    n_windows: int
    log_likelihood: float
    reference_log_likelihood: float | None
    kl_divergence: float | None
    top1_agreement: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood)

    @property
    def reference_perplexity(self) -> float | None:
        return None if self.reference_log_likelihood is None else math.exp(-self.reference_log_likelihood)


def windows(
    model: Model, documents: Sequence[Document], n_window: int = N_BATCH, n_tokens: int | None = None
) -> list[Window]:
    """The windows of some texts, with n_tokens to predict at most. PyorchError if there is nothing to predict."""
    result = []
    handle = model.llama.model
    n_window = min(n_window, llama.llama_model_n_ctx_train(handle))
    has_bos = llama.llama_vocab_get_add_bos(llama.llama_model_get_vocab(handle))
    left = n_tokens if n_tokens is not None else math.inf
    for document in documents:
        tokens = tokenize(model.llama, document.text)
        # A window with a BOS token of its own continues where the last target was.
        bos, tokens = (tokens[:1], tokens[1:]) if has_bos else ((), tokens)
        first = 0 if has_bos else 1
        for begin in range(first, len(tokens), n_window):
            targets = tokens[begin : begin + min(n_window, left)]
            before = tokens[begin - (not has_bos) : begin + len(targets) - 1]
            result.append(Window(bos + before, targets))
            left -= len(targets)
            if left <= 0:
                return result
    if not result:
        raise PyorchError("the text is too short: there is no token to predict")
    return result


def measure(
    model: Model, texts: Sequence[Window], reference: Model | None = None, n_ubatch: int = N_BATCH,
    n_threads: int | None = None, on_progress: OnProgress | None = None,
) -> Perplexity:
    """Perplexity as the model computes now: under its budget, its substitution, its cache.

    Args:
        reference: a model with the same vocabulary, to compare with.
        n_ubatch: tokens that are computed at once; with 1 as in decoding. The reference is computed alike: the
            shape of a batch changes the rounding.

    Raises PyorchError for a reference with another vocabulary.
    """
    if reference is not None and reference.llama.n_vocab() != model.llama.n_vocab():
        raise PyorchError(
            f"{reference.map.path} has a vocabulary of {reference.llama.n_vocab()} tokens, {model.map.path} one of "
            f"{model.llama.n_vocab()}: they cannot be compared"
        )
    total = sum(len(window.targets) for window in texts)
    done = 0
    sums = np.zeros(4)  # log-likelihood, the reference's, divergence, agreement
    pieces = _predictions(model, texts, n_ubatch, n_threads)
    others = itertools.repeat(None) if reference is None else _predictions(reference, texts, n_ubatch, n_threads)
    for (logits, targets), other in zip(pieces, others):
        sums[0] += log_probabilities(logits, targets).sum()
        if other is not None:
            expected, _ = other
            sums[1] += log_probabilities(expected, targets).sum()
            sums[2] += kl_divergences(expected, logits).sum()
            sums[3] += top1_agreements(expected, logits).sum()
        done += len(targets)
        if on_progress is not None:
            on_progress(done, total)
    means = [float(mean) for mean in sums / total]
    compared = means[1:] if reference is not None else (None, None, None)
    return Perplexity(total, len(texts), means[0], *compared)


@dataclass(frozen=True)
class Divergence:
    """KL divergence from the lossless model. mean: in nats, over n_tokens. blocks: means of consecutive tokens."""

    n_tokens: int
    mean: float
    blocks: tuple[float, ...]

    def __add__(self, more: Divergence) -> Divergence:
        """Of the tokens of both."""
        n = self.n_tokens + more.n_tokens
        mean = (self.n_tokens * self.mean + more.n_tokens * more.mean) / n
        return Divergence(n, mean, self.blocks + more.blocks)

    @property
    def stderr(self) -> float:
        """Of the mean; nan for a single block."""
        blocks = self.blocks
        return float(np.std(blocks, ddof=1) / math.sqrt(len(blocks))) if len(blocks) > 1 else math.nan


class Reference:
    """What a lossless model predicts of some windows: logits, in a temporary file that goes with this object."""

    def __init__(
        self, model: Model, texts: Sequence[Window], n_ubatch: int = N_BATCH, n_threads: int | None = None
    ) -> None:
        """n_ubatch: as what is compared is computed: the shape of a batch changes the rounding. PyorchError where there
        is no room for the file."""
        self._texts = texts
        self._n_ubatch = n_ubatch
        self._n_threads = n_threads
        shape = (sum(len(window.targets) for window in texts), model.llama.n_vocab())
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(tempfile.TemporaryFile())
                self._logits = np.memmap(self._file, np.float32, "w+", shape=shape)
                os.posix_fallocate(self._file.fileno(), 0, self._logits.nbytes)  # else a full disk would be a signal
            except OSError as error:
                raise PyorchError(
                    f"there is no room in {tempfile.gettempdir()} for the predictions of {shape[0]} tokens, "
                    f"{format_bytes(4 * shape[0] * shape[1])}: {error.strerror}"
                ) from None
            done = 0
            for logits, _ in _predictions(model, texts, n_ubatch, n_threads):
                self._logits[done : done + len(logits)] = logits
                done += len(logits)
            self._closing = stack.pop_all()

    def close(self) -> None:
        del self._logits
        self._closing.close()

    def divergence(self, model: Model, on_progress: OnProgress | None = None) -> Divergence:
        """How far the predictions of a model, as it computes now, are from these. The model has the same vocabulary."""
        found: list[np.ndarray] = []
        done = 0
        for logits, _ in _predictions(model, self._texts, self._n_ubatch, self._n_threads):
            found.append(kl_divergences(self._logits[done : done + len(logits)], logits))
            done += len(logits)
            if on_progress is not None:
                on_progress(done, len(self._logits))
        each = np.concatenate(found)
        blocks = np.array_split(each, max(1, len(each) // _BLOCK))
        return Divergence(len(each), float(each.mean()), tuple(float(block.mean()) for block in blocks))


def _predictions(
    model: Model, texts: Sequence[Window], n_ubatch: int, n_threads: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Piece by piece of each window: logits float32[n, n_vocab] and what follows, int[n]."""
    n_batch = max(1, min(N_BATCH, _OUTPUT_BYTES // (4 * model.llama.n_vocab())))
    n_ctx = max(len(window.inputs) for window in texts)
    with Context(model.llama.model, n_ctx, n_batch, n_ubatch, n_threads=n_threads, exact=True) as context:
        for window in texts:
            context.clear()
            for begin in range(0, len(window.inputs), n_batch):
                logits = context.decode(window.inputs[begin : begin + n_batch])
                yield logits, np.array(window.targets[begin : begin + n_batch])
