"""Writes pyorch/signatures.pyi, in which editors and type checkers find the options of pyorch.load() and
pyorch.manage():

    python -m scripts.write_signatures

Only pyorch/settings/settings.py declares the options; tests/settings compares. In place of keywords of any name, the
file has those of llama_cpp.Llama, so that a type checker refuses a misspelt one.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import llama_cpp

import pyorch
from pyorch.settings.option import told

FILE = Path(__file__).parents[1] / "pyorch/signatures.pyi"

_HEAD = '''\
# Written by `python -m scripts.write_signatures` from the options in pyorch/settings/settings.py, for editors.

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyorch.llama import interception
from pyorch.llama.model import Model
from pyorch.runtime.callbacks import Source
from pyorch.settings.budget import Budget
from pyorch.settings.mirrors import Mirrors
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.settings.substitution import Substitution

'''


_PLAIN = {kind: kind for kind in ("bool", "float", "int", "str")} | {
    f"Optional[{kind}]": f"{kind} | None" for kind in ("bool", "float", "int", "str")}


def text() -> str:
    """Returns the content of the file."""
    manage = textwrap.indent(_function(pyorch.manage.__init__, "None", {}), "    ")
    return f"{_HEAD}{_function(pyorch.load, 'Model', _of_llama())}\nclass manage(interception.manage):\n{manage}"


def _of_llama() -> dict[str, inspect.Parameter]:
    """Returns the keywords of llama_cpp.Llama, with types that need no import, and without defaults."""
    parameters = inspect.signature(llama_cpp.Llama.__init__).parameters
    return {name: parameter.replace(annotation=_PLAIN.get(_named(parameter.annotation), "Any"), default=...)
            for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def _named(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _function(function: Callable[..., object], returned: str, others: Mapping[str, inspect.Parameter]) -> str:
    """Returns a function's stub. others: the keywords in place of keywords of any name."""
    lines, keywords = [], False
    parameters = dict(inspect.signature(function).parameters)
    _, rest = parameters.popitem()
    assert rest.kind is inspect.Parameter.VAR_KEYWORD
    parameters |= {name: parameter for name, parameter in others.items() if name not in parameters}
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            lines.append("*")
            keywords = True
        annotation = "" if name == "self" else f": {parameter.annotation}"
        default = parameter.default
        literal = "..." if default is ... else _literal(told(default))
        shown = "" if default is inspect.Parameter.empty else f" = {literal}"
        lines.append(f"{name}{annotation}{shown}")
    arguments = "".join(f"    {line},\n" for line in lines)
    body = textwrap.indent(f'"""{inspect.cleandoc(function.__doc__)}\n"""', "    ") if function.__doc__ else "    ..."
    return f"def {function.__name__}(\n{arguments}) -> {returned}:\n{body}\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main() -> int:
    argparse.ArgumentParser("python -m scripts.write_signatures", description=__doc__).parse_args()
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
