"""How large the parts of compressed experts are, by the index of the pack that a model has attached."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import packs


@dataclass(frozen=True)
class PartSizes:
    """Of an expert of a layer, in bytes: its exponents (E), and all the rest (SM). Without planes it is all SM.

    e_bytes, sm_bytes: that are read, the mean over experts; e_memory, sm_memory: that a slot has, for the largest of
    the layers whose experts are as large (give_part_slots() in native/src/model/form.cpp), in whole pages. n_shards:
    that exponents of a matrix are in, the most of any.
    """

    e_bytes: float
    sm_bytes: float
    e_memory: int
    sm_memory: int
    n_shards: int


def part_sizes(model_map: ModelMap) -> dict[int, PartSizes] | None:
    """By layer, of those whose experts are compressed; None for a model without a pack, or where none are.

    FormatError if the pack is damaged.
    """
    if model_map.pack is None:
        return None
    _, arrays = packs.read(model_map.pack, model_map)
    sizes = {}
    for layer in model_map.layers:
        chunks = np.ascontiguousarray(arrays[packs.index_name(layer.il)]).view(packs.CHUNK).ravel()
        if not (chunks["codec"].any() or chunks["plane"].any()):
            continue
        # Planes above 0 are shards of exponents; the last one of a matrix, and what is whole, is of the other part.
        matrix = chunks["expert"] * len(layer.roles) + chunks["role"]
        last = np.zeros(layer.n_expert * len(layer.roles), np.int64)
        np.maximum.at(last, matrix, chunks["plane"])
        is_e = chunks["plane"] < last[matrix]
        e, sm = (np.bincount(chunks["expert"], np.where(of, chunks["stored"], 0), layer.n_expert)
                 for of in (is_e, ~is_e))
        n_shards = int(max(1, last.max() - 1))
        sizes[layer.il] = PartSizes(float(e.mean()), float(sm.mean()), _pages(e), _pages(sm), n_shards)
    return {il: _slots(il, sizes, model_map) for il in sizes} or None


def required_part_sizes(model_map: ModelMap) -> dict[int, PartSizes]:
    """The same. FormatError without a compressed pack, or for one that is damaged."""
    parts = part_sizes(model_map)
    if parts is None:
        beside = ""
        if model_map.pack is not None:
            beside = (f"; {model_map.pack.name} is not compressed, and need not be: 16-bit floats shrink, quantized "
                      "experts hardly do")
        raise FormatError(f"{model_map.path} has no compressed pack: make one with `pyorch pack --codec auto`{beside}")
    return parts


def require(model_map: ModelMap) -> None:
    """Attaches the compressed pack beside a model. FormatError if there is none, or it is refused."""
    if not model_map.layers:
        raise FormatError(f"{model_map.path} is a dense model: it has no experts that could be packed")
    refusal = packs.attach(model_map)
    if refusal:
        raise FormatError(refusal)
    required_part_sizes(model_map)


def _slots(il: int, sizes: dict[int, PartSizes], model_map: ModelMap) -> PartSizes:
    """Layers whose experts are as large have slots of one size."""
    expert_bytes = model_map.layer(il).expert_bytes
    alike = [size for other, size in sizes.items() if model_map.layer(other).expert_bytes == expert_bytes]
    return replace(sizes[il], e_memory=max(size.e_memory for size in alike),
                   sm_memory=max(size.sm_memory for size in alike))


def _pages(n_bytes: np.ndarray) -> int:
    return int(-(-n_bytes.max() // packs.PAGE) * packs.PAGE)
