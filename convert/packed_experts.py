"""Matrices of experts, as packs are to hold them and as they hold them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np

from pyorch.errors import FormatError
from pyorch.runtime.model_map import LayerInfo, ModelMap
from pyorch.sidecars import packs


class Experts:
    """Reads matrices of experts from a model that has them itself, and leaves nothing of them in the page cache.

    layouts: of every matrix of every layer, into which it is brought.
    """

    def __init__(self, model_map: ModelMap, layouts: Sequence[str]) -> None:
        self._map = model_map
        matrices = [(layer.il, role) for layer in model_map.layers for role in range(len(layer.roles))]
        self._repacked = {matrix for matrix, layout in zip(matrices, layouts) if layout != packs.PLAIN}
        self._files: dict[str, int] = {}
        most = max(model_map.matrix_bytes(layer, role)
                   for layer in model_map.layers for role in range(len(layer.roles)))
        self._buffer = mmap.mmap(-1, most)

    def __enter__(self) -> Experts:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def read(self, layer: LayerInfo, expert: int, role: int) -> np.ndarray:
        """uint8[bytes of the matrix], valid until the next call. FormatError if it cannot be read."""
        where = self._map.expert_range(layer.il, expert, role)
        try:
            if where.path not in self._files:
                self._files[where.path] = os.open(where.path, os.O_RDONLY)
            descriptor = self._files[where.path]
            view, n = memoryview(self._buffer)[: where.size], 0
            while n < where.size:
                got = os.preadv(descriptor, [view[n:]], where.offset + n)
                if got == 0:
                    raise FormatError(
                        f"{where.path} is truncated: {where.size} bytes at {where.offset} are not all there")
                n += got
            forget(descriptor, where.offset, where.size)
        except OSError as error:
            raise FormatError(f"{where.path} cannot be read: {error.strerror}") from None
        if (layer.il, role) in self._repacked:
            self._map.repack(layer.il, role, view)
        return np.frombuffer(view, np.uint8)


def chunks_of(
    arrays: Mapping[str, np.ndarray], packed: ModelMap, layer: LayerInfo
) -> dict[tuple[int, int], np.ndarray]:
    """Of a layer, by expert and role: CHUNK[planes] by plane, with offsets from the start of the file.

    arrays: of the pack, whose index is no damaged one; packed: its map.
    """
    rows = np.sort(arrays[packs.index_name(layer.il)].view(packs.CHUNK)[:, 0], order=("expert", "role", "plane"))
    rows["offset"] += packed.tensor_range(packs.data_name(layer.il)).offset
    matrix = rows["expert"] * len(layer.roles) + rows["role"]
    groups = np.split(rows, np.flatnonzero(np.diff(matrix)) + 1)
    return {(int(group["expert"][0]), int(group["role"][0])): group for group in groups}


def forget(descriptor: int, offset: int, n_bytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)
