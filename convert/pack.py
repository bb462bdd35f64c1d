"""Writes packs, which store the experts of a GGUF one after another in the sidecar model.experts.gguf, and checks them.

docs/reference/packs.md describes the format.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path

import gguf
import numpy as np

from pyorch import files
from pyorch.convert import compression
from pyorch.convert.compression import KindReport, Scheme
from pyorch.convert.pack_plan import Experts, Plan, Share, UnfitError, aligned, chunks_of, layouts_of
from pyorch.errors import FormatError, PyorchError
from pyorch.library import codecs
from pyorch.runtime.decompression import n_processors
from pyorch.runtime.model_map import LayerInfo, ModelMap, Role
from pyorch.sidecars import container, packs
from pyorch.sidecars.container import checksum
from pyorch.sizes import MiB, counted

LAYOUTS = (packs.PLAIN, "native")  # the model's, and the fastest for this machine's kernels
OnProgress = Callable[[str, int, int], None]  # "packing" or "checking", bytes done, total

# Progress counts bytes when so many more are on the disk; an interrupted run loses no more.
_STEP_BYTES = 256 * MiB

_SHOWN = 3  # tensors that a message names


@dataclass(frozen=True)
class Packing:
    """The written pack.

    Attributes:
        n_experts: Of all layers.
        n_continued: Experts that an interrupted run had packed.
        codecs: All codecs of stored matrices.
        ratio: Stored bytes of the experts relative to their bytes.
        kinds: Of a compressed pack, from a sample of the matrices.
        reason: Why it is compressed so. "": as the user asked.
    """

    path: Path
    layout: str
    n_layers: int
    n_experts: int
    n_continued: int
    n_bytes: int
    seconds: float
    codecs: tuple[str, ...]
    ratio: float
    kinds: tuple[KindReport, ...] = ()
    reason: str = ""


def pack(
    model: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, *, layout: str = LAYOUTS[0],
    codec: str = compression.NONE, level: int | None = None, shards: int | None = None, spare_bytes: int = 0,
    share: Share | None = None, on_progress: OnProgress | None = None,
) -> Packing:
    """Writes the pack of a model. It appears whole or not at all.

    An interrupted run, or one that met a full disk, leaves its work in a hidden file next to the target, and the next
    run continues it. At most a few experts per core are in memory.

    Args:
        model: The model.
        target: The pack. Default: next to the model.
        layout: One of LAYOUTS; native: only for machines whose kernels use the same order.
        codec, level, shards: See compression.choose().
        spare_bytes: Room that must remain on the disk for the slim model that the caller writes afterwards. 0: none.
        share: The experts for one of several servers, which needs the plain layout and no codec. None: all.
        on_progress: Called with the bytes done.

    Raises:
        FormatError: The model is damaged.
        PyorchError: The model has no experts or is slim, an option is invalid, or the pack cannot be written.
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
        with files.continued(target) as (part, descriptor):
            choice = _begun(part, model_map, layout, codec)
            if choice is None:
                with Experts(model_map, layouts_of(model_map, layout)) as experts:
                    choice = compression.choose(model_map, experts.read, codec, level, shards, slim=spare_bytes > 0)
            plan, unfit = Plan(model_map, layout, choice.schemes, share), []
            try:
                known = _begin(plan, choice.ratio, descriptor, target.parent, spare_bytes)
                n_continued = len(known)
                while True:
                    try:
                        stored_bytes = _write(plan, known, descriptor, on_progress)
                        break
                    except UnfitError as error:  # stores that tensor uncompressed, and repeats its layer
                        unfit.append(error.tensor)
                        choice = _without(choice, model_map, *error.tensor)
                        plan = _replanned(plan, choice, descriptor, error.tensor[0])
                        known = _begin(plan, choice.ratio, descriptor, target.parent, spare_bytes)
                        n_continued = min(n_continued, len(known))
                if n_continued and share is None:  # for a share, write_share() checks it together with its slim model
                    _check_index(model_map, part, descriptor)
                files.replace(part, target)
            except OSError as error:
                raise PyorchError(f"writing {part} failed: {error.strerror}; the packed experts stay there, and the "
                                  "same command continues from them") from None
        used = {scheme.codec for scheme in choice.schemes}
        return Packing(target, layout, len(model_map.layers), plan.n_experts, n_continued,
                       target.stat().st_size, time.monotonic() - begin,
                       tuple(name for name in codecs.NAMES if name in used),
                       stored_bytes / max(1, plan.expert_bytes), choice.kinds,
                       "; ".join(filter(None, (choice.reason, _unfit_sentence(unfit, model_map)))))


