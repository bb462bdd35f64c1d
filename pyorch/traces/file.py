"""Traces: the routers' decisions for each token, in one file that is read as numpy arrays.

Layout, all little-endian:

    0     8 bytes   b"PYORCHTR"
    8     u4        format version, 3; version 2 lacks compute_ms, version 1 also states
    12    u4        length of the header
    16    u4        CRC-32 of the header
    20              the header: the fields of TraceHeader as JSON, zeros up to byte 4096
    4096            n_inputs slots of the sample of router inputs, slot_dtype():
                      i8 number of the record, from 1 (0: the slot is empty); f2[L, n_embd] inputs
    then            a record for each token up to the end of the file, record_dtype():
                      u4 request; u4 position in it; i4 token; u1 phase (0 prefill, 1 decode);
                      u2[L, k] selected experts, as the router ordered them;
                      f4[L, k] their probabilities (their weights, if a model takes the softmax of the selected only);
                      f2[L, n_expert] the distribution over all experts, if router is "full";
                      with states: f4[L, k] the weights of the selected experts' outputs, and f4[L, n_embd] the
                      state that is normalized to the router's input (the input, if a model normalizes nothing)

L counts the layers with routed experts in the order of the header. Fields are aligned as in C. A truncated file is
valid up to its last complete record; a slot whose record is missing counts as empty.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.files import check_target, reading, take
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.container import fingerprint

MAGIC = b"PYORCHTR"
VERSION = 3
HEADER_BYTES = 4096
PREFILL, DECODE = 0, 1

_PREFIX = np.dtype([("magic", "S8"), ("version", "<u4"), ("length", "<u4"), ("crc", "<u4")])


@dataclass(frozen=True)
class TraceHeader:
    """The header of a trace.

    Attributes:
        fingerprint: Of the model (pyorch.sidecars.container).
        layers: Block numbers il.
        router: "topk" or "full".
        n_inputs: Tokens in the full sample of router inputs; 0: no sample.
        seed: Of the sample.
        states: Whether records have the residual states before the routers.
        compute_ms: Of a decoded token on the recording machine, without the waits for experts. None: not measured.
    """

    fingerprint: str
    arch: str
    layers: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    n_embd: int
    router: str = "topk"
    n_inputs: int = 0
    seed: int = 0
    states: bool = False
    compute_ms: float | None = None

    def record_dtype(self) -> np.dtype:
        """Returns the dtype of one token's record."""
        n_layers = len(self.layers)
        fields = [
            ("request", "<u4"), ("position", "<u4"), ("token", "<i4"), ("phase", "u1"),
            ("experts", "<u2", (n_layers, self.n_expert_used)), ("probs", "<f4", (n_layers, self.n_expert_used)),
        ]
        if self.router == "full":
            fields.append(("router", "<f2", (n_layers, self.n_expert)))
        if self.states:
            fields += [("weights", "<f4", (n_layers, self.n_expert_used)), ("states", "<f4", (n_layers, self.n_embd))]
        return np.dtype(fields, align=True)

    def slot_dtype(self) -> np.dtype:
        """Returns the dtype of one sampled token's router inputs."""
        return np.dtype([("record", "<i8"), ("inputs", "<f2", (len(self.layers), self.n_embd))], align=True)

    @property
    def records_offset(self) -> int:
        return HEADER_BYTES + self.n_inputs * self.slot_dtype().itemsize


