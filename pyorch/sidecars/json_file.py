"""Sidecars in JSON, which people may read, with a kind, a version and the fingerprint of their model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pyorch.errors import FormatError
from pyorch.files import write_text
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container


def write(
    path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap, fields: dict[str, Any],
    indent: int | None = None,
) -> None:
    """Writes a sidecar, completely or not at all.

    Raises:
        PyorchError: It cannot be written.
    """
    value = {
        "kind": kind, "version": version, "model": Path(model_map.path).name,
        "fingerprint": container.fingerprint(model_map), **fields,
    }
    write_text(path, json.dumps(value, indent=indent) + "\n")


def read(
    path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap, command: str
) -> dict[str, Any]:
    """Returns the fields of a sidecar of this model, unchecked.

    Args:
        path: The file.
        kind: "pyorch" and the kind.
        version: The expected version.
        model_map: The model.
        command: The command of pyorch that makes the file.

    Raises:
        FormatError: There is no such file, or it has another kind, version or model.
    """
    value = read_any(path, kind, version, command)
    if value.get("fingerprint") != container.fingerprint(model_map):
        raise FormatError(f"{path} was made for another model, {value.get('model')}, not for {model_map.path}: "
                          f"{command} for this one")
    return value


def is_written_for(path: str | os.PathLike[str], model_map: ModelMap | None, kind: str) -> bool:
    """Whether a file is JSON of this kind, of any version, for this model; model_map None: for any model."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("kind") == kind and (
        model_map is None or value.get("fingerprint") == container.fingerprint(model_map))


def read_any(path: str | os.PathLike[str], kind: str, version: int, command: str) -> dict[str, Any]:
    """Returns the fields of a sidecar of any model. Raises the errors of read()."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f": `pyorch {command}` makes one" if isinstance(error, FileNotFoundError) else ""
        raise FormatError(f"{path} cannot be read: {error.strerror}{hint}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise FormatError(f"{path} is not a {kind.removeprefix('pyorch ')}: `pyorch {command}` makes one")
    if value.get("version") != version:
        raise FormatError(f"{path} has version {value.get('version')} of its format, this pyorch reads version "
                          f"{version}: {command} again")
    return value
