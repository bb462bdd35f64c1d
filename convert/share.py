"""Writes shares: a slim model for one of several servers, and next to it a pack without the other servers' experts.

See docs/how-to/cluster.md and docs/reference/packs.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch.convert.pack import OnProgress, pack
from pyorch.convert.pack_plan import Share
from pyorch.convert.slim import check_slim, is_slim_of, slim_bytes, write_slim
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import LayerInfo, ModelMap
from pyorch.sidecars import container, packs


@dataclass(frozen=True)
class WrittenShare:
    """A share. path: of the slim model; n_experts: of all layers; n_bytes: of both files; written: not both existed."""

    path: Path
    n_experts: int
    n_bytes: int
    written: bool


def share_for(layers: list[LayerInfo], held: dict[int, np.ndarray]) -> Share:
    """Returns the experts that a server needs in its files, by layer (il), bool[n_expert].

    These are the experts that it computes, of the layers that run for every token (`held`); all experts of other
    layers, which only predict further tokens; and at least one expert of each layer, for llama.cpp's warm-up.
    """
    share = {layer.il: held.get(layer.il, np.ones(layer.n_expert, bool))[: layer.n_expert].copy() for layer in layers}
    for row in share.values():
        row[0] |= not row.any()
    return share


def write_share(
    model: str | os.PathLike[str], target: Path, share: Share, on_progress: OnProgress | None = None
) -> WrittenShare:
    """Writes a slim model to `target`, whose directory it makes, and next to it the pack with a share of the experts.

    Correct files stay. Each file appears whole or not at all.

    Raises:
        PyorchError: Another file is in the way, or a file cannot be written.
    """
    target = target.absolute()
    path = container.default_path(target, packs.KIND)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PyorchError(f"the directory {target.parent} cannot be made: {error.strerror}") from None
    with ModelMap(model) as model_map:
        check_slim(model_map, target)
        n_experts = int(sum(row.sum() for row in share.values()))
        digest = packs.share_digest(share)
        has_slim = is_slim_of(target, model_map)
        has_pack = _has(target, digest) if has_slim else _is_share(path, model_map, digest)
        if target.exists() and not has_slim:
            raise PyorchError(f"{target} exists, and is not the slim model of this share: name another "
                              "directory")
        if path.exists() and not (has_pack or container.is_sidecar_of(path, model_map, packs.KIND)):
            raise PyorchError(f"{path} exists, and is not a pack of {model_map.path}: name another directory")
        if not has_pack:
            spare_bytes = 0 if has_slim else slim_bytes(model_map)
            pack(model, path, share=share, spare_bytes=spare_bytes, on_progress=on_progress)
        if not has_slim:  # last, because it is useless without its pack
            write_slim(model_map, target)
        if not _has(target, digest):  # the work of an interrupted run may have been damaged
            path.unlink()
            raise PyorchError(f"{path} was damaged while it was written, and is discarded: run the command again")
    return WrittenShare(target, n_experts, target.stat().st_size + path.stat().st_size, not (has_pack and has_slim))


def _is_share(path: Path, model_map: ModelMap, digest: str) -> bool:
    try:
        metadata, _ = packs.read(path, model_map)
    except FormatError:
        return False
    return metadata.get(packs.SHARE) == digest


def _has(target: Path, digest: str) -> bool:
    """Returns whether the pack next to a slim model has these experts by its index."""
    try:
        with packs.open_model(target, share=True) as model_map:
            share = packs.share_of(model_map)
            return share is not None and packs.share_digest(share) == digest
    except FormatError:
        return False
