"""`pyorch exec`: run a script written for llama_cpp under a budget."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.options import add_command
from pyorch.cli.settings import add_settings, given_settings
from pyorch.errors import PyorchError
from pyorch.settings.option import EXPERTS, LONG, LOSSY

if TYPE_CHECKING:
    from pyorch.llama.managed import ManagedModel


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "exec", summary,
        "pyorch exec --budget 40% chat.py --model olmoe.gguf",
    )
    parser.description += (
        " The options are for each model that the script loads. Without --ubatch and --threads, those of the script "
        "are used."
    )
    add_settings(parser, EXPERTS, "n_ubatch", "n_threads", LONG, LOSSY, defaults={
        "n_ubatch": "as many as the script asks for", "n_threads": "as many as the script asks for"})
    parser.add_argument("--verbose", action="store_true", help="show statistics of each model when it is freed")
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, help="the script; it is not changed")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if not args.script.is_file():
        raise PyorchError(f"{args.script}: no such script")

    from pyorch.llama.interception import manage

    settings = given_settings(args)
    unsaved: list[PyorchError] = []

    def finish(managed: ManagedModel) -> None:
        if args.verbose:
            _report(managed)
        try:
            managed.save()
        except PyorchError as error:  # said at the end: llama_cpp frees models where no exception is seen
            unsaved.append(error)

    status = 0
    before = sys.argv, list(sys.path)
    sys.argv = [str(args.script), *args.arguments]
    sys.path.insert(0, str(args.script.parent.resolve()))  # as Python does for a script
    try:
        with manage(on_free=finish, **settings):
            runpy.run_path(str(args.script), run_name="__main__")
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        status = exit.code or 0
    except (OSError, MemoryError) as error:  # of the script, whose author wants to know where
        if isinstance(error, (PyorchError, BrokenPipeError)):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    if unsaved:
        raise unsaved[0]
    return status


def _report(managed: ManagedModel) -> None:
    if managed.engine is None:
        return
    from pyorch.sizes import format_bytes

    stats = managed.engine.stats()
    print(
        f"pyorch: {managed.path}: hit rate {stats.hit_rate:.1%}, {format_bytes(stats.bytes_read)} read, "
        f"waited {stats.stall_ns / 1e9:.2f} s; budget {format_bytes(stats.budget_bytes)}",
        file=sys.stderr,
    )
