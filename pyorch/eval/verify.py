"""Checks that a budget changes nothing: logits of the managed model against the fully resident one.

The reference is the model as llama.cpp loads it by default, which repacks what it has faster kernels for; where that
does not fit in memory, the model mapped from its file, and both compute with the plain kernels. A budget under which
experts alone are plain has a reference with plain experts, all resident under an engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyorch.eval.likelihood import kl_divergences, top1_agreements
from pyorch.eval.method import Arrival, kernels, resident_model
from pyorch.llama import cores
from pyorch.llama.context import Context
from pyorch.llama.model import Model, load
from pyorch.llama.model_stats import ModelStats
from pyorch.runtime.statistics import SpeculationStats, Stats, SubstitutionStats
from pyorch.settings.budget import VERIFY_BUDGETS, Budget
from pyorch.settings.kernels import AUTO, PLAIN

OnProgress = Callable[[str, int, int], None]  # "resident model" or "budget ...", tokens decoded, of

# Ordinary prose, so that many experts are chosen; a repeated token would choose the same few.
PROMPT = (
    "The old lighthouse keeper counted 17 ships before dawn. Each of them carried something different: grain, "
    "copper, letters, salt. \"Why do you write it all down?\" asked the child. He closed the ledger, looked at the "
    "grey water, and said that a thing which nobody records has only half happened. def count(ships): return "
    "len([s for s in ships if s.cargo is not None])"
)


@dataclass(frozen=True)
class Difference:
    """The first logit that differs. position counts tokens from the start of the prompt."""

    position: int
    token: int
    reference: float
    managed: float


@dataclass(frozen=True)
class Comparison:
    """Logits under one budget against the reference, over n_positions tokens.

    plain_experts: the reference is a model with plain experts, all of them in memory under an engine.
    kl_divergence: mean over positions, in nats, of the reference's distribution from the managed one's.
    top1_agreement: share of positions with the same most probable token. device: what computes beside the processor, ""
    for nothing: then the reference is wholly there. by_processor: uses of experts that the processor computed, None
    without a device; where it is 0, bits must be the same, and else differences are those of other sums.
    """

    budget: str
    budget_bytes: int
    n_positions: int
    identical: bool
    first_difference: Difference | None
    max_abs_difference: float
    kl_divergence: float
    top1_agreement: float
    device: str
    by_processor: int | None
    experts: Stats | None
    substitution: SubstitutionStats | None  # None where nothing is substituted
    speculation: SpeculationStats | None  # None where nothing is executed on speculation
    plain_experts: bool


def verify(
    path: str | os.PathLike[str], budgets: Sequence[Budget | str | int] = VERIFY_BUDGETS, prompt: str = PROMPT,
    n_tokens: int = 32, n_threads: int | None = None, on_progress: OnProgress | None = None,
    arrival: Arrival = Arrival(), **load_options: object,
) -> Iterator[Comparison]:
    """Compares prefill of the prompt, in more than one ubatch, and n_tokens decoded one by one.

    arrival: which experts a lossy setting finds absent, in simulated time.

    The reference chooses the tokens, greedily; each budget is given the same ones. Yields one
    comparison for each budget, as it is made.

    Raises PyorchError for a model, a budget or options that load() refuses.
    """
    n_threads = n_threads or cores.physical_cores()
    report = on_progress or (lambda *_: None)
    same_kernels = kernels(path, 1, load_options.get("kernels", AUTO))
    options = {"n_ctx": 256, "n_batch": 256, "n_threads": n_threads, **same_kernels, **load_options}
    lossless = options | {"substitution": None, "speculate": False}
    with resident_model(path, **lossless) as model:
        tokens = model.llama.tokenize(prompt.encode(), add_bos=True)
        chosen, of_stock = decoded(model, tokens, n_tokens, n_threads, partial(report, "resident model"))

    @functools.cache
    def of_plain_experts() -> np.ndarray:
        with load(path, budget="100%", managed=True, **lossless | {"kernels": PLAIN}) as model:
            return decoded(model, tokens, n_tokens, n_threads, partial(report, "plain experts"), chosen)[1]

    for budget in budgets:
        with load(path, budget=budget, managed=True, **options) as model:
            if model.stats().substitution is not None:
                arrival.simulate(model)
            _, logits = decoded(model, tokens, n_tokens, n_threads, partial(report, f"budget {budget}"), chosen)
            stats, device = model.stats(), model.device
            n_bytes = stats.experts.budget_bytes if stats.experts is not None else model.map.info.slots_bytes
        is_plain = stats.kernels is not None and stats.kernels.plain
        reference = of_plain_experts() if is_plain else of_stock
        yield _compare(str(budget), n_bytes, device, stats, reference, logits)


def decoded(
    model: Model, prompt: Sequence[int], n_tokens: int, n_threads: int, on_token: Callable[[int, int], None],
    chosen: Sequence[int] | None = None,
) -> tuple[list[int], np.ndarray]:
    """The tokens that follow a prompt, greedily unless they are chosen, and all logits float32[n, n_vocab]."""
    tokens: list[int] = []
    with Context(
        model.llama.model, n_ctx=len(prompt) + n_tokens, n_batch=max(1, len(prompt)),
        n_ubatch=max(1, len(prompt) * 2 // 5),  # a prompt crosses two borders between ubatches
        n_threads=n_threads,
    ) as context:
        logits = [context.decode(prompt)]
        for n in range(n_tokens):
            on_token(n, n_tokens)
            tokens.append(chosen[n] if chosen is not None else int(logits[-1][-1].argmax()))
            logits.append(context.decode(tokens[-1:]))
    return tokens, np.concatenate(logits)


def _compare(
    budget: str, n_bytes: int, device: str, stats: ModelStats, reference: np.ndarray, logits: np.ndarray
) -> Comparison:
    # Bytes, not values: 0.0 and -0.0 are different here, and a NaN is the same as itself.
    differs = reference.view(np.uint32) != logits.view(np.uint32)
    first = None
    if differs.any():
        position, token = (int(i) for i in np.argwhere(differs)[0])
        first = Difference(position, token, float(reference[position, token]), float(logits[position, token]))
    experts = stats.experts
    return Comparison(
        budget=budget,
        budget_bytes=n_bytes,
        n_positions=len(reference),
        identical=first is None,
        first_difference=first,
        max_abs_difference=float(np.abs(reference - logits).max()),
        kl_divergence=float(kl_divergences(reference, logits).mean()),
        top1_agreement=float(top1_agreements(reference, logits).mean()),
        device=device,
        by_processor=experts.device_hits + experts.device_misses - experts.device_computed
        if device and experts is not None else None,
        experts=experts,
        substitution=stats.substitution,
        speculation=stats.speculation,
        plain_experts=stats.kernels is not None and stats.kernels.plain,
    )