def _without(choice: compression.Choice, model_map: ModelMap, il: int, role: int) -> compression.Choice:
    """Returns the choice with one tensor stored uncompressed."""
    tensors = [(layer.il, index, matrix) for layer in model_map.layers for index, matrix in enumerate(layer.roles)]
    schemes = tuple(Scheme() if tensor[:2] == (il, role) else scheme for tensor, scheme in zip(tensors, choice.schemes))
    packed = {compression.name_of(matrix) for (*_, matrix), scheme in zip(tensors, schemes) if not scheme.is_plain}
    kinds = tuple(kind if kind.kind in packed else kind.as_it_is() for kind in choice.kinds)
    return replace(choice, schemes=schemes, kinds=kinds)


def _replanned(before: Plan, choice: compression.Choice, descriptor: int, il: int) -> Plan:
    """Returns the plan of another choice for a layer.

    If the header has the same length, as with nibble and uncompressed tensors, packed experts of other layers stay.
    """
    plan = Plan(before.map, before.layout, choice.schemes)
    if len(plan.header) == len(before.header):
        _write_all(descriptor, bytes(plan.layers[il].index_bytes), plan.index[il])
        os.fdatasync(descriptor)
        _write_all(descriptor, plan.header, 0)
    return plan


def _unfit_sentence(unfit: list[tuple[int, int]], model_map: ModelMap) -> str:
    if not unfit:
        return ""
    names = [f"blk.{il}.ffn_{model_map.layer(il).roles[role].name}_exps" for il, role in unfit]
    some = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return (f"{counted(len(names), 'tensor')} stored as in the model ({some}), where an expert has more rare exponents "
            f"than {codecs.NIBBLE} has room for")


def _check_index(model_map: ModelMap, part: Path, descriptor: int) -> None:
    """Empties the file and raises PyorchError if the work of an interrupted run was damaged."""
    with ModelMap(model_map.path) as attached:
        try:
            attached.attach_pack(part)
        except FormatError as error:
            os.ftruncate(descriptor, 0)
            raise PyorchError(f"{error}: the work of an interrupted run was damaged, and is discarded; run the same "
                              "command again") from None


def _begun(part: Path, model_map: ModelMap, layout: str, codec: str) -> compression.Choice | None:
    """Returns the choice of an interrupted run whose work can be continued with the present options, or None."""
    if codec not in (codecs.AUTO, codecs.NIBBLE):
        return None
    try:
        schemes = tuple(map(Scheme.parse, gguf.GGUFReader(part).fields[f"{packs.KIND}.{packs.CODECS}"].contents()))
    except (OSError, ValueError, IndexError, KeyError, OverflowError):  # no work, or of another command
        return None
    if len(schemes) != sum(len(layer.roles) for layer in model_map.layers):
        return None
    if codec == codecs.NIBBLE and not {scheme.codec for scheme in schemes} <= {codecs.NIBBLE, codecs.STORED}:
        return None
    header = Plan(model_map, layout, schemes).header
    with part.open("rb") as file:
        same = file.read(len(header)) == header
    return compression.Choice(schemes, (), "as the run that was interrupted chose") if same else None


_Known = list[tuple[int, int, np.ndarray]]  # packed experts: layer, number, and rows


def _begin(plan: Plan, ratio: float, descriptor: int, directory: Path, spare_bytes: int) -> _Known:
    """Begins the file as planned, and returns the experts that it has already.

    The index is the journal: a row is written when its record is on the disk, and is zeros before. Until all experts
    are packed, the header says that the layers are empty.
    """
    begun = os.pread(descriptor, len(plan.header), 0) == plan.header and os.fstat(descriptor).st_size >= plan.data
    if not begun:
        os.ftruncate(descriptor, 0)
    written = os.fstat(descriptor).st_blocks * 512
    files.check_free_space(directory, max(0, plan.n_bytes(ratio) - written) + spare_bytes, files.FEW_BYTES)
    if not begun:
        _write_all(descriptor, bytes(plan.data), 0)  # reserves room for rows on a disk that may become full
        for il, layer in plan.layers.items():
            for expert in sorted(set(range(layer.info.n_expert)) - set(plan.experts[il])):
                _write_all(descriptor, layer.absent_rows(expert), plan.index[il] + expert * layer.row_bytes)
        _write_all(descriptor, plan.header, 0)
    return _known_rows(plan, descriptor)