class Trace:
    """A trace, mapped from its file.

    Attributes:
        header: The model and the extent of the recording.
        records: A structured array of header.record_dtype(), one record per token.

    Raises:
        FormatError: The file is missing, no trace, of another version, or damaged in its header.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with reading(self.path):
            with self.path.open("rb") as file:
                self.header = _read_header(file, self.path)
                size = os.fstat(file.fileno()).st_size
            self.records = _map(self.path, self.header.record_dtype(), self.header.records_offset, size)
            self._slots = _map(self.path, self.header.slot_dtype(), HEADER_BYTES, min(size, self.header.records_offset))

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.records)

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """The sample of router inputs: record indices int64[n], unordered, and float16[n, L, n_embd].

        The inputs are a view of the file: only accessed pages are read.
        """
        record = self._slots["record"]
        used = (record > 0) & (record <= len(self.records))
        n = int(used.sum())
        # Slots are filled from the first on: only a truncated file has gaps.
        slots = self._slots[:n] if used[:n].all() else self._slots[used]
        return slots["record"].astype(np.int64) - 1, slots["inputs"]

    def check(self, model_map: ModelMap, *, decoded: bool = False) -> None:
        """Checks that the trace belongs to the model.

        Args:
            model_map: The model's map.
            decoded: Also check that every layer of a decode is recorded, with all experts of a token.

        Raises:
            FormatError: The trace belongs to another model, or lacks layers or experts.
            PyorchError: The trace has no tokens.
        """
        header, n_used = self.header, model_map.info.n_expert_used
        if header.fingerprint != fingerprint(model_map):
            raise FormatError(f"{self.path} was recorded with another model than {model_map.path}: record one with it")
        if not len(self):
            raise PyorchError(f"{self.path} holds no tokens: record some text")
        if not decoded:
            return
        if missing := [layer.il for layer in model_map.decoded_layers if layer.il not in header.layers]:
            raise FormatError(f"{self.path} has no layer {missing[0]}: record it with pyorch profile")
        if header.n_expert_used != n_used:
            raise FormatError(f"{self.path} is damaged: it has {header.n_expert_used} experts of a token in a layer, "
                              f"not {n_used}")

    def layer_index(self, il: int) -> int:
        """Returns the index of block il in the second dimension of the arrays.

        Raises:
            PyorchError: The block is not recorded.
        """
        if il not in self.header.layers:
            raise PyorchError(f"{self.path} has no layer {il}: it recorded {', '.join(map(str, self.header.layers))}")
        return self.header.layers.index(il)


def is_trace_of(path: str | os.PathLike[str], model_map: ModelMap | None) -> bool:
    """Returns whether a file is a trace of this model. None: a trace of any model."""
    try:
        found = Trace(path).header.fingerprint
        return model_map is None or found == fingerprint(model_map)
    except FormatError:
        return False


class TraceWriter:
    """Writes a trace, record after record.

    A new trace is written as PATH.part, which is a readable trace all the time, and renamed by close(). A trace that is
    appended to must have the same header, and is written in place. After an error in a `with` block PATH.part keeps its
    name and PATH is unchanged.

    Raises:
        FormatError: There is no trace to append to.
        PyorchError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader, append: bool = False) -> None:
        self.path = Path(path).absolute()
        self.header = header
        self._record_dtype, self._slot_dtype = header.record_dtype(), header.slot_dtype()
        check_target(self.path)
        self._written = self.path if append else part_path(self.path)
        try:
            # An existing trace may be a link. A new one must not follow links: they could lead to another user's file.
            flags = 0 if append else os.O_CREAT | os.O_NOFOLLOW
            self._file: io.FileIO | None = open(
                os.open(self._written, os.O_RDWR | os.O_CLOEXEC | flags, 0o666), "r+b", buffering=0)
            if not take(self._file.fileno(), self._written, self.path):
                raise PyorchError(f"another process has just written {self.path}: write again")
            if not append:
                begun = os.pread(self._file.fileno(), len(MAGIC), 0)
                if begun and begun != MAGIC:
                    raise PyorchError(f"{self._written} is no trace of an earlier run, and would be lost: move it away")
                self._file.truncate(0)
            self.n_records = self._resume() if append else self._begin()
        except OSError as error:
            raise PyorchError(f"{self._written} cannot be written: {error.strerror}") from None
        except BaseException:
            self._file.close()
            raise

    def sample(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Chooses records among the next n for the sample of router inputs, for write().

        Reservoir sampling (algorithm R): all tokens have the same probability to remain in the end. The choice
        depends on the seed and the record's number alone, so batches and appending do not change it.

        Returns:
            Rows below n, ascending, and the slot of each: int64[m].
        """
        numbers = np.arange(self.n_records, self.n_records + n, dtype=np.uint64)
        drawn = _hash(numbers, self.header.seed) % (numbers + np.uint64(1))
        slots = np.where(numbers < self.header.n_inputs, numbers, drawn).astype(np.int64)
        chosen = np.flatnonzero(slots < self.header.n_inputs)
        if len(chosen) < 2:
            return chosen, slots[chosen]
        # If several tokens draw the same slot, the last one stays.
        _, last = np.unique(slots[chosen][::-1], return_index=True)
        chosen = np.sort(chosen[::-1][last])
        return chosen, slots[chosen]

    def write(
        self, records: np.ndarray, rows: np.ndarray | None = None, slots: np.ndarray | None = None,
        inputs: np.ndarray | None = None,
    ) -> None:
        """Appends records, and stores the router inputs of some rows, float16[m, L, n_embd], in slots."""
        assert records.dtype == self._record_dtype
        sampled = np.zeros(0 if rows is None else len(rows), self._slot_dtype)
        if len(sampled):
            sampled["record"], sampled["inputs"] = self.n_records + rows + 1, inputs
        try:
            self._write_at(self._end(), records.tobytes())
            for slot, content in zip(() if slots is None else slots.tolist(), sampled, strict=True):
                self._write_at(HEADER_BYTES + slot * self._slot_dtype.itemsize, content.tobytes())
        except OSError as error:
            raise PyorchError(f"writing {self.path} failed: {error.strerror}") from None
        self.n_records += len(records)

    @property
    def next_request(self) -> int:
        """The first request number that no record has."""
        records = _map(self._written, self._record_dtype, self.header.records_offset, self._end())
        return int(records["request"].max()) + 1 if len(records) else 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self._end()

    def close(self) -> None:
        """Flushes the trace to the disk and gives it its final name."""
        self._close(finished=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._close(finished=kind is None)

    def _close(self, finished: bool) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:  # its lock excludes other writers until the file has its name
            os.fsync(file.fileno())
            if self._written == self.path:
                return
            if finished:
                os.replace(self._written, self.path)
            elif not self.n_records:
                self._written.unlink()

    def _begin(self) -> int:
        content = json.dumps(dataclasses.asdict(self.header)).encode()
        prefix = np.array([(MAGIC, VERSION, len(content), zlib.crc32(content))], _PREFIX).tobytes()
        if len(prefix) + len(content) > HEADER_BYTES:
            raise PyorchError(f"the header of {self.path} would need {len(content)} bytes: it has room for "
                              f"{HEADER_BYTES - len(prefix)}")
        self._write_at(0, (prefix + content).ljust(HEADER_BYTES, b"\0"))
        self._file.truncate(self.header.records_offset)
        return 0

    def _resume(self) -> int:
        found = _read_header(self._file, self.path)
        for field in dataclasses.fields(TraceHeader):
            old, new = getattr(found, field.name), getattr(self.header, field.name)
            if old != new and field.name != "compute_ms":  # measurements always differ: the first one stays
                raise PyorchError(f"{self.path} cannot be appended to: its {field.name} is {old}, not {new}")
        size = os.fstat(self._file.fileno()).st_size
        # Slots of truncated records need no care: the next token with the same number takes the same slot.
        n = max(0, size - self.header.records_offset) // self._record_dtype.itemsize
        self._file.truncate(self.header.records_offset + n * self._record_dtype.itemsize)
        return n

    def _end(self) -> int:
        return self.header.records_offset + self.n_records * self._record_dtype.itemsize

    def _write_at(self, offset: int, content: bytes) -> None:
        view = memoryview(content)
        while view:  # one call writes at most 2 GiB
            n = os.pwrite(self._file.fileno(), view, offset)
            offset, view = offset + n, view[n:]


def part_path(path: Path) -> Path:
    """Returns the path of an unfinished trace."""
    return path.with_name(f"{path.name}.part")


def _read_header(file: io.FileIO, path: Path) -> TraceHeader:
    content = file.read(HEADER_BYTES)
    if not content.startswith(MAGIC):
        raise FormatError(f"{path} is not a trace: it does not begin with {MAGIC.decode()}")
    if len(content) < HEADER_BYTES:
        raise FormatError(f"{path} is cut off in its header: it holds nothing")
    prefix = np.frombuffer(content, _PREFIX, count=1)[0]
    if not 1 <= prefix["version"] <= VERSION:
        raise FormatError(f"{path} is a trace of version {prefix['version']}: this pyorch reads versions 1 to "
                          f"{VERSION}")
    text = content[_PREFIX.itemsize :][: prefix["length"]]
    if len(text) != prefix["length"] or zlib.crc32(text) != prefix["crc"]:
        raise FormatError(f"{path}: the header is damaged")
    try:
        fields = json.loads(text)
        header = TraceHeader(**{**fields, "layers": tuple(fields["layers"])})
        if _is_possible(header):
            header.record_dtype(), header.slot_dtype()  # raises ValueError if they are too large for numpy
            return header
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise FormatError(f"{path}: the header is damaged")


def _is_possible(header: TraceHeader) -> bool:
    """Returns whether the fields have their types and are within bounds. True is not a number."""
    numbers = (
        *((il, 0, 1 << 16) for il in header.layers), (len(header.layers), 1, 1 << 16), (header.n_expert, 1, 1 << 16),
        (header.n_expert_used, 1, header.n_expert), (header.n_embd, 0, 1 << 24), (header.n_inputs, 0, 1 << 40),
        (header.seed, -(1 << 63), 1 << 64),
    )
    return (
        all(type(value) is int and low <= value <= high for value, low, high in numbers)
        and list(header.layers) == sorted(set(header.layers))
        and isinstance(header.fingerprint, str) and isinstance(header.arch, str)
        and header.router in ("topk", "full") and isinstance(header.states, bool)
        and (header.compute_ms is None
             or (type(header.compute_ms) in (int, float) and 0 < header.compute_ms < float("inf")))
    )


def _map(path: Path, dtype: np.dtype, offset: int, end: int) -> np.ndarray:
    """Maps as many whole elements as fit between two offsets of a file, read-only."""
    n = max(0, end - offset) // dtype.itemsize
    return np.memmap(path, dtype, "r", offset, (n,)) if n else np.empty(0, dtype)


def _hash(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Returns a well mixed uint64 for each number (splitmix64)."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed * 0xD1B54A32D192ED03 % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
