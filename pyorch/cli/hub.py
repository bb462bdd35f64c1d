"""Names of models on the command line: a file, or hf:ORG/NAME[:QUANT|/FILE] of the Hugging Face hub."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from pyorch.cli.progress import Progress
from pyorch.errors import PyorchError

PREFIX = "hf:"
# The help text of the argument.
MODEL = ("a GGUF file, the beginning of a name that pyorch models lists, or hf:ORG/NAME[:QUANT|/FILE] of the Hugging "
         "Face hub")


def is_of_hub(given: object) -> bool:
    return str(given).startswith(PREFIX)


def resolve(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Replaces the names of models in `args` by paths, and downloads missing models of the hub.

    If args.fetch is False, names of the hub stay.

    Raises:
        PyorchError: A model does not exist or cannot be downloaded, or a path is no file. The sentence has a guess.
    """
    for name in names:
        given = getattr(args, name)
        if is_of_hub(given):
            if getattr(args, "fetch", True):
                setattr(args, name, str(fetch_model(given)))
        elif (found := find(given)) is not None:
            setattr(args, name, found)
        else:
            _check_file(Path(given))


def find(name: str) -> str | None:
    """Returns the file of the listed model whose name begins with `name`, in either case.

    Returns:
        None if `name` is a path, or if no listed model matches.

    Raises:
        PyorchError: Several models match, and none exactly.
    """
    if is_of_hub(name) or os.path.exists(name) or os.path.basename(name) != name or not name:
        return None
    from pyorch.hub import cache

    found = {}
    for stored in cache.listed():
        names = [os.path.basename(one).removesuffix(".gguf").casefold() for one in (stored.name, stored.files[0])]
        if not stored.checkpoint and any(own.startswith(name.casefold()) for own in names):
            found[stored.name] = stored, name.casefold() in names
    chosen = [stored for stored, exact in found.values() if exact] or [stored for stored, _ in found.values()]
    if len(chosen) > 1:
        raise PyorchError(f'"{name}" is the beginning of several models: say which of '
                          f"{', '.join(stored.name for stored in chosen)}")
    return str(chosen[0].files[0]) if chosen else None


def _check_file(path: Path) -> None:
    if (path / "config.json").is_file():
        raise PyorchError(f"{path} is a directory, a checkpoint of Hugging Face's kind: pyorch convert "
                          f"{shlex.quote(str(path))} -o {shlex.quote(path.name)}.gguf makes a model of it")
    if path.is_dir():
        from pyorch.hub.reference import is_sidecar

        models = [file for file in sorted(path.glob("*.gguf")) if not is_sidecar(file.name)]
        raise PyorchError(f"{path} is a directory, not a GGUF file" + (f"; {models[0]} is one" if models else ""))
    if not path.exists():
        near = [other.name for other in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
        meant = difflib.get_close_matches(path.name, near, 1)
        raise PyorchError(f"{path}: no such file" + (f"; did you mean {path.with_name(meant[0])}?" if meant else ""))


def fetch_model(name: str) -> Path:
    """Returns the file of a model of the hub, and downloads it if necessary.

    Raises:
        PyorchError: The model does not exist or cannot be downloaded.
    """
    return _fetch(name, checkpoint=False)


def fetch_source(given: str | Path) -> Path:
    """Returns the input of `pyorch convert`: a checkpoint, or one GGUF file of a repository.

    Raises:
        PyorchError: It does not exist or cannot be downloaded.
    """
    from pyorch.hub.reference import Reference

    return _fetch(str(given), checkpoint=Reference.parse(str(given)).whole)


def _fetch(name: str, checkpoint: bool) -> Path:
    from pyorch.hub.download import Hub
    from pyorch.hub.reference import Reference

    reference, hub = Reference.parse(name), Hub()
    fetch = hub.checkpoint if checkpoint else hub.model
    with Progress() as progress:
        return fetch(reference, progress.update, lambda note: progress.say(f"note: {note}"))
