"""`pyorch verify`: check that a budget does not change the logits."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyorch.cli.numbers import whole
from pyorch.cli.options import add_model_options, print_json, read_prompt
from pyorch.cli.progress import Progress
from pyorch.cli.settings import given_settings, listed
from pyorch.settings.budget import VERIFY_BUDGETS
from pyorch.settings.option import LOSSY
from pyorch.sizes import format_bytes

EXAMPLE = """pyorch verify olmoe.gguf --budget 20%,50% --tokens 64
  pyorch verify olmoe.gguf --device CUDA0 --vram-budget 50%"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The command compares every logit with the logits of the same model fully in memory. "
        "The exit status is 0 if all bits are equal, and 1 otherwise, also with lossy options. With a device, the "
        "other model is completely on the device; if the processor computes some experts, sums may differ in the last "
        "bits, and the command prints the largest difference."
    )
    add_model_options(parser, LOSSY, lists=("budget",), defaults={"budget": ",".join(map(str, VERIFY_BUDGETS))})
    parser.add_argument("--tokens", type=whole(0), default=32, metavar="N",
                        help="decode N tokens after the prompt (default: 32)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: a paragraph of prose)")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="take the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print a JSON array with one object for each budget")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every logit is bit-identical under every budget, otherwise 1, also with lossy options."""
    prompt = read_prompt(args.prompt, args.file)

    from pyorch.eval.verify import PROMPT, verify

    comparisons = []
    budgets, settings = listed(args, "budget") or VERIFY_BUDGETS, given_settings(args, "budget")
    with Progress(live=not args.verbose) as progress:
        for comparison in verify(
            args.model, budgets, prompt or PROMPT, args.tokens, on_progress=progress.update, verbose=args.verbose,
            **settings,
        ):
            comparisons.append(comparison)
            if not args.json:
                with progress.paused():
                    print(sentence(comparison), flush=True)
    if args.json:
        print_json(comparisons)
    return 0 if all(comparison.identical for comparison in comparisons) else 1


def sentence(comparison) -> str:
    where = f"budget {comparison.budget} ({format_bytes(comparison.budget_bytes)})"
    experts, first = comparison.experts, comparison.first_difference
    substituted, speculated = comparison.substitution, comparison.speculation
    managed = f"; {experts.misses} misses, {experts.evictions} evictions" if experts is not None else ""
    resident = "the resident model's" + " with plain experts" * comparison.plain_experts
    if comparison.device and experts is not None:
        who = comparison.device if experts.device_experts > 0 else "the processor"
        shared = (f"the processor computed {comparison.by_processor} of {experts.device_hits + experts.device_misses} "
                  f"uses of experts, {comparison.device} the others") if comparison.by_processor else (
                  f"{who} computed all experts")
        where += f" and {format_bytes(experts.device_used_bytes)} of {comparison.device}'s memory"
        resident = f"those of the model wholly on {comparison.device}"
        managed = (f"; {shared}; {experts.device_loads} uploads into slots; in host memory {experts.misses} misses, "
                   f"{experts.evictions} evictions")
    if comparison.identical:
        return (f"{where}: the logits of {comparison.n_positions} tokens are bit-identical to {resident}"
                f"{managed}")
    if substituted is not None or speculated is not None:
        done = (f"{substituted}"
                if substituted is not None else
                f"{speculated.slots} expert slots computed as predicted, {speculated.right} of them as their routers "
                "chose")
        return (
            f"{where}: lossy, over {comparison.n_positions} tokens KL divergence {comparison.kl_divergence:.3g} nats, "
            f"same top token {comparison.top1_agreement:.1%}; {done}{managed}"
        )
    return (
        f"{where}: the logits differ first at token {first.position}, vocabulary entry {first.token}: "
        f"{first.managed!r}, resident {first.reference!r}; max difference {comparison.max_abs_difference:.3g}, KL "
        f"divergence {comparison.kl_divergence:.3g} nats, same top token {comparison.top1_agreement:.1%}{managed}"
    )
