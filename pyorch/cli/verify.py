"""`pyorch verify`: check that a budget does not change the logits."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyorch.cli.options import add_command, add_model_options, add_substitution_options, load_arguments, print_json, read_prompt


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "verify", "check that a budget does not change the logits",
        "pyorch verify olmoe.gguf --budget 20%,50% --tokens 64",
    )
    add_model_options(parser, budget="50%")
    add_substitution_options(parser)
    parser.add_argument("--tokens", type=int, default=32, metavar="N",
                        help="tokens to decode after the prompt (default: 32)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="default: a paragraph of prose")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="take the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object for each budget")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every logit is bit-identical under every budget, or a lossy setting was asked for; 1 otherwise."""
    prompt = read_prompt(args.prompt, args.file)

    from pyorch.eval.verify import PROMPT, verify

    comparisons = []
    options = load_arguments(args)
    for comparison in verify(args.model, args.budget.split(","), prompt or PROMPT, args.tokens, **options):
        comparisons.append(comparison)
        if not args.json:
            print(sentence(comparison), flush=True)
    if args.json:
        print_json(comparisons)
    lossy = options["substitution"] is not None
    return 0 if lossy or all(comparison.identical for comparison in comparisons) else 1


def sentence(it) -> str:
    from pyorch.sizes import format_bytes

    where = f"budget {it.budget} ({format_bytes(it.budget_bytes)})"
    managed = f", {it.experts.misses} misses, {it.experts.evictions} evictions" if it.experts is not None else ""
    if it.identical:
        return f"{where}: logits of {it.n_positions} tokens are bit-identical to the resident model's{managed}"
    if it.substitution is not None:
        return (
            f"{where}: lossy, over {it.n_positions} tokens KL divergence {it.kl_divergence:.3g} nats, same top token "
            f"{it.top1_agreement:.1%}; {it.substitution.substituted} expert slots substituted, "
            f"{it.substitution.dropped} dropped{managed}"
        )
    first = it.first_difference
    return (
        f"{where}: logits differ first at token {first.position}, vocabulary entry {first.token}: "
        f"{first.managed!r}, resident {first.reference!r}; max difference {it.max_abs_difference:.3g}, "
        f"KL divergence {it.kl_divergence:.3g} nats, same top token {it.top1_agreement:.1%}{managed}"
    )
