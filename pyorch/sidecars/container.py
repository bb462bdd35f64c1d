"""Sidecars: the GGUF files that pyorch adds beside a model, such as model.buddies.gguf.

A sidecar says what it is (its kind), how it is written (a version) and which model it belongs to (a
fingerprint); one that does not fit is refused. Arrays are tensors, with a checksum each; metadata of one kind has keys
of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.errors import FormatError, PyorchError
from pyorch.files import check_target, writing
from pyorch.library.bindings import ffi, lib
from pyorch.library.numerics import np
from pyorch.runtime.model_map import SIDECARS, LayerInfo, ModelMap, beside

if TYPE_CHECKING:
    import gguf

Metadata = dict[str, Any]  # str, int, float, bool, or a list of one of them: whoever reads it checks which

_ARCH = "pyorch"  # general.architecture: llama.cpp refuses it by this name
_KIND = "pyorch.sidecar.kind"
_VERSION = "pyorch.sidecar.version"
_FINGERPRINT = "pyorch.sidecar.fingerprint"
_CHECKSUMS = "pyorch.sidecar.checksums"  # of the arrays, in their order; files of before have none

# Of a model whose experts are in its pack only: the fingerprint that it had as a whole.
SLIM = "pyorch.slim"

# Of one expert of each layer. Tells apart two quantizations of a model that have the same types.
_SAMPLE_BYTES = 4096
_ROLES = ("gate_up", "up", "gate", "down")  # in which a fingerprint goes through them, whatever the map's order is

_COPIED_BYTES = 64 << 20

# Of a sidecar: new_writer() puts kind and fingerprint first.
_BEGIN_BYTES = 4096
_STRING = (8).to_bytes(4, "little")  # the type of a value, in a GGUF

# What GGUFReader raises for text that is not UTF-8, types of another version, and what else cannot be.
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError)


def default_path(model: str | os.PathLike[str], kind: str) -> Path:
    """Where the sidecar of a model lies: model.KIND.gguf beside it, where ModelMap.sidecars() looks."""
    assert kind in SIDECARS, kind
    return beside(model, f"{kind}.gguf")


def fingerprint(model_map: ModelMap) -> str:
    """Which model this is, as 64 hexadecimal digits; equal for a model, its copy in shards and its slim one.

    SHA-256 over the architecture, the names, types and sizes of the routed experts' tensors, the routers'
    weights and the first bytes of an expert of each layer. Raises FormatError if they cannot be read.
    """
    if model_map.info.slim:
        return model_map.metadata(SLIM, str, "")
    import hashlib  # loads OpenSSL, see new_writer()

    digest = hashlib.sha256(model_map.info.arch.encode())
    for layer in model_map.layers:
        for index, role in sorted(enumerate(layer.roles), key=lambda pair: _ROLES.index(pair[1].name)):
            where = model_map.expert_range(layer.il, 0, index)
            digest.update(f"\nblk.{layer.il}.{role.name} {role.type} {layer.n_expert}*{where.size}\n".encode())
            digest.update(where.read(_SAMPLE_BYTES))
        digest.update(model_map.tensor_range(f"blk.{layer.il}.ffn_gate_inp.weight").read())
    return digest.hexdigest()


def refuse_sidecar(model_map: ModelMap) -> None:
    """FormatError where a sidecar was given in the place of its model."""
    if model_map.info.arch == _ARCH:
        kind = model_map.metadata(_KIND, str, "")
        what = "the pack of a model" if kind == "experts" else f"a sidecar of a model ({kind})"
        raise FormatError(f"{model_map.path} is {what}: name the model")


def write(
    path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap,
    metadata: Metadata, arrays: dict[str, np.ndarray],
) -> None:
    """Writes a sidecar. The file appears whole or not at all.

    Args:
        metadata: lists hold one type of element. Keys are stored with the kind before them.
        arrays: not empty; float16, float32, float64, int8, int16, int32 or int64.

    Raises PyorchError if the file cannot be written.
    """
    import gguf

    path = Path(path).absolute()
    check_target(path)
    with writing(path) as file:
        writer = new_writer(file, kind, version, model_map, metadata)
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        writer.add_key_value(_CHECKSUMS, [checksum(array) for array in arrays.values()],
                             gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
        for name, array in arrays.items():
            writer.add_tensor(name, array.view(_tensor()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def new_writer(
    path: str | os.PathLike[str] | None, kind: str, version: int, model_map: ModelMap, metadata: Metadata
) -> gguf.GGUFWriter:
    """A writer that knows whose sidecar it writes, and has nothing written yet. path: None: it is given a file."""
    import gguf  # takes a tenth of a second, here and below, which a server without sidecars need not wait for

    writer = gguf.GGUFWriter(path, _ARCH)
    writer.add_string(_KIND, kind)
    writer.add_uint32(_VERSION, version)
    writer.add_string(_FINGERPRINT, fingerprint(model_map))
    for key, value in metadata.items():
        _add(writer, f"{kind}.{key}", value)
    return writer


def read(
    path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap, until: str = ""
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """The metadata and the arrays that write() was given. The arrays are read-only.

    They are of a copy in memory: nobody ends this process by cutting off the file. Only a file of more than
    _COPIED_BYTES is mapped.

    until: the first of the arrays that are not looked at, such as gigabytes of experts: it and those behind it may be
    zeros.

    Raises FormatError: no such file, not a sidecar, of another kind, version or model, damaged or cut off.
    """
    path = Path(path)
    prefix = f"{kind}."
    contents, arrays = _contents(path, (_KIND, _VERSION, _FINGERPRINT, _CHECKSUMS, prefix), until)
    found = contents.get(_KIND)
    if found is None:
        raise FormatError(f"{path} is a GGUF file, but not a sidecar of pyorch: it has no {_KIND}")
    if found != kind:
        raise FormatError(f"{path} is a sidecar of the kind {found!r}, not {kind}")
    found = contents.get(_VERSION)
    if found != version:
        raise FormatError(f"{path} has version {found!r} of the {kind} format, this pyorch reads version {version}: "
                          "make it again")
    if contents.get(_FINGERPRINT) != fingerprint(model_map):
        raise FormatError(f"{path} belongs to another model than {model_map.path}: its fingerprint differs; "
                          "make it again for this model" + (", with --force" if kind == "experts" else ""))
    sums = contents.get(_CHECKSUMS)
    if sums is not None and sums != [checksum(array) for array in arrays.values()]:
        raise FormatError(f"{path} is damaged, its numbers are not those that were written: make it again")
    return {key.removeprefix(prefix): value for key, value in contents.items() if key.startswith(prefix)}, arrays


def is_sidecar_of(path: str | os.PathLike[str], model_map: ModelMap | None, kind: str) -> bool:
    """Whether a file begins as a sidecar of this kind and this model does: of any version, whole or damaged behind its
    beginning. None: of any model."""
    try:
        with open(path, "rb") as file:
            begin = file.read(_BEGIN_BYTES)
    except OSError:
        return False
    told = [_text(_KIND) + _STRING + _text(kind), _text(_FINGERPRINT) + _STRING]
    if model_map is not None:
        told.append(told.pop() + _text(fingerprint(model_map)))
    return begin.startswith(b"GGUF") and all(words in begin for words in told)


def _text(text: str) -> bytes:
    """As a GGUF holds it."""
    content = text.encode()
    return len(content).to_bytes(8, "little") + content


def checksum(array: np.ndarray) -> int:
    """XXH3 of a contiguous array's bytes: 64 bits, which find any damage and guard against no forger."""
    data = ffi.from_buffer(array)
    return lib.pyorch_checksum(data, len(data))


