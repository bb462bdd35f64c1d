"""`pyorch exec`: run a script written for llama_cpp under a budget."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from pyorch.cli.options import add_command, add_residency_options, add_substitution_options, substitution_arguments
from pyorch.errors import PyorchError


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "exec", summary,
        "pyorch exec --budget 40% chat.py --model olmoe.gguf",
    )
    parser.add_argument(
        "--budget", default="auto", metavar="SIZE",
        help="memory for the experts of each model that the script loads: 40%%, 1.5GiB, 800MB, or auto (default: auto)",
    )
    add_residency_options(parser)
    parser.add_argument("--verbose", action="store_true", help="show statistics of each model when it is freed")
    add_substitution_options(parser)
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, help="the script; it is not changed")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if not args.script.is_file():
        raise PyorchError(f"{args.script}: no such script")

    from pyorch.llama.interception import manage

    lossy = substitution_arguments(args)
    before = sys.argv, list(sys.path)
    sys.argv = [str(args.script), *args.arguments]
    sys.path.insert(0, str(args.script.parent.resolve()))  # as Python does for a script
    try:
        report = _report if args.verbose else None
        with manage(budget=args.budget, policy=args.policy, prefetch=args.prefetch, on_free=report, **lossy):
            runpy.run_path(str(args.script), run_name="__main__")
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _report(managed) -> None:
    if managed.engine is None:
        return
    from pyorch.sizes import format_bytes

    stats = managed.engine.stats()
    print(
        f"pyorch: {managed.path}: hit rate {stats.hit_rate:.1%}, {format_bytes(stats.bytes_read)} read, "
        f"waited {stats.stall_ns / 1e9:.2f} s; budget {format_bytes(stats.budget_bytes)}",
        file=sys.stderr,
    )
