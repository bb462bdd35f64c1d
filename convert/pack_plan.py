"""Plans the places in a pack, and makes and reads the records of experts (docs/reference/packs.md)."""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from gguf.gguf_writer import WriterState

from pyorch.convert import compression
from pyorch.convert.compression import Scheme
from pyorch.errors import FormatError
from pyorch.files import forget, reading
from pyorch.library import codecs
from pyorch.runtime.model_map import LayerInfo, ModelMap
from pyorch.sidecars import container, packs
from pyorch.sidecars.container import checksum

Share = Mapping[int, np.ndarray]  # by layer (il), bool[n_expert]


class UnfitError(Exception):
    """A matrix of this tensor, given as layer and role, has more rare exponents than nibble has room for."""

    def __init__(self, il: int, role: int) -> None:
        super().__init__(f"blk.{il}, matrix {role}")
        self.tensor = (il, role)


class Plan:
    """The content of the pack of a model, and the places that are known before compressing.

    share: The experts to store, by layer, bool[n_expert]. None: all.
    """

    def __init__(
        self, model_map: ModelMap, layout: str, schemes: Sequence[Scheme], share: Share | None = None
    ) -> None:
        self.map, self.layout, self.share = model_map, layout, share
        self.layouts = layouts_of(model_map, layout)
        self._schemes = list(schemes)
        self.experts = {
            layer.il: list(range(layer.n_expert)) if share is None else np.flatnonzero(share[layer.il]).tolist()
            for layer in model_map.layers
        }
        self.n_experts = sum(map(len, self.experts.values()))
        self.expert_bytes = sum(len(self.experts[layer.il]) * layer.expert_bytes for layer in model_map.layers)
        of_matrices = iter(schemes)
        self.layers = {layer.il: LayerPlan(model_map, layer, [next(of_matrices) for _ in layer.roles])
                       for layer in model_map.layers}
        self.header = self.make_header({})
        self.index: dict[int, int] = {}  # offsets in the file, by layer
        at = len(self.header)
        for il, layer in self.layers.items():
            self.index[il] = at
            at += aligned(layer.index_bytes, packs.PAGE)
        self.data = at  # the start of the first layer's data; other layers follow each other

    @property
    def in_nibbles(self) -> bool:
        return any(scheme.codec == codecs.NIBBLE for scheme in self._schemes)

    def n_bytes(self, ratio: float) -> int:
        """Estimates the length of the file for a ratio of compression."""
        regions = 2 * packs.PAGE  # padding of a compressed record
        return self.data + sum(
            len(self.experts[il]) * (math.ceil(ratio * layer.info.expert_bytes) + regions if layer.is_compressed
                                     else layer.plain_bytes) for il, layer in self.layers.items())

    def make_header(self, data_bytes: dict[int, int]) -> bytes:
        """Returns everything before the data, with a length independent of sizes. data_bytes: by layer, default 0."""
        metadata: container.Metadata = {packs.LAYOUTS: self.layouts}
        if not all(scheme.is_plain for scheme in self._schemes):
            metadata[packs.CODECS] = list(map(str, self._schemes))
        if self.share is not None:
            metadata[packs.SHARE] = packs.share_digest(self.share)
        writer = container.new_writer(None, packs.KIND, packs.VERSION, self.map, metadata)
        writer.add_custom_alignment(packs.PAGE)
        for il, layer in self.layers.items():
            n_chunks = layer.index_bytes // packs.CHUNK.itemsize
            writer.add_tensor_info(packs.index_name(il), (n_chunks, len(packs.CHUNK)), np.dtype(np.int64),
                                   layer.index_bytes)
        for il in self.layers:
            n_bytes = data_bytes.get(il, 0)
            writer.add_tensor_info(packs.data_name(il), (n_bytes,), np.dtype(np.int8), n_bytes)
        file = io.BytesIO()  # a disk may be full
        writer.fout, writer.state = [file], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        header = file.getvalue()
        return header.ljust(aligned(len(header), packs.PAGE), b"\0")


def most_bytes(model_map: ModelMap) -> int:
    """Estimates the length of a pack whose experts do not shrink. A pack with a codec is shorter."""
    n_matrices = sum(len(layer.roles) for layer in model_map.layers)
    return Plan(model_map, packs.PLAIN, (Scheme(),) * n_matrices).n_bytes(1.0)


