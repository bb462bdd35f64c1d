"""Options of `pyorch run` that say how tokens are chosen."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.numbers import number, whole
from pyorch.errors import PyorchError
from pyorch.files import reading

if TYPE_CHECKING:
    from pyorch.llama.model import Model

N_TOKENS = 128  # that continue a prompt, where nobody says how many

# Option: keyword of Model.generate() and chat(), its type, its default, what stands for the value, what it does.
SAMPLING: dict[str, tuple[str, Callable[[str], float], float | None, str, str]] = {
    "temp": ("temperature", number(0), 0.8, "T", "temperature; 0 always takes the most probable token"),
    "top-p": ("top_p", number(0, 1), 0.95, "P", "of the most probable tokens that together have probability P"),
    "top-k": ("top_k", whole(0), 40, "K", "of the K most probable tokens"),
    "min-p": ("min_p", number(0, 1), 0.05, "P", "of tokens at least P times as probable as the most probable one"),
    "repeat-penalty": ("repeat_penalty", number(above=0), 1.0, "X",
                       "factor of the logits of the last 64 tokens; 1: none"),
    "seed": ("seed", whole(), None, "N", "seed"),
}

_ROOT = b"root"  # the rule that a grammar begins with


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--tokens", type=whole(1), metavar="N",
                        help=f"generate at most N tokens (default: {N_TOKENS}; in a conversation, until the model ends "
                             "its answer)")
    group = parser.add_argument_group("sampling")
    for name, (_, read, default, metavar, does) in SAMPLING.items():
        said = "a random one" if default is None else f"{default:g}"
        group.add_argument(f"--{name}", type=read, default=default, metavar=metavar, help=f"{does} (default: {said})")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--grammar", metavar="GBNF", help="the text obeys this grammar of llama.cpp's kind, or @FILE")
    form.add_argument("--json-schema", metavar="SCHEMA", help="the text is JSON that this schema allows, or @FILE")


def sampling(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Keywords for Model.generate() and Model.chat(), of what check_sampling() found good. PyorchError for a grammar or
    schema that cannot be used."""
    chosen: dict[str, Any] = {
        keyword: getattr(args, name.replace("-", "_")) for name, (keyword, *_) in SAMPLING.items()
    }
    gbnf = _gbnf(args)
    if gbnf is not None:
        chosen["grammar"] = _grammar(gbnf, args, model)
    return chosen


def check_sampling(args: argparse.Namespace) -> None:
    """Reads the files that are named. PyorchError for a file, grammar or schema that cannot be read, before a model is
    loaded, which takes long."""
    if args.grammar is not None:
        args.grammar = _text(args.grammar, "grammar")
    if args.json_schema is not None:
        args.json_schema = _text(args.json_schema, "JSON schema")
        _check_json(args.json_schema)


def _gbnf(args: argparse.Namespace) -> str | None:
    if args.json_schema is None:
        return args.grammar
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return json_schema_to_gbnf(args.json_schema)
    except Exception as error:  # whatever the converter of llama_cpp stumbles over
        said = str(error) or type(error).__name__
        raise PyorchError(f"the JSON schema cannot be made a grammar: {said}") from None


def _grammar(gbnf: str, args: argparse.Namespace, model: Model) -> Any:
    """A llama_cpp.LlamaGrammar, which llama.cpp has been asked about."""
    import llama_cpp.llama_cpp as llama
    from llama_cpp.llama_grammar import LlamaGrammar

    from pyorch.llama import logs

    logs.forget_errors()
    vocab = llama.llama_model_get_vocab(model.llama.model)
    with _caught_stderr() as said:
        sampler = llama.llama_sampler_init_grammar(vocab, gbnf.encode(), _ROOT)
    if not sampler:
        what = "grammar" if args.grammar is not None else "grammar of the JSON schema"
        why = said[0].removeprefix("parse: error parsing grammar: ") if said else logs.last_error()
        raise PyorchError(f"the {what} is not understood: {why}")
    llama.llama_sampler_free(sampler)
    return LlamaGrammar.from_string(gbnf)


@contextlib.contextmanager
def _caught_stderr() -> Iterator[list[str]]:
    """The lines that C code writes to stderr inside, when it is over."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _text(given: str, what: str) -> str:
    """The option itself, or the text of the file that it names. PyorchError for no such file, or no text."""
    if given.startswith("@"):
        path = Path(given[1:])
        with reading(path):
            given = path.read_text(encoding="utf-8")
    if not given.strip():
        raise PyorchError(f"the {what} is empty")
    return given


def _check_json(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PyorchError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise PyorchError("the JSON schema is not an object")
