"""The default text: English prose and programs, which every machine with Python has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path

from pyorch.files import write_text

_CHARACTERS = 3000  # of a piece. Prose and programs alternate, so a reader that stops early has both.
_MODULES = ("argparse", "textwrap", "statistics", "heapq", "csv", "difflib", "tarfile", "shutil", "subprocess", "ast")


def write_default_text(path: Path) -> None:
    """Writes about 700 KB of text into a file of documents (pyorch.traces.data), unless the file has them already."""
    pieces = filter(None, chain.from_iterable(zip_longest(_prose(), _programs())))
    text = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
    with contextlib.suppress(OSError, ValueError):
        if path.read_text(encoding="utf-8") == text:
            return
    write_text(path, text)


def _prose() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:  # a reduced Python
        topics = {}
    for name in sorted(topics):
        yield from _cut(topics[name])


def _programs() -> Iterator[str]:
    for name in _MODULES:
        found = find_spec(name)
        if found is not None and found.origin is not None and found.origin.endswith(".py"):
            yield from _cut(Path(found.origin).read_text(encoding="utf-8"))


def _cut(text: str) -> Iterator[str]:
    return (text[at : at + _CHARACTERS] for at in range(0, len(text), _CHARACTERS))
