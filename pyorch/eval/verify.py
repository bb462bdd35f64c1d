"""Checks that a budget changes nothing: compares logits of the managed model with the fully resident one.

The reference is the model as llama.cpp loads it by default, with weights repacked for faster kernels. If this does not
fit into memory, it is the model mapped from its file, and both compute with the plain kernels. For a budget under which
only experts are plain, the reference has plain experts too, all resident under an engine.
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

OnProgress = Callable[[str, int, int], None]  # "resident model" or "budget ...", tokens decoded, total

# Ordinary prose selects many experts; a repeated token would always select the same few.
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

    Attributes:
        kl_divergence: Mean over positions, in nats, of the reference's distribution from the managed one's.
        top1_agreement: Share of positions with the same most probable token.
        device: The devices that compute with the processor; the reference is wholly on them. "": none.
        by_processor: Uses of experts that the processor computed. None: without a device. If 0, bits must be the same;
            otherwise sums differ.
        substitution: None if no layer substitutes.
        speculation: None if no layer executes forecasts.
        plain_experts: The reference has plain experts, all in memory under an engine.
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
    substitution: SubstitutionStats | None
    speculation: SpeculationStats | None
    plain_experts: bool


def verify(
    path: str | os.PathLike[str], budgets: Sequence[Budget | str | int] = VERIFY_BUDGETS, prompt: str = PROMPT,
    n_tokens: int = 32, n_threads: int | None = None, on_progress: OnProgress | None = None,
    arrival: Arrival = Arrival(), **load_options: object,
) -> Iterator[Comparison]:
    """Compares prefill of the prompt, in more than one ubatch, and n_tokens decoded one by one.

    The reference chooses the tokens, greedily. Each budget decodes the same ones.

    Args:
        path: The model.
        budgets: The budgets.
        prompt: A text.
        n_tokens: Tokens to decode.
        n_threads: Threads that compute. Default: the physical cores.
        on_progress: Called after each token.
        arrival: Arrivals of experts in simulated time, for a lossy setting.
        load_options: Options of pyorch.load.

    Yields:
        One comparison per budget.

    Raises:
        BudgetError, FormatError, PyorchError: load() refuses the model, a budget or an option.
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
    """Returns the tokens after a prompt, greedily unless they are given, and all logits float32[n, n_vocab]."""
    tokens: list[int] = []
    with Context(
        model.llama.model, n_ctx=len(prompt) + n_tokens, n_batch=max(1, len(prompt)),
        n_ubatch=max(1, len(prompt) * 2 // 5),  # the prompt has three ubatches
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
    # Compares bytes, not values: 0.0 and -0.0 differ, and a NaN equals itself.
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