class Sidecar:
    """What a sidecar holds, see read(): each thing as it has to be, or a FormatError that says what is wrong."""

    def __init__(self, path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap) -> None:
        self.path = os.fspath(path)
        self.metadata, self.arrays = read(path, kind, version, model_map)
        self._kind, self._map = kind, model_map

    def check(self, fits: bool | np.bool_, what: str) -> None:
        """FormatError, which says what is wrong, unless it fits."""
        if not fits:
            raise FormatError(f"{self.path}: {what}: make it again")

    def check_layers(self, layers: Sequence[LayerInfo]) -> None:
        """FormatError where it is of other layers than these."""
        self.check(self.metadata.get("layers") == [layer.il for layer in layers],
                   f"it has {self._kind} for other layers than the {len(layers)} of {self._map.path} with routed "
                   "experts")

    def of_layer(self, il: int, name: str, dtype: Any, *shape: int | None, nan: bool = False) -> np.ndarray:
        """An array of a layer, of this type and shape, None for any size. nan: some of it may be no number."""
        found = self.arrays.get(f"blk.{il}.{name}")
        self.check(found is not None and found.dtype == dtype, f"layer {il} has no {name} of type {np.dtype(dtype)}")
        self.check(found.ndim == len(shape) and all(n in (None, m) for m, n in zip(found.shape, shape)),
                   f"{name} of layer {il} has the shape {list(found.shape)}, the model needs {list(shape)}")
        self.check(nan or np.isfinite(found).all(), f"{name} of layer {il} does not hold numbers only")
        return found


