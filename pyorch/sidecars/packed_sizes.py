"""How large the parts of compressed experts are, by the index of the pack that a model has attached."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, packs


@dataclass(frozen=True)
class PartSizes:
    """Of an expert of a layer, in bytes: its exponents (E), and all the rest (SM).

    e_bytes, sm_bytes: that are read, the mean over experts; e_memory, sm_memory: of the largest, in whole pages.
    n_shards: that exponents of a matrix are in, the most of any.
    """

    e_bytes: float
    sm_bytes: float
    e_memory: int
    sm_memory: int
    n_shards: int


def part_sizes(model_map: ModelMap) -> dict[int, PartSizes] | None:
    """By layer; None for a model without a pack, or with one whose experts are not compressed.

    FormatError if the pack is damaged.
    """
    if model_map.pack is None:
        return None
    _, arrays = container.read(model_map.pack, packs.KIND, packs.VERSION, model_map)
    sizes = {}
    for layer in model_map.layers:
        chunks = np.ascontiguousarray(arrays[packs.index_name(layer.il)]).view(packs.CHUNK).ravel()
        # Planes above 0 are shards of exponents; the last one of a matrix, and what is whole, is of the other part.
        matrix = chunks["expert"] * len(layer.roles) + chunks["role"]
        last = np.zeros(layer.n_expert * len(layer.roles), np.int64)
        np.maximum.at(last, matrix, chunks["plane"])
        is_e = chunks["plane"] < last[matrix]
        e, sm = (np.bincount(chunks["expert"], np.where(of, chunks["stored"], 0), layer.n_expert)
                 for of in (is_e, ~is_e))
        n_shards = int(max(1, last.max() - 1))
        sizes[layer.il] = PartSizes(float(e.mean()), float(sm.mean()), _pages(e), _pages(sm), n_shards)
    return sizes if any(size.e_bytes for size in sizes.values()) else None


def _pages(n_bytes: np.ndarray) -> int:
    return int(-(-n_bytes.max() // packs.PAGE) * packs.PAGE)
