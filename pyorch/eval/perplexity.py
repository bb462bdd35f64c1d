"""Perplexity of texts, and the divergence of a model's predictions from those of a reference.

A text is divided into windows of at most n_window tokens, each computed alone. In a window every token is predicted
from the tokens before it. If the model's tokenizer adds a BOS token, each window begins with one. Each token of a text
is predicted once; the very first one only after a BOS token.
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

_BLOCK = 32  # consecutive tokens, whose divergences are correlated: errors are estimated from means of such blocks


@dataclass(frozen=True)
class Window:
    """Tokens, and the token that follows each of them, of equal length."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Perplexity:
    """The results over n_tokens predicted tokens. The last three are None without a reference.

    Attributes:
        log_likelihood: Mean, in nats per token.
        kl_divergence: Mean, in nats, of the model's distributions from the reference's.
        top1_agreement: Share of tokens with the same most probable token in both.
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
    """Returns the windows of some texts, with n_tokens to predict at most. PyorchError: no token can be predicted."""
    result = []
    handle = model.llama.model
    n_window = min(n_window, llama.llama_model_n_ctx_train(handle))
    has_bos = llama.llama_vocab_get_add_bos(llama.llama_model_get_vocab(handle))
    left = n_tokens if n_tokens is not None else math.inf
    for document in documents:
        tokens = tokenize(model.llama, document.text)
        # A window with its own BOS token continues at the last target.
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
    """Measures perplexity with the model's present budget, substitution and cache.

    Args:
        model: The model.
        texts: From windows().
        reference: A model with the same vocabulary, to compare with.
        n_ubatch: Tokens computed at once; with 1 as in decoding. The reference uses the same, because the shape of a
            batch changes the rounding.
        n_threads: Threads that compute. Default: the physical cores.
        on_progress: Called after each piece.

    Raises:
        PyorchError: The reference has another vocabulary.
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
        """Returns the divergence over the tokens of both."""
        n = self.n_tokens + more.n_tokens
        mean = (self.n_tokens * self.mean + more.n_tokens * more.mean) / n
        return Divergence(n, mean, self.blocks + more.blocks)

    @property
    def stderr(self) -> float:
        """Of the mean; nan for a single block."""
        blocks = self.blocks
        return float(np.std(blocks, ddof=1) / math.sqrt(len(blocks))) if len(blocks) > 1 else math.nan


class Reference:
    """A lossless model's logits for some windows, in a temporary file with the lifetime of this object."""

    def __init__(
        self, model: Model, texts: Sequence[Window], n_ubatch: int = N_BATCH, n_threads: int | None = None
    ) -> None:
        """Computes the logits.

        Args:
            model: The lossless model.
            texts: From windows().
            n_ubatch: As for the models to compare, because the shape of a batch changes the rounding.
            n_threads: Threads that compute. Default: the physical cores.

        Raises:
            PyorchError: There is no room for the file.
        """
        self._texts = texts
        self._n_ubatch = n_ubatch
        self._n_threads = n_threads
        shape = (sum(len(window.targets) for window in texts), model.llama.n_vocab())
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(tempfile.TemporaryFile())
                self._logits = np.memmap(self._file, np.float32, "w+", shape=shape)
                os.posix_fallocate(self._file.fileno(), 0, self._logits.nbytes)  # a full disk would send a signal later
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
        """Returns the divergence of a model's present predictions. It must have the same vocabulary."""
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
    """Yields pieces of windows: logits float32[n, n_vocab] and the tokens that follow, int[n]."""
    n_batch = max(1, min(N_BATCH, _OUTPUT_BYTES // (4 * model.llama.n_vocab())))
    n_ctx = max(len(window.inputs) for window in texts)
    with Context(model.llama.model, n_ctx, n_batch, n_ubatch, n_threads=n_threads, exact=True) as context:
        for window in texts:
            context.clear()
            for begin in range(0, len(window.inputs), n_batch):
                logits = context.decode(window.inputs[begin : begin + n_batch])
                yield logits, np.array(window.targets[begin : begin + n_batch])
