"""Models of the Hugging Face hub in place of files: hf:ORG/NAME[:QUANT|/FILE]."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from pyorch.cli.progress import Progress

PREFIX = "hf:"
MODEL = "a GGUF file, or hf:ORG/NAME[:QUANT|/FILE] for one of the Hugging Face hub"  # what the argument may be


def is_of_hub(given: object) -> bool:
    return str(given).startswith(PREFIX)


def resolve(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Puts the path of the file in place of each model of the hub that a command was given; fetches what is missing.

    Raises PyorchError where there is no such model, or it does not come.
    """
    for name in names:
        given = getattr(args, name, None)
        if is_of_hub(given):
            setattr(args, name, str(_fetch(str(given), checkpoint=False)))


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
