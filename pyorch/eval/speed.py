"""Decode speed at a real budget: texts are decoded token by token, as if each token had been generated.

The text determines the tokens, so that experts are selected as in real use. Every text is a sequence of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama

from pyorch.eval.likelihood import tokenize
from pyorch.eval.method import Method, dynamic_model
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sidecars.buddies import Buddies
from pyorch.traces.data import read_documents

_WARM_UP = 0.5  # of the measured tokens, decoded before them


@dataclass(frozen=True)
class Speed:
    """The speed of n_tokens decoded one by one. substituted, dropped, ghosts: expert slots of all layers."""

    n_tokens: int
    seconds: float
    bytes_read: int
    hits: int
    misses: int
    stall_seconds: float
    substituted: int
    dropped: int
    ghosts: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.n_tokens / self.seconds

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.n_tokens


def measure_speed(
    path: str | os.PathLike[str], method: Method, budget: str, buddies: Buddies | None, data: Sequence[str],
    n_tokens: int, n_threads: int | None = None, **options: object,
) -> Speed:
    """Loads the model under the budget, fills its cache, warms up, and measures n_tokens of the data's texts."""
    with dynamic_model(path, method, budget, buddies, n_threads=n_threads, **options) as model:
        n_ctx = min(llama.llama_model_n_ctx_train(model.llama.model), 2048)
        with Context(model.llama.model, n_ctx, 1, 1, n_threads=n_threads) as context:
            feed = _feed(context, _sequences(model, data, n_ctx))
            for _ in range(round(n_tokens * _WARM_UP)):
                next(feed)
            model.reset_stats()
            begin = time.perf_counter()
            for _ in range(n_tokens):
                next(feed)
            seconds = time.perf_counter() - begin
            stats = model.stats()
    experts, lossy = stats.experts, stats.substitution
    return Speed(
        n_tokens, seconds, experts.bytes_read, experts.hits, experts.misses, experts.stall_ns / 1e9,
        lossy.substituted if lossy is not None else 0, lossy.dropped if lossy is not None else 0,
        lossy.ghosts if lossy is not None else 0,
    )


def median(rounds: Sequence[Speed]) -> Speed:
    """Returns the round with the median rate, which ignores interrupted rounds; of an even number, the slower one."""
    return sorted(rounds, key=lambda speed: speed.rate)[(len(rounds) - 1) // 2]


def _feed(context: Context, sequences: Iterator[Sequence[int]]) -> Iterator[None]:
    """Decodes one token per step."""
    for tokens in sequences:
        context.clear()
        for token in tokens:
            context.decode([token])
            yield


def _sequences(model: Model, data: Sequence[str], n_ctx: int) -> Iterator[Sequence[int]]:
    """Yields the texts of all files in turn as tokens, cut to n_ctx, and repeats them."""
    files = [[tokenize(model.llama, document.text)[:n_ctx] for document in read_documents([path])] for path in data]
    by_turns = [tokens for turn in itertools.zip_longest(*files) for tokens in turn if tokens]
    return itertools.cycle(by_turns)
