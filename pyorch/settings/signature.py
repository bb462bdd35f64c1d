"""What help() says of a function that takes the options of Settings as keywords.

Editors read sources: pyorch/signatures.pyi has the same for them, as `python -m scripts.write_signatures` writes it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection
from typing import Any

from pyorch.library.choices import with_names
from pyorch.settings.option import Option, options
from pyorch.settings.settings import Settings

_WIDTH = 110


def describe(function: Callable[..., Any], without: Collection[str] = ()) -> None:
    """Adds the options that a function takes as keywords of any name to its signature, and a line for each to its
    docstring, in place of {options}."""
    signature = inspect.signature(function)
    *named, others = signature.parameters.values()
    declared = [option for option in options(Settings).values()
                if option.name not in signature.parameters and option.name not in without]
    keywords = [inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.plain_default,
                                  annotation=option.accepts) for option in declared]
    function.__signature__ = signature.replace(parameters=[*named, *keywords, others])  # type: ignore[attr-defined]
    function.__doc__ = (function.__doc__ or "").replace("{options}", "\n".join(map(_line, declared)).lstrip())


def _line(option: Option) -> str:
    meant = f"{not option.default}: " if option.metavar is None else ""  # the help is that of a flag
    default = f" (default: {option.default_text})" if option.default_text else ""
    return textwrap.fill(with_names(f"{option.name}: {meant}{option.help}{default}"), _WIDTH,
                         initial_indent=" " * 8, subsequent_indent=" " * 12)
