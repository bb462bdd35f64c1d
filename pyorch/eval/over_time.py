"""What a lossy setting does as a text goes on: a real cache fills, and less is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyorch.eval import perplexity
from pyorch.eval.method import Slots, slots
from pyorch.eval.perplexity import Perplexity, Window
from pyorch.llama.model import Model

OnProgress = Callable[[int, int], None]  # tokens done, total


@dataclass(frozen=True)
class Stretch:
    """One window of a text. first: tokens before it. resident: experts in memory at its end, None if all are there."""

    first: int
    perplexity: Perplexity
    slots: Slots
    resident: int | None


def measure(
    model: Model, texts: Sequence[Window], reference: Model | None, n_ubatch: int, n_threads: int | None,
    on_progress: OnProgress,
) -> list[Stretch]:
    """Windows in their order, each judged by itself; what one leaves in the cache is there for the next.

    Otherwise as perplexity.measure().
    """
    total = sum(len(window.targets) for window in texts)
    stretches: list[Stretch] = []
    first = 0
    for window in texts:
        before = slots(model)
        found = perplexity.measure(model, [window], reference, n_ubatch, n_threads)
        resident = _resident_experts(model)
        stretches.append(Stretch(first, found, slots(model) - before, resident))
        first += found.n_tokens
        on_progress(first, total)
    return stretches


def _resident_experts(model: Model) -> int | None:
    if model.engine is None:
        return None
    return (model.engine.simulated_stats() if model.engine.simulates_cache else model.engine.stats()).resident_experts


def together(stretches: Sequence[Stretch]) -> Perplexity:
    """All windows as one text."""
    n = sum(stretch.perplexity.n_tokens for stretch in stretches)

    def mean(name: str) -> float | None:
        values = [getattr(stretch.perplexity, name) for stretch in stretches]
        if None in values:
            return None
        return sum(stretch.perplexity.n_tokens * value for stretch, value in zip(stretches, values)) / n

    names = ("log_likelihood", "reference_log_likelihood", "kl_divergence", "top1_agreement")
    return Perplexity(n, len(stretches), *map(mean, names))
