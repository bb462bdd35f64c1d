"""Shares: a model for one of several servers, with its experts only: a slim model, and beside it a pack that lacks the
experts of the others (docs/how-to/cluster.md, docs/reference/packs.md).
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
    """path: of the slim model. n_experts: of all layers; n_bytes: of both files. written: False: both were there."""

    path: Path
    n_experts: int
    n_bytes: int
    written: bool


def share_for(layers: list[LayerInfo], held: dict[int, np.ndarray]) -> Share:
    """The experts that a server needs in its files, by layer (il), bool[n_expert].

    held: those that it is to compute, of the layers that run for every token. Others, which only predict further
    tokens, it computes itself. It has one expert of each layer at least, which llama.cpp's warm-up computes with.
    """
    share = {layer.il: held.get(layer.il, np.ones(layer.n_expert, bool))[: layer.n_expert].copy() for layer in layers}
    for row in share.values():
        row[0] |= not row.any()
    return share


def write_share(
    model: str | os.PathLike[str], target: Path, share: Share, on_progress: OnProgress | None = None
) -> WrittenShare:
    """Writes a slim model to `target`, whose directory it makes, and beside it the pack with a share of the experts;
    what is there as it is to be stays. Each file appears whole or not at all. Raises PyorchError."""
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
            raise PyorchError(f"{target} is there, and is not the slim model that belongs there: name another "
                              "directory")
        if path.exists() and not (has_pack or container.is_sidecar_of(path, model_map, packs.KIND)):
            raise PyorchError(f"{path} is there, and is not a pack of {model_map.path}: name another directory")
        if not has_pack:
            spare_bytes = 0 if has_slim else slim_bytes(model_map)
            pack(model, path, share=share, spare_bytes=spare_bytes, on_progress=on_progress)
        if not has_slim:  # last: it is of no use without its pack
            write_slim(model_map, target)
        if not _has(target, digest):  # what an interrupted run left may have been damaged
            path.unlink()
            raise PyorchError(f"{path} was damaged while it was written, and is thrown away: run the command again")
    return WrittenShare(target, n_experts, target.stat().st_size + path.stat().st_size, not (has_pack and has_slim))


def _is_share(path: Path, model_map: ModelMap, digest: str) -> bool:
    try:
        metadata, _ = packs.read(path, model_map)
    except FormatError:
        return False
    return metadata.get(packs.SHARE) == digest


def _has(target: Path, digest: str) -> bool:
    """Whether the pack beside a slim model has these experts by its index."""
    try:
        with packs.open_model(target, share=True) as model_map:
            share = packs.share_of(model_map)
            return share is not None and packs.share_digest(share) == digest
    except FormatError:
        return False
