"""`pyorch profile`: record what the routers decide on some text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyorch.cli.numbers import whole
from pyorch.cli.options import add_command, add_model_options, check_output, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import given_settings
from pyorch.settings.option import CONTEXT


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "profile", summary,
        "pyorch profile olmoe.gguf --data prose.txt questions.jsonl --inputs 2000 -o olmoe.trace",
    )
    parser.description += " pyorch trace, plan, buddies, maps and replay read such a trace."
    add_model_options(parser, CONTEXT)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE",
                        help="plain text, or .jsonl with a field text or prompt on each line, or with questions in the "
                             "layout of ARC")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument("--append", action="store_true", help="continue the trace if it exists")
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="read at most N tokens of the data (default: all)")
    parser.add_argument("--router", choices=("topk", "full"), default="topk",
                        help="record the selected experts and their probabilities, or the probabilities of all experts "
                             "(default: topk)")
    parser.add_argument("--inputs", type=whole(0), default=0, metavar="N",
                        help="record the inputs of the routers for a random sample of N tokens (default: 0)")
    parser.add_argument("--states", action="store_true",
                        help="record the hidden state before every router; pyorch replay needs these for predictors "
                             "that apply routers")
    parser.add_argument("--decode", type=whole(0), default=0, metavar="N",
                        help="after each text, generate up to N tokens greedily and record these too (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sample (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a summary as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.traces.file import part_path
    from pyorch.traces.recorder import profile

    check_output(args.output, args.model, args.data)
    part = part_path(args.output)
    begun = part.exists()
    try:
        with Progress(live=not args.verbose) as progress:
            recorded = profile(
                args.model, args.data, args.output, n_tokens=args.tokens, router=args.router,
                n_inputs=args.inputs, states=args.states, n_decode=args.decode, seed=args.seed, append=args.append,
                on_progress=progress.update, verbose=args.verbose, **given_settings(args),
            )
    except BaseException:
        if part.exists() and not begun:
            print(f"pyorch: note: what was recorded until now is in {part}", file=sys.stderr)
        raise
    if args.json:
        print_json(recorded)
    else:
        print(_sentence(recorded))
    return 0


def _sentence(profile) -> str:
    from pyorch.sizes import counted, format_bytes

    n = profile.prefill_tokens + profile.decode_tokens
    seconds = profile.prefill_seconds + profile.decode_seconds
    phases = "; ".join(
        f"{name} {tokens} tokens, {tokens / spent:.1f} tok/s"
        for name, tokens, spent in (("prefill", profile.prefill_tokens, profile.prefill_seconds),
                                    ("decode", profile.decode_tokens, profile.decode_seconds)) if tokens
    )
    whole = f", {profile.n_records} in the trace" if profile.n_records > n else ""
    sample = f", router inputs of {profile.n_inputs}" if profile.n_inputs else ""
    return (f"{profile.path}: {n} tokens of {counted(profile.n_requests, 'request')}{whole}{sample}, "
            f"{format_bytes(profile.file_bytes)}, {seconds:.1f} s; {phases}; hit rate {profile.experts.hit_rate:.1%}, "
            f"{format_bytes(profile.experts.bytes_read)} read")