class LayerPlan:
    """The storage of a layer's experts."""

    def __init__(self, model_map: ModelMap, layer: LayerInfo, schemes: list[Scheme]) -> None:
        self.info = layer
        self.schemes = schemes
        self.is_compressed = not all(scheme.is_plain or scheme.codec == codecs.NIBBLE for scheme in schemes)
        self._sizes = [model_map.matrix_bytes(layer, index) for index in range(len(layer.roles))]
        for index, (role, scheme) in enumerate(zip(layer.roles, schemes)):
            if scheme.codec == codecs.NIBBLE:
                self._sizes[index] = codecs.nibble_bytes(role.type, role.n_in, self._sizes[index])
        self.plain_offsets, self.plain_bytes = packs.role_offsets(self._sizes)
        n_chunks = 0
        for index, (role, scheme) in enumerate(zip(layer.roles, schemes)):
            n_chunks += 1
            if scheme.n_shards:
                n = model_map.matrix_bytes(layer, index) * 8 // codecs.TYPES[role.type]
                n_chunks += -(-n // codecs.shard_numbers(n, scheme.n_shards))
        self.row_bytes = n_chunks * packs.CHUNK.itemsize  # of an expert
        self.index_bytes = layer.n_expert * self.row_bytes
        in_planes = any(scheme.n_shards for scheme in schemes)
        largest = max(layer.expert_bytes for layer in model_map.layers)
        # The alignment of each region of a record. Without planes, a reader may read the layer as a plain one.
        self.unit = packs.ALIGNMENT if in_planes and largest < packs.ALIGNED_BYTES else packs.PAGE

    def absent_rows(self, expert: int) -> np.ndarray:
        """Returns the rows of an expert that a share lacks, CHUNK[matrices]."""
        rows = np.zeros(len(self._sizes), packs.CHUNK)
        for role, size in enumerate(self._sizes):
            rows[role] = (expert, role, 0, codecs.NAMES.index(codecs.STORED), packs.NOWHERE, size, size, 0)
        return rows

    def record(self, expert: int, matrices: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns uint8[record], whole units; and its rows, CHUNK[chunks], with offsets in the record."""
        return self._compressed(expert, matrices) if self.is_compressed else self._plain(expert, matrices)

    def _plain(self, expert: int, matrices: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        record = np.zeros(self.plain_bytes, np.uint8)
        rows = np.zeros(len(self.plain_offsets), packs.CHUNK)
        for role, (offset, raw) in enumerate(zip(self.plain_offsets, matrices)):
            [(_, codec, n_raw, stored)] = compression.encode_matrix(raw, self.info.roles[role], self.schemes[role])
            if len(stored) != self._sizes[role]:
                raise UnfitError(self.info.il, role)
            record[offset : offset + len(stored)] = stored
            rows[role] = (expert, role, 0, codecs.NAMES.index(codec), offset, len(stored), n_raw, checksum(stored))
        return record, rows

    def _compressed(self, expert: int, matrices: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        chunks = [(role, *chunk) for role, raw in enumerate(matrices)
                  for chunk in compression.encode_matrix(raw, self.info.roles[role], self.schemes[role])]
        last = {role: plane for role, plane, *_ in chunks}
        is_exponents = [0 < plane < last[role] for role, plane, *_ in chunks]
        ends = [0, 0]  # of both regions
        offsets = []
        for exponents, (*_, stored) in zip(is_exponents, chunks):
            offsets.append(ends[0] if exponents else aligned(ends[1], packs.ALIGNMENT))
            ends[0 if exponents else 1] = offsets[-1] + len(stored)
        others = aligned(ends[0], self.unit)
        record = np.zeros(others + aligned(ends[1], self.unit), np.uint8)
        rows = np.zeros(len(chunks), packs.CHUNK)
        for i, (role, plane, codec, n_raw, stored) in enumerate(chunks):
            offset = offsets[i] + (0 if is_exponents[i] else others)
            record[offset : offset + len(stored)] = stored
            rows[i] = (expert, role, plane, codecs.NAMES.index(codec), offset, len(stored), n_raw, checksum(stored))
        return record, rows


def layouts_of(model_map: ModelMap, layout: str) -> list[str]:
    """Returns the layout of every matrix of every layer."""
    return [packs.PLAIN if layout == packs.PLAIN else role.layout
            for layer in model_map.layers for role in layer.roles]


def aligned(n_bytes: int, unit: int) -> int:
    return -(-n_bytes // unit) * unit


class Experts:
    """Reads matrices of experts from a model, and drops them from the page cache. The model must not be slim.

    layouts: Of every matrix of every layer, to which it is repacked.
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
        """Returns uint8[bytes of the matrix], valid until the next call. FormatError: it cannot be read."""
        where = self._map.expert_range(layer.il, expert, role)
        with reading(where.path):
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
        if (layer.il, role) in self._repacked:
            self._map.repack(layer.il, role, view)
        return np.frombuffer(view, np.uint8)


def chunks_of(
    arrays: Mapping[str, np.ndarray], packed: ModelMap, layer: LayerInfo
) -> dict[tuple[int, int], np.ndarray]:
    """Returns the chunks of a layer, by expert and role: CHUNK[planes] by plane, with offsets in the file.

    arrays: Of the pack, whose index must be checked. packed: Its map.
    """
    rows = np.sort(arrays[packs.index_name(layer.il)].view(packs.CHUNK)[:, 0], order=("expert", "role", "plane"))
    rows["offset"] += packed.tensor_range(packs.data_name(layer.il)).offset
    matrix = rows["expert"] * len(layer.roles) + rows["role"]
    groups = np.split(rows, np.flatnonzero(np.diff(matrix)) + 1)
    return {(int(group["expert"][0]), int(group["role"][0])): group for group in groups}
