"""Writes pyorch/signatures.pyi, by which editors know the options of pyorch.load() and pyorch.manage():

    python -m scripts.write_signatures

The options are declared in pyorch/settings/settings.py alone; tests/settings compares.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

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


def text() -> str:
    """What the file is to hold."""
    manage = textwrap.indent(_function(pyorch.manage.__init__, "None"), "    ")
    return f"{_HEAD}{_function(pyorch.load, 'Model')}\nclass manage(interception.manage):\n{manage}"


def _function(function: Callable[..., object], returned: str) -> str:
    lines, keywords = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            lines.append("*")
            keywords = True
        stars = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
        annotation = "" if name == "self" else f": {parameter.annotation}"
        default = parameter.default
        shown = "" if default is inspect.Parameter.empty else f" = {_literal(told(default))}"
        lines.append(f"{stars}{name}{annotation}{shown}")
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
