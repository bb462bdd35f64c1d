"""What names a model on a command line: a file, or hf:ORG/NAME[:QUANT|/FILE] of the Hugging Face hub."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

from pyorch.cli.progress import Progress
from pyorch.errors import PyorchError

PREFIX = "hf:"
MODEL = "a GGUF file, or hf:ORG/NAME[:QUANT|/FILE] for one of the Hugging Face hub"  # what the argument may be


def is_of_hub(given: object) -> bool:
    return str(given).startswith(PREFIX)


def resolve(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Puts the path of the file in place of each model of the hub that a command was given; fetches what is missing.

    Raises PyorchError where there is no such model, or it does not come; and for a path that is no file, with what was
    probably meant.
    """
    for name in names:
        given = getattr(args, name)
        if is_of_hub(given):
            setattr(args, name, str(fetch_model(given)))
        else:
            _check_file(Path(given))


def _check_file(path: Path) -> None:
    if (path / "config.json").is_file():
        raise PyorchError(f"{path} is a directory, a checkpoint of Hugging Face's kind: pyorch convert "
                          f"{shlex.quote(str(path))} -o {shlex.quote(path.name)}.gguf makes a model of it")
    if path.is_dir():
        models = sorted(path.glob("*.gguf"))
        raise PyorchError(f"{path} is a directory, not a GGUF file" + (f"; {models[0]} is one" if models else ""))
    if not path.exists():
        near = [other.name for other in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
        meant = difflib.get_close_matches(path.name, near, 1)
        raise PyorchError(f"{path}: no such file" + (f"; did you mean {path.with_name(meant[0])}?" if meant else ""))


def fetch_model(name: str) -> Path:
    """The file of a model of the hub. Raises as resolve() does."""
    return _fetch(name, checkpoint=False)


def fetch_source(given: str | Path) -> Path:
    """What `pyorch convert` reads: a checkpoint, or one GGUF file of a repository. Raises as resolve() does."""
    from pyorch.hub.reference import Reference

    return _fetch(str(given), checkpoint=Reference.parse(str(given)).whole)


def _fetch(name: str, checkpoint: bool) -> Path:
    from pyorch.hub.download import Hub
    from pyorch.hub.reference import Reference

    reference, hub = Reference.parse(name), Hub()
    fetch = hub.checkpoint if checkpoint else hub.model
    with Progress() as progress:
        return fetch(reference, progress.update, lambda note: progress.say(f"note: {note}"))
