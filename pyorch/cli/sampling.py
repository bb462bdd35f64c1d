"""Options of `pyorch run` for sampling."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.numbers import number, whole
from pyorch.errors import PyorchError
from pyorch.files import reading

if TYPE_CHECKING:
    from pyorch.llama.model import Model

N_TOKENS = 128  # tokens that continue a prompt by default

# Option: keyword of Model.generate() and chat(), its type, default, placeholder, and help.
SAMPLING: dict[str, tuple[str, Callable[[str], float], float | None, str, str]] = {
    "temp": ("temperature", number(0), 0.8, "T", "temperature; 0 always takes the most probable token"),
    "top-p": ("top_p", number(0, 1), 0.95, "P", "sample among the most probable tokens with the sum P"),
    "top-k": ("top_k", whole(0), 40, "K", "sample among the K most probable tokens"),
    "min-p": ("min_p", number(0, 1), 0.05, "P", "sample among tokens at least P times as probable as the first"),
    "repeat-penalty": ("repeat_penalty", number(above=0), 1.0, "X",
                       "factor of the logits of the last 64 tokens; 1: none"),
    "seed": ("seed", whole(), None, "N", "seed"),
}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--tokens", type=whole(1), metavar="N",
                        help=f"generate at most N tokens (default: {N_TOKENS}; in a conversation, until the model ends "
                             "its answer)")
    group = parser.add_argument_group("sampling")
    for name, (_, read, default, metavar, does) in SAMPLING.items():
        said = "a random one" if default is None else f"{default:g}"
        group.add_argument(f"--{name}", type=read, default=default, metavar=metavar, help=f"{does} (default: {said})")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--grammar", metavar="GBNF", help="make the text obey this grammar in llama.cpp's form, or @FILE")
    form.add_argument("--json-schema", metavar="SCHEMA", help="make the text JSON that this schema allows, or @FILE")


def sampling(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Returns keywords for Model.generate() and Model.chat(), after check_sampling().

    Raises:
        PyorchError: The grammar or schema cannot be used.
    """
    from pyorch.llama.schemas import compiled, grammar_of

    chosen: dict[str, Any] = {
        keyword: getattr(args, name.replace("-", "_")) for name, (keyword, *_) in SAMPLING.items()
    }
    gbnf = args.grammar
    if args.json_schema is not None:
        gbnf = grammar_of(args.json_schema)
    if gbnf is not None:
        chosen["grammar"] = compiled(gbnf, model.llama.model)
    return chosen


def check_sampling(args: argparse.Namespace) -> None:
    """Reads the named files, before a model is loaded, which takes long.

    Raises:
        PyorchError: A file, grammar or schema cannot be read.
    """
    if args.grammar is not None:
        args.grammar = _text(args.grammar, "grammar")
    if args.json_schema is not None:
        from pyorch.llama.schemas import check_schema

        args.json_schema = _text(args.json_schema, "JSON schema")
        check_schema(args.json_schema)


def _text(given: str, what: str) -> str:
    """Returns the option itself, or the text of the file that it names.

    Raises:
        PyorchError: The file does not exist, or is not text.
    """
    if given.startswith("@"):
        path = Path(given[1:])
        with reading(path):
            given = path.read_text(encoding="utf-8")
    if not given.strip():
        raise PyorchError(f"the {what} is empty")
    return given
