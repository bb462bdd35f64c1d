"""Stores measurements of this machine in the user's cache directory.

Entries do not expire. The measuring code chooses their names and checks their content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.files import write_text


def directory() -> Path | None:
    """Returns the directory. None: there is no home, or the directory can be neither made nor read."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        found = (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "pyorch"
        found.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return None
    return found if os.access(found, os.R_OK | os.X_OK) else None


def can_keep() -> bool:
    """Returns whether keep() can write."""
    found = directory()
    return found is not None and os.access(found, os.W_OK | os.X_OK)


def read(name: str) -> Any:
    """Returns the entry of a name. None: there is none, or it is no JSON."""
    found = directory()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads((found / f"{name}.json").read_text(encoding="utf-8")) if found is not None else None
    return None


def keep(name: str, measured: Any) -> None:
    """Stores an entry, if possible."""
    if can_keep():
        with contextlib.suppress(PyorchError):
            write_text(directory() / f"{name}.json", json.dumps(measured) + "\n")


def processor() -> str:
    """Returns the processor's name. "": the system does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return found[1] if found else ""
    return ""


def name_of(kind: str, what: Any) -> str:
    """Returns a name of fixed length for content that is too long to be a name."""
    return f"{kind}-{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}"
