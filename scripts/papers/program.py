"""What the programs of this folder share: a parser like those of pyorch's commands, and errors as sentences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from pyorch.cli import hub
from pyorch.cli.options import add_command
from pyorch.errors import PyorchError


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise PyorchError(f"{message}; {self.prog} --help shows what can be given")


def parser_of(module: str, summary: str, example: str) -> argparse.ArgumentParser:
    """The parser of a program that `python -m MODULE` runs, with a help and an example.

    example: its arguments, or lines of commands; `python -m MODULE` is put in front of what begins with none.
    """
    programs = _Parser(prog="python -m").add_subparsers()
    return add_command(programs, module, summary, f"python -m {module} {example}")


def run(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: list[str] | None) -> int:
    """The exit status of a program: 2 for an error that has a sentence, 130 for Ctrl-C. A model may be one of the hub.
    """
    try:
        args = parser.parse_args(argv)
        if str(getattr(args, "model", "")).startswith("hf:"):
            hub.resolve(args, ("model",))
        return run(args)
    except PyorchError as error:
        print(f"{parser.prog.split('.')[-1]}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
