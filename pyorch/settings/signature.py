"""Signatures and docstrings of functions that take the options of Settings as keywords, for help().

Editors read pyorch/signatures.pyi in place of them; `python -m scripts.write_signatures` writes it.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Collection
from typing import Any

from pyorch.library.choices import with_names
from pyorch.settings.option import Option, options
from pyorch.settings.settings import Settings

_WIDTH = 110


def describe(function: Callable[..., Any], without: Collection[str] = ()) -> None:
    """Adds the options of Settings to the signature of a function, and to its docstring in place of {options}."""
    signature = inspect.signature(function)
    *named, others = signature.parameters.values()
    declared = [option for option in options(Settings).values()
                if option.name not in signature.parameters and option.name not in without]
    keywords = [inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.plain_default,
                                  annotation=option.accepts) for option in declared]
    function.__signature__ = signature.replace(parameters=[*named, *keywords, others])  # type: ignore[attr-defined]
    function.__doc__ = (function.__doc__ or "").replace("{options}", "\n".join(map(_line, declared)).lstrip())


def unknown_keyword(function: str, given: str, others: Collection[str] = ()) -> TypeError:
    """Returns the error for an unknown keyword, with the keyword that was probably meant.

    Args:
        function: The name of the function.
        given: The keyword that the function does not have. It may be the name of a flag, such as threads.
        others: Keywords of the function that are no options of Settings.
    """
    declared = options(Settings).values()
    meant = {name: name for name in (*others, *(option.name for option in declared))}
    for option in declared:
        value = f"={not option.default}" if option.metavar is None and option.flag else ""
        meant.setdefault(option.long_flag.removeprefix("--").replace("-", "_"), option.name + value)
    found = difflib.get_close_matches(given, meant, 1, 0.75)
    hint = f": did you mean {meant[found[0]]}?" if found else ""
    return TypeError(f"{function}() got an unexpected keyword argument '{given}'{hint}")


def _line(option: Option) -> str:
    meant = f"{not option.default}: " if option.metavar is None else ""  # the help text describes the flag
    default = f" (default: {option.default_text})" if option.default_text else ""
    return textwrap.fill(with_names(f"{option.name}: {meant}{option.help}{default}"), _WIDTH,
                         initial_indent=" " * 8, subsequent_indent=" " * 12)
