"""The common parts of these programs: a parser like those of pyorch's commands, and errors as sentences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from pyorch.cli import hub
from pyorch.cli.options import add_command
from pyorch.errors import PyorchError


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise PyorchError(f"{message}; {self.prog} --help shows all options")


def parser_of(module: str, summary: str, example: str) -> argparse.ArgumentParser:
    """Makes the parser of a program that `python -m MODULE` runs, with a help and an example.

    example: Its arguments, or lines of commands; `python -m MODULE` is put before a line that does not begin with one.
    """
    programs = _Parser(prog="python -m").add_subparsers()
    return add_command(programs, module, summary, f"python -m {module} {example}")


def run(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: list[str] | None) -> int:
    """Returns the exit status of a program: 2 for an error with a sentence, 130 for Ctrl-C.

    The model may be a model of the hub.
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
