"""A text where nobody gives one: English prose and program text, which every machine with Python has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path

from pyorch.files import write_text

_CHARACTERS = 3000  # of a piece: prose and programs come by turns, however early a reader stops
_MODULES = ("argparse", "textwrap", "statistics", "heapq", "csv", "difflib", "tarfile", "shutil", "subprocess", "ast")


def write_default_text(path: Path) -> None:
    """Writes some 700 KB of it into a file of documents, as pyorch.traces.data reads them. One that has them stays."""
    pieces = filter(None, chain.from_iterable(zip_longest(_prose(), _programs())))
    text = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
    with contextlib.suppress(OSError, ValueError):
        if path.read_text(encoding="utf-8") == text:
            return
    write_text(path, text)


def _prose() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:  # of a Python that was made small
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