def _contents(path: Path, prefixes: tuple[str, ...], until: str) -> tuple[Metadata, dict[str, np.ndarray]]:
    """The metadata whose keys begin so, and all arrays; see read()."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise FormatError(f"{path} is no file")  # a pipe would be waited for
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise FormatError(f"{path} is not a sidecar of pyorch: it does not begin with GGUF")
    try:
        # First by the library: a count that the file cannot hold would keep GGUFReader going for hours.
        with ModelMap(path) as checked:
            n_bytes = _offset(checked, until)
        if n_bytes is None and path.stat().st_size <= _COPIED_BYTES:
            n_bytes = path.stat().st_size
        reader = _reader(path, n_bytes)
        return ({key: field.contents() for key, field in reader.fields.items() if key.startswith(prefixes)},
                {tensor.name: tensor.data for tensor in reader.tensors})
    except (FormatError, OSError, *_DAMAGE):
        raise FormatError(f"{path} is damaged or cut off: make it again") from None


def _offset(of_file: ModelMap, tensor: str) -> int | None:
    """Where a tensor begins; None if there is none of that name."""
    try:
        return of_file.tensor_range(tensor).offset if tensor else None
    except PyorchError:
        return None


def _reader(path: Path, n_bytes: int | None) -> gguf.GGUFReader:
    """Of a file, or of a copy in memory of its first bytes, with zeros behind them. Raises what GGUFReader does."""
    import gguf

    if n_bytes is None or not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return gguf.GGUFReader(path)
    copy = os.memfd_create("pyorch")
    try:
        with path.open("rb") as file:
            os.ftruncate(copy, os.fstat(file.fileno()).st_size)
            head = file.read(n_bytes)
        if len(head) < n_bytes:
            raise FormatError(f"{path} is cut off")
        while head:
            head = head[os.write(copy, head) :]
        return gguf.GGUFReader(f"/proc/self/fd/{copy}")
    finally:
        os.close(copy)


@functools.cache
def _tensor() -> type[np.ndarray]:
    """Of arrays that Python writes, and says why it cannot: the error of numpy's own tofile() has no reason."""

    class Tensor(np.ndarray):
        def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
            fid.write(memoryview(self).cast("B"))  # type: ignore[arg-type]  # an array is a buffer

    return Tensor


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    import gguf

    # Integers and floats as wide as Python's: what is read equals what was written.
    if isinstance(value, list):
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, _value_type(value[0]))
    else:
        writer.add_key_value(key, value, _value_type(value))


def _value_type(value: object) -> gguf.GGUFValueType:
    import gguf

    for kind, value_type in ((bool, gguf.GGUFValueType.BOOL), (int, gguf.GGUFValueType.INT64),
                             (float, gguf.GGUFValueType.FLOAT64), (str, gguf.GGUFValueType.STRING)):
        if isinstance(value, kind):
            return value_type
    raise TypeError(f"a sidecar cannot hold {value!r}")
