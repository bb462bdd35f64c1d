"""Measures prefetching in real decoding: FineMoE's figure 17, Speculating Experts' figure 8.

Compared settings take turns on one loaded model, so that other load of the machine affects all of them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model, load
from pyorch.settings.prefetch import AUTO, NONE, Prefetch
from pyorch.traces.data import read_documents

CONTEXTS = (256, 512, 1024, 2048, 4096)
_WARM_UP = 16  # tokens after a prompt that are not counted
_SETTLE = 288  # tokens in which "auto" compares decoding with and without prefetching
_BLOCK = 24  # tokens until settings change, with all experts resident

OnProgress = Callable[[str, int, int], None]  # step, done, total


@dataclass(frozen=True)
class Iteration:
    """A decoded token under a budget, in milliseconds.

    Attributes:
        compute_ms: All time except stalls.
        read_ms: Of all readers.
        hidden_ms: The part of read_ms that was no stall.
        bound_ms: If computing hid as much reading as possible, given the times of on-demand reading in the same context
            (Speculating Experts, section 5.1).
        reached: The reached share of that gain over on-demand reading; nan if there is no gain.
    """

    n_context: int
    prefetch: str
    tpot_ms: float
    compute_ms: float
    stall_ms: float
    read_ms: float
    hidden_ms: float
    hit_rate: float
    useful: float
    bound_ms: float
    reached: float


@dataclass(frozen=True)
class Overhead:
    """The cost of a predictor without reads: the medians of blocks of tokens with and without it."""

    predictor: str
    tpot_ms: float
    without_ms: float

    @property
    def share(self) -> float:
        return self.tpot_ms / self.without_ms - 1


@dataclass(frozen=True)
class _Timed:
    seconds: float
    stall: float
    read: float
    hits: int
    misses: int
    loads: int
    wasted: int
    n_tokens: int


def measure_contexts(
    path: str | os.PathLike[str], data: Sequence[str | os.PathLike[str]], budget: str, contexts: Sequence[int],
    n_tokens: int, n_rounds: int, on_progress: OnProgress, prefetches: Sequence[str] = (NONE, AUTO),
    n_threads: int | None = None,
) -> list[Iteration]:
    """Decodes n_tokens after prompts of these lengths, alternating between settings, forward and backward.

    "auto" first decodes until it has decided, as it does once in a process. Contexts beyond the model's training are
    left out.

    Raises:
        PyorchError: No context is left, or the text is too short.
    """
    contexts = sorted(set(contexts))
    with load(path, budget=budget, prefetch=NONE, n_ctx=64, n_threads=n_threads) as model:
        _check_managed(model)
        longest = llama.llama_model_n_ctx_train(model.llama.model)
        contexts = [n for n in contexts if n + n_tokens + _WARM_UP <= longest]
        if not contexts:
            raise PyorchError(f"the model was trained for {longest} tokens: no context to measure leaves room for "
                              f"{n_tokens + _WARM_UP} after it")
        n_ctx = max(contexts) + n_tokens + _WARM_UP
        text = _text(model, data, n_ctx)
        timed: dict[tuple[int, str], list[_Timed]] = {}
        steps = [setting for i in range(n_rounds) for setting in (prefetches if i % 2 == 0 else prefetches[::-1])]
        with Context(model.llama.model, n_ctx, 512, 512, n_threads=n_threads) as context:
            for done, setting in enumerate(steps):
                model.set_prefetch(setting)
                for _ in itertools.islice(_feed(context, text), _SETTLE if setting == AUTO else _WARM_UP):
                    on_progress("contexts", done * len(contexts), len(steps) * len(contexts))
                for i, n in enumerate(contexts):
                    on_progress("contexts", done * len(contexts) + i, len(steps) * len(contexts))
                    context.clear()
                    for start in range(0, n, 512):
                        context.decode(text[start : min(n, start + 512)], outputs=[])
                    tokens = text[n : n + n_tokens + _WARM_UP]
                    timed.setdefault((n, setting), []).append(_decode(model, context, tokens))
        model.set_prefetch(NONE)
    return [
        _iteration(n, setting, timed[n, setting], timed[n, prefetches[0]]) for n in contexts for setting in prefetches
    ]


def measure_overheads(
    path: str | os.PathLike[str], data: Sequence[str | os.PathLike[str]], predictors: Sequence[str], n_blocks: int,
    on_progress: OnProgress, n_threads: int | None = None,
) -> list[Overhead]:
    """Decodes n_blocks of tokens with each predictor and as many without, with all experts resident."""
    with load(path, budget="100%", prefetch=NONE, n_ctx=64, n_threads=n_threads) as model:
        _check_managed(model)
        for layer in model.map.layers:
            model.engine.prefetch(layer.il, range(layer.n_expert))
        model.engine.wait_idle()
        n_ctx = min(512, llama.llama_model_n_ctx_train(model.llama.model))
        text = _text(model, data, n_ctx)
        overheads = []
        with Context(model.llama.model, n_ctx, 1, 1, n_threads=n_threads) as context:
            feed = _feed(context, text)
            for done, predictor in enumerate(predictors):
                seconds: tuple[list[float], list[float]] = ([], [])
                for block in range(2 * n_blocks):
                    on_progress("overhead", done * 2 * n_blocks + block, len(predictors) * 2 * n_blocks)
                    with_it = block % 2 == (block // 2) % 2  # 0 1 1 0, so that a drift affects both
                    model.set_prefetch(Prefetch(predictor if with_it else NONE, distance=1))
                    times = [next(feed) for _ in range(_BLOCK)]
                    seconds[with_it].append(float(np.median(times[4:])))
                without, with_it = (1e3 * float(np.median(measured)) for measured in seconds)
                overheads.append(Overhead(predictor, with_it, without))
        model.set_prefetch(NONE)
    return overheads


def compute_ms(
    path: str | os.PathLike[str], data: Sequence[str | os.PathLike[str]], n_threads: int | None = None
) -> float:
    """Returns the median time of a decoded token with all experts resident."""
    with load(path, budget="100%", prefetch=NONE, n_ctx=64, n_threads=n_threads) as model:
        _check_managed(model)
        for layer in model.map.layers:
            model.engine.prefetch(layer.il, range(layer.n_expert))
        model.engine.wait_idle()
        text = _text(model, data, 64)
        with Context(model.llama.model, 64, 1, 1, n_threads=n_threads) as context:
            return 1e3 * float(np.median(list(itertools.islice(_feed(context, text), 48))[8:]))


def _decode(model: Model, context: Context, tokens: Sequence[int]) -> _Timed:
    for token in tokens[:_WARM_UP]:
        context.decode([token])
    model.reset_stats()
    begin = time.perf_counter()
    for token in tokens[_WARM_UP:]:
        context.decode([token])
    seconds = time.perf_counter() - begin
    experts = model.stats().experts
    n_tokens = len(tokens) - _WARM_UP
    return _Timed(
        seconds,
        experts.stall_ns / 1e9,
        experts.read_ns / 1e9,
        experts.hits,
        experts.misses,
        experts.loads,
        experts.unused_loads,
        n_tokens,
    )


def _iteration(n_context: int, prefetch: str, rounds: Sequence[_Timed], on_demand: Sequence[_Timed]) -> Iteration:
    tpot, stall, read = (_per_token(rounds, name) for name in ("seconds", "stall", "read"))
    base, base_stall = (_per_token(on_demand, name) for name in ("seconds", "stall"))
    gain = min(base - base_stall, base_stall)
    hits, misses, loads, wasted = (
        sum(getattr(timed, name) for timed in rounds) for name in ("hits", "misses", "loads", "wasted"))
    return Iteration(
        n_context, prefetch, tpot, tpot - stall, stall, read, max(0.0, read - stall),
        hits / (hits + misses) if hits + misses else float("nan"), 1 - wasted / loads if loads else float("nan"),
        base - gain, (base - tpot) / gain if gain > 0 else float("nan"),
    )


def _per_token(rounds: Sequence[_Timed], name: str) -> float:
    """Returns milliseconds, the median of the rounds."""
    return 1e3 * float(np.median([getattr(timed, name) / timed.n_tokens for timed in rounds]))


def _feed(context: Context, text: Sequence[int]) -> Iterator[float]:
    """Decodes a token per step, repeats the text, and yields the seconds of each."""
    while True:
        context.clear()
        for token in text:
            begin = time.perf_counter()
            context.decode([token])
            yield time.perf_counter() - begin


def _text(model: Model, data: Sequence[str | os.PathLike[str]], n: int) -> list[int]:
    tokens: list[int] = []
    for document in read_documents(data):
        tokens += model.llama.tokenize(document.text.encode(), add_bos=not tokens)
        if len(tokens) >= n:
            return tokens[:n]
    raise PyorchError(f"the data has {len(tokens)} tokens, but measuring needs {n}: give a longer text with --data")


def _check_managed(model: Model) -> None:
    if model.engine is None:
        raise PyorchError(model.note or "pyorch does not manage the model's experts, so there is nothing to measure")


