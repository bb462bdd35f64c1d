"""Options that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.hub import MODEL
from pyorch.cli.numbers import number, whole
from pyorch.cli.settings import add_settings
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError
from pyorch.files import check_no_source, check_target, reading
from pyorch.library.choices import with_names
from pyorch.settings.option import EXPERTS, texts
from pyorch.settings.settings import Settings

if TYPE_CHECKING:
    from pyorch.runtime.model_map import ModelMap


# Returns whether this program wrote a file for this model; None: for any model.
IsOwn = Callable[[Path, "ModelMap | None"], bool]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions, and keeps the line breaks of the example."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLE):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _expand_help(self, action: argparse.Action) -> str:
        return with_names(super()._expand_help(action))  # asks the library only if the help is shown


_EXAMPLE = "example:\n"
_MINUTES = 15  # for text of unknown length, which could take hours on a large model


def add_command(subparsers: argparse._SubParsersAction, name: str, help: str, example: str) -> argparse.ArgumentParser:
    """Returns the parser of a command. Its --help ends with an example."""
    parser = subparsers.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"{_EXAMPLE}  {example}",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.register("type", int, whole())  # argparse would say "invalid int value"
    parser.register("type", float, number())
    return parser


def add_model(parser: argparse.ArgumentParser, more: str = "", optional: bool = False) -> None:
    """Adds the argument MODEL. main() replaces a model of the hub by a path. more: requirements, for the help."""
    parser.add_argument("model", metavar="MODEL", nargs="?" if optional else None,
                        help=f"the model: {MODEL}{f', {more}' if more else ''}")


def add_model_options(
    parser: argparse.ArgumentParser, *more: str, lists: Collection[str] = (), defaults: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> None:
    """Adds MODEL and the options of its experts, for given_settings().

    Args:
        parser: The parser of the command.
        more: Further options and groups of options.
        lists: See add_settings().
        defaults: See add_settings().
        without: See add_settings().
    """
    add_model(parser)
    add_settings(parser, EXPERTS, "n_threads", *more, lists=lists, defaults=defaults, without=without)
    parser.add_argument("--verbose", action="store_true", help="show llama.cpp's log")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds --data and --tokens of a command that reads text."""
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE",
                        help="plain text, or .jsonl with a field text or prompt on each line, or with questions in the "
                             "layout of ARC")
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="read at most N tokens of the data (default: all)")


def add_minutes_option(parser: argparse.ArgumentParser) -> None:
    """Adds --minutes of a command that runs text through a model, which may take hours."""
    parser.add_argument("--minutes", type=number(above=0), metavar="N",
                        help=f"start no further piece of the data after N minutes (default: {_MINUTES}; with --tokens, "
                             "no limit)")


def seconds_for_text(args: argparse.Namespace) -> float | None:
    """Returns the seconds of --minutes, or None for no limit."""
    minutes = args.minutes or (None if args.tokens else _MINUTES)
    return minutes and 60.0 * minutes


def note_cut_short(args: argparse.Namespace) -> None:
    print(f"pyorch: note: {args.minutes or _MINUTES:g} minutes were over before all of the data was read: --minutes "
          "gives more time", file=sys.stderr)


def add_output_options(
    parser: argparse.ArgumentParser, default: str, as_json: str = "print the result as one JSON object"
) -> None:
    """Adds -o, --force and --json of a command that writes one file. default: its default path, for the help."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the file to write (default: {default})")
    add_force(parser, f"{OWN}, or without -o for a former model of this name")
    parser.add_argument("--json", action="store_true", help=as_json)


OWN = "one that this command wrote for this model"


def add_force(parser: argparse.ArgumentParser, own: str = OWN) -> None:
    """Adds --force of a command that writes files. own: the file that is replaced without it, for the help, or ""."""
    default = f"replace only {own}" if own else "refuse"
    parser.add_argument("--force", action="store_true",
                        help=f"replace the file that has the name of the output (default: {default})")


def answer(
    args: argparse.Namespace, result: object, parts: Callable[[], Iterable[str | Table | Facts]]
) -> int:
    """Prints a result as one JSON object with --json, otherwise in parts. Returns the status 0."""
    if args.json:
        print_json(result)
    else:
        show(parts())
    return 0


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """Returns the prompt of -p or -f ("-": the standard input).

    Raises:
        PyorchError: The prompt cannot be read, or is not text.
    """
    if file == Path("-"):
        return read_standard_input()
    if file is None:
        if text is not None and not _is_text(text):
            raise PyorchError("the prompt is not UTF-8 text")
        return text
    with reading(file):
        return file.read_text(encoding="utf-8")


def read_standard_input() -> str:
    """Returns the standard input without the line feed at its end, which echo and editors add.

    Raises:
        PyorchError: The input is not text.
    """
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        text = "\udc80"
    if not _is_text(text):
        raise PyorchError("the standard input is not UTF-8 text")
    return text.removesuffix("\n").removesuffix("\r")


def _is_text(argument: str) -> bool:
    """Whether an argument is text: Python stores other bytes as halves of surrogate pairs."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_readable(paths: Iterable[str | Path | None]) -> None:
    """Checks that files can be read, before a model is loaded, which takes long. None is no file.

    Raises:
        PyorchError: A file cannot be read.
    """
    for path in filter(None, paths):
        with reading(path), open(path, "rb"):
            pass


def check_output(
    output: Path, model: str | Path, sources: Iterable[str | Path | None] = (), *, force: bool,
    is_own: IsOwn | None = None, by_default: bool = False,
) -> None:
    """Checks the output of a command before the command begins.

    Args:
        output: The file to write.
        model: The model that is read for it.
        sources: Other files that are read for it. None is no file.
        force: Whether the user gave --force.
        is_own: See IsOwn; None: the command recognizes no file as its own.
        by_default: Whether the output has the default name, derived from the model's name. Such a file of another
            model is replaced too: it belongs to a former model of this name.

    Raises:
        PyorchError: No file can be written there; or the file would replace one that is read; or, without force, one
            that this command did not write for this model.
    """
    from pyorch.runtime.model_map import shards_of
    from pyorch.sidecars import container, packs

    check_target(output.absolute())
    check_no_source(output, shards_of(model))
    check_no_source(output, [container.default_path(model, packs.KIND)], "the pack of the model")
    check_no_source(output, filter(None, sources), "a file that is read")
    check_own(output, model, force, is_own, by_default)


def check_own(
    output: Path, model: str | Path, force: bool, is_own: IsOwn | None = None, by_default: bool = False
) -> None:
    """Checks, unless force is given, that this command wrote the existing output for this model. See check_output().

    Raises:
        PyorchError: It did not.
    """
    from pyorch.runtime.model_map import ModelMap

    if force or not holds_anything(output):
        return
    if is_own is None:
        raise in_the_way(output)
    if by_default and is_own(output, None):
        return
    with ModelMap(model) as model_map:
        if not is_own(output, model_map):
            raise in_the_way(output, f", and pyorch did not write it for {model}")


def holds_anything(output: Path) -> bool:
    """Whether the file exists and is not empty."""
    return output.is_file() and output.stat().st_size > 0


def in_the_way(output: Path, why: str = "") -> PyorchError:
    """Returns the refusal to replace a file. why: follows the word "exists"."""
    return PyorchError(f"{output} exists{why}: name another file, or give --force to replace this one")


def print_json(value: object) -> None:
    """Prints a value, such as a dataclass, as one JSON object. A number that is not finite becomes null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: object) -> object:
    if isinstance(value, Settings):
        return texts(value, defaults=True)
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
