"""`pyorch models`: lists the models on this machine, and removes them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import files
from pyorch.cli.options import add_command, answer, print_json
from pyorch.cli.tables import Table, show
from pyorch.errors import FormatError, PyorchError
from pyorch.sizes import format_bytes

if TYPE_CHECKING:
    from pyorch.hub.cache import Removal, Stored


@dataclass(frozen=True)
class Row:
    """The object that --json prints of a model. experts: "64 x 16" is 64 in each of 16 layers; "" for a dense model."""

    name: str
    path: Path
    kind: str
    experts: str
    n_bytes: int
    sidecars: dict[str, Path]
    sidecar_bytes: int


EXAMPLE = """pyorch models
  pyorch models list ~/models
  pyorch models rm hf:ORG/NAME:Q4_K_M"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " By default it lists the models of the hub's cache and of this folder, under the names that commands take. "
        "Commands also take the beginning of a file's name."
    )
    parser.add_argument("--json", action="store_true", help="print the models as a JSON array")
    parser.set_defaults(folders=[])
    kinds = parser.add_subparsers(dest="kind", metavar="ACTION", title="actions")
    listing = add_command(kinds, "list", "list the models of the hub's cache, of this folder, and of others",
                          "pyorch models list ~/models --json")
    listing.add_argument("folders", metavar="FOLDER", nargs="*", type=Path,
                         help="also list the models in this folder, and below it")
    listing.add_argument("--json", action="store_true", help="print the models as a JSON array")
    listing.set_defaults(run=run)
    removing = add_command(kinds, "rm", "remove models with their sidecars",
                           "pyorch models rm hf:ORG/NAME:Q4_K_M old.gguf")
    removing.add_argument("names", metavar="MODEL", nargs="+",
                          help="a model as pyorch models lists it; hf:ORG/NAME removes all its files from the cache")
    removing.add_argument("--yes", action="store_true", help="do not ask")
    removing.add_argument("--json", action="store_true", help="print what was removed as a JSON array")
    removing.set_defaults(run=_remove)


def run(args: argparse.Namespace) -> int:
    from pyorch.hub import cache

    found = cache.listed()
    for folder in args.folders:
        found += cache.in_folder(folder)
    rows = [_row(stored) for stored in found]
    return answer(args, rows, lambda: [_table(rows)] if rows else [
        f"no models, neither here nor in {cache.directory()}: pyorch run hf:ORG/NAME fetches one; pyorch models list "
        "FOLDER lists those of a folder"])


def _remove(args: argparse.Namespace) -> int:
    """Removes models. Returns 0, or 1 if the user declined.

    Raises:
        PyorchError: A name has no model; then nothing is removed. Or a file cannot be removed.
    """
    from pyorch.hub import cache

    removals = [cache.removal(name) for name in dict.fromkeys(args.names)]
    if not args.yes and not _agreed(removals):
        return 1
    for removal in removals:
        try:
            removal.execute()
        except OSError as error:
            raise PyorchError(f"{error.filename} cannot be removed: {error.strerror}") from None
        if not args.json:
            show([f"removed {removal.name}, {format_bytes(removal.n_bytes)}"])
    if args.json:
        print_json([{"name": removal.name, "files": removal.files, "n_bytes": removal.n_bytes} for removal in removals])
    return 0


def _agreed(removals: list[Removal]) -> bool:
    if not sys.stdin.isatty():
        raise PyorchError("there is no terminal on which to confirm the removal: say --yes")
    for removal in removals:
        show([f"{removal.name}: {format_bytes(removal.n_bytes)}", *(f"  {file}" for file in removal.files)], sys.stderr)
    print("remove? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _row(stored: Stored) -> Row:
    from pyorch.runtime.model_map import ModelMap

    path = stored.files[0].parent if stored.checkpoint else stored.files[0]
    kind, experts = "checkpoint", ""
    if not stored.checkpoint:
        try:
            with ModelMap(path) as model_map:
                info, layers, shards = model_map.info, model_map.layers, model_map.shards
            kind = f"{info.arch}, without weights" if files.has_holes(shards) else info.arch
            experts = f"{max(layer.n_expert for layer in layers)} x {len(layers)}" if layers else ""
        except FormatError as error:
            kind = "truncated" if "is truncated:" in str(error) else "damaged"
    return Row(stored.name, path, kind, experts, stored.n_bytes, stored.sidecars, stored.sidecar_bytes)


def _table(rows: list[Row]) -> Table:
    return Table(
        ("model", "kind", "experts x layers", "size", "sidecars", ""),
        [(row.name, row.kind, row.experts, format_bytes(row.n_bytes),
          format_bytes(row.sidecar_bytes) if row.sidecars else "", ", ".join(row.sidecars)) for row in rows],
        left=("model", "kind", ""),
    )
