"""`pyorch exec`: run a script or module written for llama_cpp under a budget."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import starting
from pyorch.cli.settings import add_settings, given_settings
from pyorch.errors import PyorchError, one_line
from pyorch.settings.option import EXPERTS, LONG, LOSSY
from pyorch.sizes import format_bytes

if TYPE_CHECKING:
    from pyorch.llama.managed import ManagedModel

EXAMPLE = """pyorch exec --budget 40% chat.py --model olmoe.gguf
  pyorch exec --budget 40% -m llama_cpp.server --model olmoe.gguf"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The options apply to each model that the script loads. Without --ubatch and --threads, the script's values "
        "are used."
    )
    add_settings(parser, EXPERTS, "n_ubatch", "n_threads", LONG, LOSSY, defaults={
        "n_ubatch": "as many as the script asks for", "n_threads": "as many as the script asks for"})
    parser.add_argument("--verbose", action="store_true", help="show statistics of each model when it is freed")
    parser.add_argument("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER,
                        help="run an installed module in place of a script, as python -m does; its arguments follow "
                             "its name")
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, nargs="?", help="the script; it is not changed")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    program, run_program = _module(args.module) if args.module is not None else _script(args)

    from pyorch.llama.interception import manage
    from pyorch.llama.managed import models

    settings = given_settings(args)
    unsaved: list[PyorchError] = []
    finished: list[ManagedModel] = []

    def finish(managed: ManagedModel) -> None:
        if any(managed is one for one in finished):
            return
        finished.append(managed)
        if args.verbose:
            _report(managed)
        try:
            managed.save()
        except PyorchError as error:  # raised at the end: llama_cpp frees models in places that swallow exceptions
            unsaved.append(error)

    status = 0
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = program
    starting.give_back()
    try:
        with manage(on_free=finish, **settings):
            run_program()
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        status = exit.code or 0
    except (OSError, MemoryError) as error:  # raised by the script; its author needs the traceback
        if isinstance(error, (PyorchError, BrokenPipeError)):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        sys.argv, sys.path[:] = before
        # Models that the script has not freed end with the interpreter, which can no longer import modules to write.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        for managed in list(models.values()):
            if not managed.forked:
                finish(managed)
    if unsaved:
        raise unsaved[0]
    return status


_Program = tuple[tuple[list[str], list[str]], Callable[[], object]]  # (argv, first entries of sys.path), its runner


def _script(args: argparse.Namespace) -> _Program:
    if args.script is None:
        raise PyorchError("there is nothing to run: name a script, or a module with -m")
    if not args.script.is_file():
        raise PyorchError(f"{args.script}: no such script")
    path = str(args.script)
    places = [str(args.script.parent.resolve())]  # as Python does for a script
    return ([path, *args.arguments], places), lambda: runpy.run_path(path, run_name="__main__")


def _module(words: list[str]) -> _Program:
    if not words:
        raise PyorchError("-m needs the name of a module")
    name, *arguments = words
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise  # the module's own package imports a missing package
        found = None
    finally:
        del sys.path[0]
    if found is None:
        raise PyorchError(f"{name}: no such module, or one that cannot be run")
    run_module = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    return ([name, *arguments], [os.getcwd()]), run_module


def _report(managed: ManagedModel) -> None:
    if managed.engine is None:
        return
    stats = managed.engine.stats()
    print(
        f"pyorch: {one_line(managed.path)}: hit rate {stats.hit_rate:.1%}, {format_bytes(stats.bytes_read)} read, "
        f"waited {stats.stall_ns / 1e9:.2f} s; budget {format_bytes(stats.budget_bytes)}",
        file=sys.stderr,
    )
