"""`pyorch pack`: the experts of a model one after another, in a file beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyorch.cli.options import add_command, print_json
from pyorch.cli.progress import Progress
from pyorch.errors import PyorchError

_SHOWN = 3  # of damaged experts


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "pack", summary,
        "pyorch pack olmoe.gguf\n"
        "  pyorch pack olmoe.gguf --check",
    )
    parser.description += (
        " The pack is found beside the model and used by every command, with checksums of all that is read. A run that "
        "is interrupted goes on when it is repeated."
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="the model, a GGUF file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="the file to write, or to check (default: MODEL.experts.gguf beside the model)")
    parser.add_argument("--check", action="store_true",
                        help="write nothing; compare every byte of every expert in the pack with the model")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises PyorchError, also for a pack whose experts are not those of the model."""
    from pyorch.convert.pack import check, pack
    from pyorch.sizes import format_bytes

    with Progress() as progress:
        make = check if args.check else pack
        result = make(args.model, args.output, on_progress=progress.update)
    if args.json:
        print_json(result)
    if args.check and result.damaged:
        some = ", ".join(result.damaged[:_SHOWN]) + (", ..." if len(result.damaged) > _SHOWN else "")
        raise PyorchError(f"{result.path} is damaged in {len(result.damaged)} places: {some}; make it again")
    if not args.json:
        what = f"{result.n_experts} experts of {result.n_layers} layers, {format_bytes(result.n_bytes)}"
        if args.check:
            print(f"{result.path}: {what}, each as in the model")
        else:
            continued = f", {result.n_continued} of them by an earlier run" if result.n_continued else ""
            print(f"{result.path}: {what}, {result.seconds:.1f} s{continued}")
    return 0
