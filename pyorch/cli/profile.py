"""`pyorch profile`: record what the routers decide on some text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyorch.cli.options import add_command, add_context_options, add_model_options, load_arguments, print_json
from pyorch.cli.progress import Bar


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "profile", "record what the routers decide on some text",
        "pyorch profile olmoe.gguf --data prose.txt questions.jsonl --inputs 2000 -o olmoe.trace",
    )
    add_model_options(parser)
    add_context_options(parser)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE",
                        help="plain text, or .jsonl: a field text or prompt on each line, or questions as ARC's")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument("--append", action="store_true", help="continue the trace if it exists")
    parser.add_argument("--tokens", type=int, metavar="N", help="read at most N tokens of the data (default: all)")
    parser.add_argument("--router", choices=("topk", "full"), default="topk",
                        help="record the selected experts, or each router's whole distribution (default: topk)")
    parser.add_argument("--inputs", type=int, default=0, metavar="N",
                        help="keep the routers' inputs for a random sample of N tokens (default: 0)")
    parser.add_argument("--states", action="store_true",
                        help="record the residual states before the routers too, as pyorch train-predictor needs them")
    parser.add_argument("--decode", type=int, default=0, metavar="N",
                        help="after each text generate up to N tokens, greedily, and record these too (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.traces.recorder import profile
    from pyorch.traces.file import part_path

    part = part_path(args.output)
    begun = part.exists()
    try:
        with Bar(not args.verbose) as bar:
            done = profile(
                args.model, args.data, args.output, budget=args.budget, n_tokens=args.tokens, router=args.router,
                n_inputs=args.inputs, states=args.states, n_decode=args.decode, seed=args.seed, append=args.append,
                on_progress=bar.update, **load_arguments(args),
            )
    except BaseException:
        if part.exists() and not begun:
            print(f"pyorch: note: what was recorded until now is in {part}", file=sys.stderr)
        raise
    if args.json:
        print_json(done)
    else:
        print(_sentence(done))
    return 0


def _sentence(it) -> str:
    from pyorch.sizes import format_bytes

    n = it.prefill_tokens + it.decode_tokens
    seconds = it.prefill_seconds + it.decode_seconds
    phases = "; ".join(
        f"{name} {tokens} tokens, {tokens / spent:.1f} tok/s"
        for name, tokens, spent in (("prefill", it.prefill_tokens, it.prefill_seconds),
                                    ("decode", it.decode_tokens, it.decode_seconds)) if tokens
    )
    whole = f", {it.n_records} in the trace" if it.n_records > n else ""
    sample = f", router inputs of {it.n_inputs}" if it.n_inputs else ""
    return (f"{it.path}: {n} tokens of {it.n_requests} requests{whole}{sample}, {format_bytes(it.file_bytes)}, "
            f"{seconds:.1f} s; {phases}; hit rate {it.experts.hit_rate:.1%}, "
            f"{format_bytes(it.experts.bytes_read)} read")
