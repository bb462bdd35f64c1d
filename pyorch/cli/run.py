"""`pyorch run`: continue a prompt, or chat."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.numbers import number, whole
from pyorch.cli.options import add_command, add_model_options, print_json, read_prompt
from pyorch.cli.settings import given_settings
from pyorch.cli.tables import Facts, show
from pyorch.errors import PyorchError
from pyorch.settings.option import CONTEXT, LONG, LOSSY

if TYPE_CHECKING:
    from pyorch.llama.model import Model, ModelStats
    from pyorch.runtime.statistics import Stats


@dataclass(frozen=True)
class RunResult:
    """What --json prints."""

    text: str
    stats: ModelStats


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "run", summary, 'pyorch run olmoe.gguf -p "Once upon a time" -n 64 --budget 40%')
    parser.description += " The text goes to stdout, statistics go to stderr."
    add_model_options(parser, CONTEXT, LONG, LOSSY)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", metavar="TEXT", help="continue this text")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="continue the text of a file")
    source.add_argument("--chat", action="store_true",
                        help="converse, with the chat template of the model; Ctrl-D ends the conversation")
    parser.add_argument("-n", "--tokens", type=whole(1), default=128, metavar="N",
                        help="generate at most N tokens (default: 128)")
    parser.add_argument("--temp", type=number(0), default=0.8, metavar="T",
                        help="temperature of sampling; 0 always takes the most probable token (default: 0.8)")
    parser.add_argument("--top-p", type=number(0, 1), default=0.95, metavar="P",
                        help="sample from the most probable tokens that together have probability P (default: 0.95)")
    parser.add_argument("--top-k", type=whole(0), default=40, metavar="K",
                        help="sample from the K most probable tokens (default: 40)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of sampling (default: a random one)")
    parser.add_argument("--json", action="store_true", help="print text and statistics as one JSON object, at the end")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.chat and args.json:
        raise PyorchError("--chat converses with a person: it cannot print JSON")
    prompt = read_prompt(args.prompt, args.file)

    from pyorch.llama.model import load

    with load(args.model, verbose=args.verbose, **given_settings(args)) as model:
        if model.note:
            print(f"pyorch: note: {model.note}", file=sys.stderr)
        sampling = {"max_tokens": args.tokens, "temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k}
        if args.chat:
            _chat(model, sampling, args.seed)
            show_stats(model.stats())
        else:
            _generate(model, prompt, sampling, args)
        if args.maps is not None and model.engine is not None and model.engine.history:
            model.save_maps(args.maps)
        if args.learned is not None and model.engine is not None:
            model.save_learned(args.learned)
    return 0


def _generate(model: Model, prompt: str, sampling: dict, args: argparse.Namespace) -> None:
    text = ""
    for piece in model.generate(prompt, seed=args.seed, **sampling):
        text += piece
        if not args.json:
            print(piece, end="", flush=True)
    if args.json:
        print_json(RunResult(text, model.stats()))
    else:
        print(flush=True)
        show_stats(model.stats())


def _chat(model: Model, sampling: dict, seed: int | None) -> None:
    messages: list[dict[str, str]] = []
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        try:
            for piece in model.chat(messages, seed=seed, **sampling):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:  # ends the answer, not the conversation
            pass
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def _stored_hits(experts: Stats) -> str:
    """Shares of the uses of experts, of those that were in memory in other forms; "" without any."""
    uses, partial = experts.hits + experts.misses, experts.sm_hits + experts.e_hits
    forms = ((experts.compressed_hits, "compressed"), (partial, "in part"))
    return "".join(f"{n / uses:.1%} {form}, " for n, form in forms if n)


def show_stats(stats: ModelStats) -> None:
    """To stderr: the text on stdout may go into a pipe."""
    from pyorch.sizes import format_bytes

    rows = [
        ("prefill", f"{stats.prefill_tokens} tokens, {stats.prefill_rate:.1f} tok/s"),
        ("decode", f"{stats.decode_tokens} tokens, {stats.decode_rate:.1f} tok/s"),
    ]
    experts, speculation, substitution = stats.experts, stats.speculation, stats.substitution
    if experts is not None:
        read = format_bytes(round(stats.bytes_read_per_token))
        hit_rate = "-" if math.isnan(experts.hit_rate) else f"{experts.hit_rate:.1%}"
        rows.append(("experts", f"hit rate {hit_rate}, {_stored_hits(experts)}{read} read per token, waited "
                                f"{experts.stall_ns / 1e9:.2f} s"))
        budget, peak = format_bytes(experts.budget_bytes), format_bytes(experts.peak_bytes)
        rows.append(("budget", f"{budget}, at most {peak} used"))
    if stats.pools is not None:
        names = ("full", "compressed", "SM only", "E only")
        shares = ", ".join(f"{share:.0%} {name}" for share, name in zip(stats.pools.shares, names) if share)
        rows.append(("pools", f"{shares} ({stats.pools_from})"))
    elif stats.pools_from:
        rows.append(("pools", stats.pools_from))
    rows.append(("memory", f"at most {format_bytes(stats.peak_memory_bytes)} used by the process"))
    if speculation is not None:
        rows.append(("lossy", f"{speculation.slots} expert slots computed as predicted, {speculation.right} of them as "
                              "their routers chose"))
    if substitution is not None:
        rows.append(("lossy", f"{substitution.lossy_tokens} of {substitution.tokens} token-layers changed, "
                              f"{substitution.substituted} expert slots substituted, {substitution.dropped} dropped; "
                              f"{substitution.avoided} of {substitution.absent} absent experts not needed"))
    show([Facts(rows)], sys.stderr)
