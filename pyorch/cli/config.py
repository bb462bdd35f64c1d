"""The user's settings file, and `pyorch config`, which shows the settings in force.

The file has flags under their names: for all commands, and in tables for a command and for models:

    threads = 4

    [serve]
    port = 8081

    [model."olmoe"]
    budget = "40%"

    [model."olmoe".serve]
    ctx = 8192

Later entries of this order win, and the command line wins over the file.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch import cli
from pyorch.cli.hub import find
from pyorch.cli.options import answer
from pyorch.cli.settings import OPTIONS
from pyorch.cli.tables import Facts, Table
from pyorch.errors import PyorchError
from pyorch.files import read_toml, tomllib
from pyorch.library.choices import with_names

_MODEL = "model"  # the table that holds the tables of models


@dataclass(frozen=True)
class Given:
    """A value that the file has for a flag. section: the keys of its table."""

    value: Any
    section: tuple[str, ...]
    key: str


class _Default(list):
    """The file's values of a flag that may be repeated. The command line replaces them; argparse would append."""

    def __copy__(self) -> list:
        return []


class Configuration:
    """A settings file.

    Raises:
        FormatError: The file cannot be read.
        PyorchError: A key is no flag, command or model table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._top = read_toml(path)
        self.models: dict[str, Any] = self._top.get(_MODEL, {})
        for key, value in self._top.items():
            if key in (_MODEL, *cli.COMMANDS):
                self._table(value, (), key)
            elif isinstance(value, dict):
                raise self._unknown((), key, (_MODEL, *cli.COMMANDS))

    def apply(self, parser: argparse.ArgumentParser, model: str | None = None) -> None:
        """Makes the values of the file the defaults of a command, for a model if one is named."""
        values = self.values(parser, matching(model) if model else lambda _: False)
        parser.set_defaults(**{dest: given.value for dest, given in values.items()})
        for action in parser._actions:
            action.required = action.required and action.dest not in values

    def values(self, parser: argparse.ArgumentParser, for_model: Callable[[str], bool]) -> dict[str, Given]:
        """Returns the file's values for a command, by the name of the argument.

        Args:
            parser: The parser of the command.
            for_model: Whether a name in [model.NAME] means the model.
        """
        found = {}
        flags = cli.flags(parser)
        for section, words, table in self._sections(parser.prog.split()[1:], for_model):
            for key, value in table.items():
                if key in flags and not isinstance(value, dict):
                    found[flags[key].dest] = Given(self._read(parser, flags[key], section, key, value), section, key)
                elif section or not isinstance(value, dict):
                    self._check_known(section, words, key, isinstance(value, dict))
        return found

    def place(self, section: tuple[str, ...], key: str) -> str:
        """Returns the file, with the line number if it is known."""
        table: tuple[str, ...] = ()
        for number, line in enumerate(self.path.read_text(encoding="utf-8-sig").splitlines(), 1):
            with contextlib.suppress(ValueError):
                keys = tuple(_keys(tomllib.loads(line)))
                if line.lstrip().startswith("["):
                    table = keys
                if keys and (*(() if keys == table else table), *keys)[: len(section) + 1] == (*section, key):
                    return f"{self.path}:{number}"
        return str(self.path)

    def _sections(
        self, command: Sequence[str], for_model: Callable[[str], bool]
    ) -> Iterator[tuple[tuple[str, ...], Sequence[str], dict[str, Any]]]:
        """Yields (keys, words of the command, table), in the order in which later ones win."""
        for begin, table in (((), self._top), *(((_MODEL, name), self._table(table, (_MODEL,), name))
                                                for name, table in self.models.items() if for_model(name))):
            yield begin, (), table
            for i, word in enumerate(command):
                table = self._table(table.get(word, {}), (*begin, *command[:i]), word)
                yield (*begin, *command[: i + 1]), command[: i + 1], table

    def _table(self, value: Any, section: tuple[str, ...], key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise PyorchError(f"{self.place(section, key)}: {key} is a value, and has to be a table: "
                              f"[{'.'.join((*section, key))}]")
        return value

    def _read(
        self, parser: argparse.ArgumentParser, action: argparse.Action, section: tuple[str, ...], key: str, value: Any
    ) -> Any:
        """Reads a value as the flag does."""
        try:
            if action.nargs == 0:
                if not isinstance(value, bool):
                    raise PyorchError(f"{key} is {json.dumps(value, default=str)}, and must be true or false")
                return action.const if value else not action.const if isinstance(action.const, bool) else None
            repeated = isinstance(action, (argparse._AppendAction, argparse._ExtendAction))
            several = repeated or action.nargs is not None
            texts = [_text(key, one) for one in (value if several and isinstance(value, list) else [value])]
            if repeated and action.nargs is None:
                return _Default(parser._get_values(action, [text]) for text in texts)
            read = parser._get_values(action, texts)
            if action.dest in (parser.get_default("settings_flags") or ()) and not action.metavar.endswith(",..."):
                OPTIONS[action.dest].parse(read)
            return _Default(read) if repeated else read
        except (argparse.ArgumentError, PyorchError) as error:
            raise PyorchError(f"{self.place(section, key)}: {error}") from None

    def _check_known(self, section: tuple[str, ...], words: Sequence[str], key: str, is_table: bool) -> None:
        """Refuses a key that is no flag of the command or its subcommands, and no name of a subcommand."""
        if not words and key in (cli.COMMANDS if is_table else [option.long_flag[2:] for option in OPTIONS.values()]):
            return  # other commands need no look
        parser = cli.make_parser(words[:1] or cli.COMMANDS)
        for word in words:
            parser = cli.nested(parser)[word]
        known = cli.nested(parser) if is_table else {
            name for _, below in cli.with_nested(parser) for name in cli.flags(below)}
        if key not in known:
            raise self._unknown(section, key, known)

    def _unknown(self, section: tuple[str, ...], key: str, known: Iterable[str]) -> PyorchError:
        meant = difflib.get_close_matches(key, known, 1)
        return PyorchError(f'{self.place(section, key)}: nothing is called "{key}"'
                           + (f": did you mean {meant[0]}?" if meant else ", here"))


def matching(model: str) -> Callable[[str], bool]:
    """Returns a test whether a name in [model.NAME] means this model.

    The name, a pattern, must match the beginning of the file's name or of the hub's repository.
    """
    names = {model, Path(model).name, Path(find(model) or model).name}
    return lambda pattern: any(fnmatch.fnmatch(name.casefold(), f"{pattern.casefold()}*") for name in names)


def _keys(parsed: dict[str, Any]) -> Iterator[str]:
    """Yields the keys that a line of TOML sets, or the keys of the table that it begins."""
    while isinstance(parsed, dict) and len(parsed) == 1:
        (key, parsed), = parsed.items()
        yield key


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise PyorchError(f"{key} is {json.dumps(value, default=str)}, and must be a text or a number")
    return os.path.expanduser(str(value))  # as a shell would


EXAMPLE = "pyorch config serve olmoe.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += f" The file is {cli.config_path()}, or FILE of pyorch --config FILE. " \
                          "docs/reference/commands.md describes it."
    parser.add_argument("words", nargs="*", metavar="COMMAND [MODEL]", help="the command and model (default: run)")
    parser.add_argument("--json", action="store_true", help="print it as a JSON array")


def run(args: argparse.Namespace) -> int:
    configuration = cli.configuration()
    if configuration is not None:  # checks the whole file
        for _, parser in cli.with_nested(cli.make_parser(cli.COMMANDS)):
            configuration.values(parser, lambda _: True)
    words, parser, shown = list(args.words or ("run",)), cli.make_parser(cli.COMMANDS), []
    while words and words[0] in cli.nested(parser):
        shown.append(words[0])
        parser = cli.nested(parser)[words.pop(0)]
    if not shown or len(words) > 1:
        raise PyorchError(f'"{" ".join(args.words)}" is not a command, or a command and a model')
    values = configuration.values(parser, matching(words[0]) if words else lambda _: False) if configuration else {}
    rows = []
    for action in dict.fromkeys(cli.flags(parser).values()):
        given = values.get(action.dest)
        value = _shown(action, action.default if given is None else given.value)
        where = "default" if given is None else configuration.place(given.section, given.key)
        rows.append((max(action.option_strings, key=len).lstrip("-"), value, where))
    path = configuration.path if configuration else f"{cli.config_path()}, which is not there"
    return answer(args, [{"name": name, "value": value, "from": where} for name, value, where in rows], lambda: [
        Facts([("file", str(path)), ("for", " ".join([*shown, *words]))]), "",
        Table(("flag", "value", "from"), [(name, _text_of(value), where) for name, value, where in rows],
              left=("flag", "value", "from"))])


def _text_of(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shown(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:
        return value is not None and value == action.const
    if value is None:  # the help text's default, with names filled in
        default = re.search(r"\(default: ((?:[^()]|\([^()]*\))*)\)$", with_names(action.help or "").replace("%%", "%"))
        return default and default[1]
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