def _write(plan: Plan, known: _Known, descriptor: int, on_progress: OnProgress | None) -> int:
    """Packs the remaining experts, in order. Returns the bytes of all chunks."""
    journal = _Journal(descriptor)
    at, n_done, stored_bytes = plan.data, 0, 0
    layer_begin: dict[int, int] = {}
    data_bytes: dict[int, int] = {}

    def count(il: int, rows: np.ndarray) -> None:
        """Counts records on the disk."""
        nonlocal at, n_done, stored_bytes
        layer = plan.layers[il]
        end = layer_begin[il] + int((rows["offset"] + rows["stored"]).max())
        at = aligned(end, layer.unit if layer.is_compressed else packs.PAGE)
        data_bytes[il] = at - layer_begin[il]
        stored_bytes += int(rows["stored"].sum())
        n_done += layer.info.expert_bytes

    def report() -> None:
        if on_progress is not None:
            on_progress("packing", n_done, plan.expert_bytes)

    def begin(il: int) -> None:
        if il not in layer_begin:
            layer_begin[il] = aligned(at, packs.PAGE)

    try:
        for il, _, rows in known:
            begin(il)
            count(il, rows)
        report()
        with closing(_records(plan, len(known))) as records:
            for layer, expert, record, rows in records:
                begin(layer.il)
                record_at = max(at, layer_begin[layer.il])
                rows["offset"] += record_at - layer_begin[layer.il]
                _write_all(descriptor, record, record_at)
                row_at = plan.index[layer.il] + expert * plan.layers[layer.il].row_bytes
                journal.add(row_at, rows.tobytes(), record_at, len(record))
                count(layer.il, rows)
                report()
    finally:
        journal.flush()
    os.ftruncate(descriptor, aligned(at, packs.PAGE))
    _write_all(descriptor, plan.make_header(data_bytes), 0)
    return stored_bytes


def _known_rows(plan: Plan, descriptor: int) -> _Known:
    """Returns the packed experts up to the first that is missing or invalid."""
    known, n_bytes, at = [], os.fstat(descriptor).st_size, plan.data
    for il, layer in plan.layers.items():
        begin = at = aligned(at, packs.PAGE)
        for expert in plan.experts[il]:
            content = os.pread(descriptor, layer.row_bytes, plan.index[il] + expert * layer.row_bytes)
            rows = np.frombuffer(content, packs.CHUNK)
            offset, stored, rest = rows["offset"], rows["stored"], n_bytes - begin - rows["stored"]
            if not ((rows["expert"] == expert) & (stored > 0) & (offset >= at - begin) & (offset <= rest)).all():
                return known
            known.append((il, expert, rows))
            at = begin + int((offset + stored).max())
    return known


def _records(plan: Plan, n_known: int) -> Iterator[tuple[LayerInfo, int, np.ndarray, np.ndarray]]:
    """Yields all experts after the first n_known, in order: layer, number, record and rows.

    All cores compress. A limited number of records waits.
    """
    wanted = [(layer, expert) for layer in plan.map.layers for expert in plan.experts[layer.il]][n_known:]
    is_compressed = any(layer.is_compressed for layer in plan.layers.values())
    n_threads = n_processors() if is_compressed or plan.in_nibbles else 1
    of_thread = threading.local()
    with ExitStack() as stack:  # readers of threads end after them
        def make(layer: LayerInfo, expert: int) -> tuple[np.ndarray, np.ndarray]:
            if not hasattr(of_thread, "experts"):
                of_thread.experts = stack.enter_context(Experts(plan.map, plan.layouts))
            matrices = (of_thread.experts.read(layer, expert, role) for role in range(len(layer.roles)))
            return plan.layers[layer.il].record(expert, matrices)

        if n_threads == 1:
            for layer, expert in wanted:
                yield layer, expert, *make(layer, expert)
            return
        under_way: deque[tuple[LayerInfo, int, Future]] = deque()
        with ThreadPoolExecutor(n_threads) as pool:
            try:
                for layer, expert in wanted:
                    under_way.append((layer, expert, pool.submit(make, layer, expert)))
                    if len(under_way) > 2 * n_threads:
                        layer, expert, future = under_way.popleft()
                        yield layer, expert, *future.result()
                while under_way:
                    layer, expert, future = under_way.popleft()
                    yield layer, expert, *future.result()
            finally:
                for *_, future in under_way:
                    future.cancel()


class _Journal:
    """Rows of the index that wait until their records are on the disk."""

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
            files.forget(self._descriptor, data_at, n_bytes)
        self._rows.clear()
        self._n_bytes = 0


