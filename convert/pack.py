"""Packs: the experts of a GGUF, one after another, in the sidecar model.experts.gguf (docs/packs.md)."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch import files
from pyorch.errors import FormatError, PyorchError
from pyorch.library.bindings import ffi, lib
from pyorch.runtime.model_map import LayerInfo, ModelMap
from pyorch.sidecars import container, packs
from pyorch.sizes import MiB

LAYOUTS = (packs.PLAIN, "native")  # as in the model; as this machine's kernels are fastest
OnProgress = Callable[[str, int, int], None]  # "packing" or "checking", bytes done, total

# What is packed is counted as done when so many bytes of it are on the disk: an interrupted run loses no more.
_STEP_BYTES = 256 * MiB


@dataclass(frozen=True)
class Packing:
    """What was written."""

    path: Path
    layout: str
    n_layers: int
    n_experts: int  # of all layers
    n_continued: int  # of them, those that an interrupted run had packed
    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class Check:
    """What a pack was found to be. damaged: experts whose bytes are not those of the model."""

    path: Path
    n_layers: int
    n_experts: int
    n_bytes: int
    damaged: tuple[str, ...]
    seconds: float


def pack(
    model: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, *, layout: str = LAYOUTS[0],
    spare_bytes: int = 0, on_progress: OnProgress | None = None,
) -> Packing:
    """Writes the pack of a model, beside it unless `target` says where. It appears whole or not at all.

    layout: one of LAYOUTS; native: only for machines whose kernels want the same order. spare_bytes: room that must be
    left on the disk for what the caller writes there afterwards.

    A run that was interrupted, or met a full disk, leaves what it has in a hidden file beside the target, and the next
    one goes on from there. No more than one expert is in memory. Raises PyorchError.
    """
    begin = time.monotonic()
    target = Path(target or container.default_path(model, packs.KIND)).absolute()
    files.check_target(target)
    with ModelMap(model) as model_map:
        if not model_map.layers:
            raise PyorchError(f"{model_map.path} has no routed experts: there is nothing to pack")
        if model_map.info.slim:
            raise PyorchError(f"{model_map.path} is slim: its experts are in its pack already")
        files.check_no_source(target, model_map.shards)
        plan = _Plan(model_map, layout)
        with files.continued(target) as (part, descriptor):
            try:
                n_continued = _write(plan, descriptor, target.parent, spare_bytes, on_progress)
                files.replace(part, target)
            except OSError as error:
                raise PyorchError(f"writing {part} failed: {error.strerror}; what was packed stays there, and the same "
                                  "command goes on from it") from None
        return Packing(target, layout, len(model_map.layers), plan.n_experts, n_continued, plan.n_bytes,
                       time.monotonic() - begin)


def check(
    model: str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, layout: str | None = None,
    on_progress: OnProgress | None = None,
) -> Check:
    """Compares every byte of every expert in a pack with the model, and with the checksums; of a slim model's pack,
    which alone has the bytes, with the checksums only.

    Raises FormatError for a pack that engines would refuse: of another model, or damaged where it says what is where;
    and for one in another layout, if one is asked for.
    """
    begin = time.monotonic()
    path = Path(path or container.default_path(model, packs.KIND)).absolute()
    with ModelMap(model) as model_map, ModelMap(model) as attached:
        metadata, arrays = container.read(path, packs.KIND, packs.VERSION, model_map)
        attached.attach_pack(path)  # which checks the index
        if layout is not None and metadata[packs.LAYOUTS] != _layouts(model_map, layout):
            raise FormatError(f"{path} does not hold the experts in the {layout} layout: make it again with --layout "
                              f"{layout}, or check it without")
        if model_map.info.slim:
            model_map.attach_pack(path)
        damaged, n_done, n_experts, total = [], 0, 0, model_map.info.expert_bytes
        with _Experts(model_map, metadata[packs.LAYOUTS]) as experts:
            for layer in model_map.layers:
                data = arrays[packs.data_name(layer.il)]
                index = arrays[packs.index_name(layer.il)].view(packs.CHUNK)[:, 0]
                for chunk in sorted(index, key=lambda chunk: (chunk["expert"], chunk["role"])):
                    raw = experts.read(layer, int(chunk["expert"]), int(chunk["role"]))
                    stored = data[chunk["offset"] : chunk["offset"] + chunk["stored"]]
                    if not np.array_equal(stored.view(np.uint8), raw) or _checksum(raw) != chunk["checksum"]:
                        name = layer.roles[chunk["role"]].name
                        damaged.append(f"expert {chunk['expert']} of blk.{layer.il}.ffn_{name}_exps")
                    n_done += len(raw)
                    if on_progress is not None:
                        on_progress("checking", n_done, total)
                n_experts += layer.n_expert
    return Check(path, len(model_map.layers), n_experts, path.stat().st_size, tuple(damaged), time.monotonic() - begin)


class _Experts:
    """Reads matrices of experts, and leaves nothing of them in the page cache.

    layouts: of every matrix of every layer, into which it is brought.
    """

    def __init__(self, model_map: ModelMap, layouts: Sequence[str]) -> None:
        self._map = model_map
        matrices = [(layer.il, role) for layer in model_map.layers for role in range(len(layer.roles))]
        # A slim model's experts come from the pack: they are in its layout already.
        self._repacked = set() if model_map.info.slim else {
            matrix for matrix, layout in zip(matrices, layouts) if layout != packs.PLAIN}
        self._files: dict[str, int] = {}
        most = max(model_map.expert_range(layer.il, 0, role).size
                   for layer in model_map.layers for role in range(len(layer.roles)))
        self._buffer = mmap.mmap(-1, most)

    def __enter__(self) -> _Experts:
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
            _forget(descriptor, where.offset, where.size)
        except OSError as error:
            raise FormatError(f"{where.path} cannot be read: {error.strerror}") from None
        if (layer.il, role) in self._repacked:
            self._map.repack(layer.il, role, view)
        return np.frombuffer(view, np.uint8)


class _Plan:
    """Where everything will lie in the pack of a model."""

    def __init__(self, model_map: ModelMap, layout: str) -> None:
        self.map = model_map
        self.layouts = _layouts(model_map, layout)
        self.layers = {layer.il: packs.role_offsets(model_map, layer) for layer in model_map.layers}
        self.n_experts = sum(layer.n_expert for layer in model_map.layers)
        self.header = self._header()
        self.index: dict[int, int] = {}  # offsets in the file, by layer
        self.data: dict[int, int] = {}
        at = len(self.header)
        for offsets, n_bytes in ((self.index, self._index_bytes), (self.data, self._data_bytes)):
            for layer in model_map.layers:
                offsets[layer.il] = at
                at += -(-n_bytes(layer) // packs.PAGE) * packs.PAGE
        self.n_bytes = at

    def _index_bytes(self, layer: LayerInfo) -> int:
        return layer.n_expert * len(layer.roles) * packs.CHUNK.itemsize

    def _data_bytes(self, layer: LayerInfo) -> int:
        return layer.n_expert * self.layers[layer.il][1]

    def _header(self) -> bytes:
        """All before the first tensor's data."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "header"
            writer = container.new_writer(path, packs.KIND, packs.VERSION, self.map, {packs.LAYOUTS: self.layouts})
            writer.add_custom_alignment(packs.PAGE)
            for layer in self.map.layers:
                n_chunks = layer.n_expert * len(layer.roles)
                writer.add_tensor_info(packs.index_name(layer.il), (n_chunks, len(packs.CHUNK)), np.dtype(np.int64),
                                       self._index_bytes(layer))
            for layer in self.map.layers:
                n_bytes = self._data_bytes(layer)
                writer.add_tensor_info(packs.data_name(layer.il), (n_bytes,), np.dtype(np.int8), n_bytes)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            header = path.read_bytes()
        return header.ljust(-(-len(header) // packs.PAGE) * packs.PAGE, b"\0")


def _layouts(model_map: ModelMap, layout: str) -> list[str]:
    """Of every matrix of every layer."""
    return [packs.PLAIN if layout == packs.PLAIN else role.layout
            for layer in model_map.layers for role in layer.roles]


def _write(
    plan: _Plan, descriptor: int, directory: Path, spare_bytes: int, on_progress: OnProgress | None
) -> int:
    """Packs what the file does not have yet. Returns how many experts it had.

    The index is the journal: a row is written when what it tells of is on the disk, and until then it is zeros.
    """
    if os.pread(descriptor, len(plan.header), 0) != plan.header or os.fstat(descriptor).st_size != plan.n_bytes:
        os.ftruncate(descriptor, 0)
        files.check_free_space(directory, plan.n_bytes + spare_bytes)
        os.ftruncate(descriptor, plan.n_bytes)
        _write_all(descriptor, plan.header, 0)
    else:
        missing = max(0, plan.n_bytes - os.fstat(descriptor).st_blocks * 512)
        files.check_free_space(directory, missing + spare_bytes)
    journal = _Journal(descriptor)
    n_continued = n_done = 0
    total = plan.map.info.expert_bytes
    try:
        with _Experts(plan.map, plan.layouts) as experts:
            for layer, expert, at, row_at in _records(plan):
                known = _read_all(descriptor, len(layer.roles) * packs.CHUNK.itemsize, row_at)
                if np.frombuffer(known, packs.CHUNK)["stored"].all():
                    n_continued += 1
                else:
                    record, rows = _record(plan, experts, layer, expert)
                    _write_all(descriptor, record, at)
                    journal.add(row_at, rows.tobytes(), at, len(record))
                n_done += layer.expert_bytes
                if on_progress is not None:
                    on_progress("packing", n_done, total)
    finally:
        journal.flush()
    return n_continued


class _Journal:
    """Rows of the index that wait until what they tell of is on the disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rows: list[tuple[int, bytes, int, int]] = []
        self._n_bytes = 0

    def add(self, at: int, rows: bytes, data_at: int, n_bytes: int) -> None:
        self._rows.append((at, rows, data_at, n_bytes))
        self._n_bytes += n_bytes
        if self._n_bytes >= _STEP_BYTES:
            self.flush()

    def flush(self) -> None:
        os.fdatasync(self._descriptor)
        for at, rows, data_at, n_bytes in self._rows:
            _write_all(self._descriptor, rows, at)
            _forget(self._descriptor, data_at, n_bytes)
        self._rows.clear()
        self._n_bytes = 0


def _records(plan: _Plan) -> Iterator[tuple[LayerInfo, int, int, int]]:
    """Of all experts: layer, expert, where its record begins in the file, and where its rows of the index."""
    for layer in plan.map.layers:
        _, record_bytes = plan.layers[layer.il]
        for expert in range(layer.n_expert):
            yield (layer, expert, plan.data[layer.il] + expert * record_bytes,
                   plan.index[layer.il] + expert * len(layer.roles) * packs.CHUNK.itemsize)


def _record(plan: _Plan, experts: _Experts, layer: LayerInfo, expert: int) -> tuple[np.ndarray, np.ndarray]:
    offsets, n_bytes = plan.layers[layer.il]
    record = np.zeros(n_bytes, np.uint8)
    rows = np.zeros(len(offsets), packs.CHUNK)
    for role, offset in enumerate(offsets):
        raw = experts.read(layer, expert, role)
        record[offset : offset + len(raw)] = raw
        rows[role] = (expert, role, 0, 0, expert * n_bytes + offset, len(raw), len(raw), _checksum(raw))
    return record, rows


def _checksum(data: np.ndarray) -> int:
    return lib.pyorch_checksum(ffi.from_buffer(data), len(data))


def _write_all(descriptor: int, data: bytes | np.ndarray, at: int) -> None:
    view, n = memoryview(data).cast("B"), 0
    while n < len(view):
        n += os.pwrite(descriptor, view[n:], at + n)


def _read_all(descriptor: int, n_bytes: int, at: int) -> bytes:
    """Of a file that is long enough."""
    data = b""
    while len(data) < n_bytes:
        data += os.pread(descriptor, n_bytes - len(data), at + len(data))
    return data


def _forget(descriptor: int, offset: int, n_bytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)
