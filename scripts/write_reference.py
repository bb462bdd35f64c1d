"""Writes the pages of docs/reference that are made from the code:

    python -m scripts.write_reference

Options come from the parsers of the commands, settings from Settings and Substitution, metrics from pyorch.h, the
Python API from docstrings, and the C API from the headers. tests/test_docs.py compares the pages with the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyorch
from pyorch import cli
from pyorch.library.choices import with_names
from pyorch.serve import metrics
from pyorch.settings.option import Option, options
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import Substitution

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
HEADERS = ("pyorch.h", "pyorch-devices.h", "pyorch-cluster.h", "pyorch-server.h", "pyorch-replay.h")
_SHARED = 3  # commands at least
_WRITTEN = "<!-- Written by `python -m scripts.write_reference`. Change its source, not this page. -->"


def pages() -> dict[str, str]:
    """The text of each page, by file name in docs/reference."""
    written: dict[str, Callable[[], Iterator[str]]] = {
        "options.md": _options, "settings.md": _settings, "metrics.md": _metrics, "python-api.md": _python,
        "c-api.md": _c}
    return {name: f"{_WRITTEN}\n\n" + "\n".join(lines()).rstrip() + "\n" for name, lines in written.items()}


def _options() -> Iterator[str]:
    yield "# Options of every command\n"
    yield ("Which options does a command take, and what does each do? [commands.md](commands.md) says what the "
           "commands are for.\nOptions that several commands take alike are [at the end](#shared-options).\n")
    parser = cli.make_parser([*cli.COMMANDS])
    commands = dict(_commands("", parser))
    counts = Counter(row for rows in commands.values() for row in set(rows.values()))
    shared: dict[str, str] = {}
    for name, rows in commands.items():
        if not rows:
            continue
        yield f"## pyorch {name}\n"
        yield _wrapped(_description(_parser_of(parser, name)))
        own = [row for row in rows.values() if counts[row] < _SHARED]
        if own:
            yield "\n".join(["| option | effect |", "| --- | --- |", *own, ""])
        others = {flag: row for flag, row in rows.items() if counts[row] >= _SHARED}
        if others:
            yield _wrapped(f"Shared: {', '.join(others)}.")
        shared |= others
    yield "## Shared options\n\n| option | effect |\n| --- | --- |"
    yield from shared.values()


def _commands(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, dict[str, str]]]:
    """Names of commands and of their kinds, and of each the rows of its options by the first name of the option."""
    for name, nested in cli.nested(parser).items():
        rows = {}
        for action in nested._actions:
            if row := _option_row(nested, action):
                rows[f"`{(action.option_strings or [row.split('`')[1]])[-1]}`"] = row
        yield f"{prefix}{name}", rows
        yield from _commands(f"{prefix}{name} ", nested)


def _parser_of(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    for word in name.split():
        parser = cli.nested(parser)[word]
    return parser


def _option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> str | None:
    if action.help == argparse.SUPPRESS or action.dest == "help" or isinstance(action, argparse._SubParsersAction):
        return None
    value = parser._get_formatter()._metavar_formatter(action, action.dest.upper())(1)[0] if action.nargs != 0 else ""
    names = [f"`{f'{flag} {value}'.strip()}`" for flag in action.option_strings] or [f"`{value}`"]
    return f"| {', '.join(names)} | {_cell(parser._get_formatter()._expand_help(action))} |".replace("\\|`", "|`")


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield ("Which keywords do `pyorch.load()` and `pyorch.manage()` take, and which flag of the commands is each? A "
           "settings\nfile has the flags without their dashes.\n")
    yield "| keyword | flag | takes | default | effect |\n| --- | --- | --- | --- | --- |"
    yield from map(_setting_row, options(Settings).values())
    yield "\n## Lossy settings\n"
    yield "Fields of `pyorch.Substitution`, as `--lossy NAME=VALUE,...` takes them.\n"
    yield "| name | symbol | takes | default | effect |\n| --- | --- | --- | --- | --- |"
    for option in options(Substitution).values():
        symbol = f"`{option.name}`" if option.plain else ""
        yield (f"| `{option.plain or option.name}` | {symbol} | {_cell(option.kind)} | {_default(option)} | "
               f"{_cell(option.help)} |")


def _setting_row(option: Option) -> str:
    flag = f"{option.long_flag} {_cell(option.metavar or '')}".strip()
    return (f"| `{option.name}` | `{flag}` | {_cell(option.kind or 'a flag')} | "
            f"{_default(option)} | {_cell(option.help)} |")


def _default(option: Option) -> str:
    default = option.default_text or option.plain_default
    return "" if default is None else _cell(str(default))


def _metrics() -> Iterator[str]:
    yield "# Metrics\n"
    yield ("Which numbers does `GET /metrics` of `pyorch serve` have beside llama-server's own? A metric whose last "
           "column says\n\"yes\" has a second form `pyorch_layer_...` with the label `layer`.\n")
    yield "| metric | type | meaning | by layer |\n| --- | --- | --- | --- |"
    for name, text in metrics.QUEUE:
        yield f"| `pyorch_{name}` | gauge | {_cell(text)} | |"
    for metric in metrics.declared(on_device=True):
        kind = "gauge" if metric.is_gauge else "counter"
        yield f"| `pyorch_{metric.name}` | {kind} | {_cell(metric.text)} | {'yes' if metric.of_layers else ''} |"


def _python() -> Iterator[str]:
    yield "# Python API\n"
    yield ("Which classes and functions does `import pyorch` offer? [python.md](../how-to/python.md) shows how to use "
           "them.\n")
    for name in sorted(pyorch._HOMES, key=str.lower):
        thing = getattr(pyorch, name)
        yield from _documented("##", name, thing)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (function := _function_of(value)) and function.__doc__:
                    yield from _documented("###", f"{name}.{member}", value)


def _function_of(value: object) -> object | None:
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    return value.fget if isinstance(value, property) else value if inspect.isfunction(value) else None


def _documented(mark: str, name: str, thing: object) -> Iterator[str]:
    yield f"{mark} {name}\n"
    function = thing if inspect.isclass(thing) else _function_of(thing)
    if inspect.isfunction(function) and not isinstance(thing, property):
        yield f"```python\n{_signature(name, function)}\n```\n"
    doc = inspect.cleandoc(function.__doc__ or "")
    yield f"{_docstring(doc)}\n"
    if dataclasses.is_dataclass(thing):
        yield f"Fields: {', '.join(f'`{field.name}`' for field in dataclasses.fields(thing))}.\n"


def _signature(name: str, function: object) -> str:
    parameters = [_parameter(parameter) for parameter in inspect.signature(function).parameters.values()
                  if parameter.name not in ("self", "cls")]
    return "\n".join(textwrap.wrap(f"{name}({', '.join(parameters)})", 110, subsequent_indent="    "))


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = parameter.default
    return f"{star}{parameter.name}" + ("" if default is inspect.Parameter.empty else f"={default!r}")


def _docstring(doc: str) -> str:
    """Google style in Markdown: the lists of arguments, results and errors become lists."""
    out, section = [], ""
    for line in doc.split("\n"):
        if found := re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples):", line):
            section = found[1]
            out.append(f"\n**{section}**\n")
        elif section and line.startswith("    "):
            entry = re.match(r"    (\**[\w, *]+)(?: \([^)]*\))?: (.*)", line)
            out.append(f"- `{entry[1]}`: {entry[2]}" if entry and section not in ("Returns", "Yields") else
                       f"  {line.strip()}" if out[-1].startswith(("- ", "  ")) else line.strip())
        else:
            section = section if not line.strip() else ""
            out.append(line)
    return "\n".join(out)


def _c() -> Iterator[str]:
    yield "# C API\n"
    yield ("Which functions does libpyorch have, and in which header? The headers in `native/include` say the rest: "
           "arguments,\nerrors, structs and constants.\n")
    for header in HEADERS:
        text = (ROOT / "native/include" / header).read_text(encoding="utf-8")
        yield f"## {header}\n"
        if head := re.match(r"(?://.*\n)+", text):
            yield f"{_comment(head[0])}\n"
        yield "| function | does |\n| --- | --- |"
        for comment, name, trailing in _FUNCTION.findall(text):
            yield f"| `{name}` | {_first_sentence(_comment(comment) or _comment(trailing))} |"
        yield ""


# The comment before a declaration, the name of the function, and a comment behind the declaration.
_FUNCTION = re.compile(
    r"((?:^//.*\n)*)^[a-z][\w ]*[ *]+(pyorch_\w+)\((?:[^()]|\([^()]*\))*\);(?: *(//.*))?", re.MULTILINE)


def _first_sentence(text: str) -> str:
    return _cell(re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0])


def _comment(text: str) -> str:
    return "\n".join(line.removeprefix("//").strip() for line in text.strip().split("\n"))


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)) + "\n"


def _description(parser: argparse.ArgumentParser) -> str:
    return with_names(parser.description or "").replace(str(cli.config_path()), "~/.config/pyorch/config.toml")


def _cell(text: str) -> str:
    return " ".join(with_names(text).split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    argparse.ArgumentParser("python -m scripts.write_reference", description=__doc__).parse_args()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