def _write_all(descriptor: int, data: bytes | np.ndarray, at: int) -> None:
    view, n = memoryview(data).cast("B"), 0
    while n < len(view):
        n += os.pwrite(descriptor, view[n:], at + n)



@dataclass(frozen=True)
class Check:
    """The result of a check. damaged: experts whose bytes are not the model's."""

    path: Path
    n_layers: int
    n_experts: int
    n_bytes: int
    damaged: tuple[str, ...]
    seconds: float


def check(
    model: str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, layout: str | None = None,
    on_progress: OnProgress | None = None,
) -> Check:
    """Compares every byte of every expert in a pack with the model and the checksums, and decodes compressed ones.

    Only the pack of a slim model has the bytes, so they are compared with the checksums only.

    Args:
        model: The model.
        path: The pack. Default: next to the model.
        layout: The layout that the pack must have. None: any.
        on_progress: Called with the bytes done.

    Raises:
        FormatError: The pack belongs to another model, its index is damaged, or it has another layout.
    """
    begin = time.monotonic()
    path = Path(path or container.default_path(model, packs.KIND)).absolute()
    with ModelMap(model) as model_map, ModelMap(model) as attached:
        metadata, arrays = packs.read(path, model_map)
        if packs.SHARE in metadata and not model_map.info.slim:
            raise FormatError(packs.beside_whole(path, arrays, model_map))
        attached.attach_pack(path)  # checks the index
        if layout is not None and metadata[packs.LAYOUTS] != layouts_of(model_map, layout):
            raise FormatError(f"{path} does not have the experts in the {layout} layout: make it again with --layout "
                              f"{layout}, or check it without")
        damaged, n_done, n_experts, total = [], 0, 0, model_map.info.expert_bytes
        with ExitStack() as stack:
            file, packed = stack.enter_context(path.open("rb", buffering=0)), stack.enter_context(ModelMap(path))
            experts = None if model_map.info.slim else stack.enter_context(Experts(model_map, metadata[packs.LAYOUTS]))
            share = packs.share_of(attached)
            for layer in model_map.layers:
                for (expert, role), rows in chunks_of(arrays, packed, layer).items():
                    if share is not None and not share[layer.il][expert]:
                        continue
                    n_bytes = model_map.matrix_bytes(layer, role)
                    expected = None if experts is None else experts.read(layer, expert, role)
                    parts = _damaged_parts(list(rows), partial(_stored, file), expected, layer.roles[role], n_bytes)
                    damaged += [f"{part}expert {expert} of blk.{layer.il}.ffn_{layer.roles[role].name}_exps"
                                for part in parts]
                    n_done += n_bytes
                    if on_progress is not None:
                        on_progress("checking", n_done, total)
                n_experts += layer.n_expert if share is None else int(share[layer.il].sum())
    return Check(path, len(model_map.layers), n_experts, path.stat().st_size, tuple(damaged), time.monotonic() - begin)


def _stored(file: FileIO, row: np.void) -> np.ndarray:
    """Reads uint8[bytes of a chunk], fewer if the disk fails. Not mapped: a failed page would end the process."""
    try:
        content = os.pread(file.fileno(), int(row["stored"]), int(row["offset"]))
        files.forget(file.fileno(), int(row["offset"]), len(content))
    except OSError:
        content = b""
    return np.frombuffer(content, np.uint8)


def _damaged_parts(
    rows: list[np.void], stored: Callable[[np.void], np.ndarray], expected: np.ndarray | None, role: Role, n_bytes: int
) -> list[str]:
    """Returns the parts of a matrix that differ from the model, as words before the name of its expert.

    Args:
        rows: Its chunks, by plane.
        stored: Reads the bytes of one chunk.
        expected: The matrix, uint8[n_bytes]; None if only the pack has it.
        role: Of the matrix.
        n_bytes: Of the matrix.
    """
    contents = [stored(row) for row in rows]
    damaged = [row["plane"] for row, chunk in zip(rows, contents) if checksum(chunk) != row["checksum"]]
    if not damaged:
        try:
            chunks = [(codecs.NAMES[row["codec"]], chunk) for row, chunk in zip(rows, contents)]
            matrix = compression.decode_matrix(chunks, role, n_bytes)
            return [] if expected is None or np.array_equal(matrix, expected) else [""]
        except FormatError:
            return [""]
    return ["" if plane == 0 else f"shard {plane} of the exponents of " if plane < len(rows) else
            "signs and mantissas of " for plane in damaged]
