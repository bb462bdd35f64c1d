"""The format of sidecars: GGUF files such as model.buddies.gguf.

A sidecar has a kind, the version of its format, and the fingerprint of its model; pyorch refuses one that does not fit.
Arrays are tensors, each with a checksum. Metadata have keys that begin with the kind.
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

Metadata = dict[str, Any]  # str, int, float, bool, or a list of one of these types; readers check the type

_ARCH = "pyorch"  # general.architecture: llama.cpp refuses it by this name
_KIND = "pyorch.sidecar.kind"
_VERSION = "pyorch.sidecar.version"
_FINGERPRINT = "pyorch.sidecar.fingerprint"
_CHECKSUMS = "pyorch.sidecar.checksums"  # of the arrays, in their order; old files have none

# The key in a model whose experts are only in its pack: its fingerprint before they were removed.
SLIM = "pyorch.slim"

# Bytes of one expert of each layer. They distinguish two quantizations with the same types.
_SAMPLE_BYTES = 4096
_ROLES = ("gate_up", "up", "gate", "down")  # the order in a fingerprint, independent of the map's order

_COPIED_BYTES = 64 << 20

# The beginning of a sidecar has kind and fingerprint: new_writer() puts them first.
_BEGIN_BYTES = 4096
_STRING = (8).to_bytes(4, "little")  # the type of a value, in a GGUF

# Errors of GGUFReader for text that is not UTF-8, types of another version, and other damage.
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError)


def default_path(model: str | os.PathLike[str], kind: str) -> Path:
    """Returns the path of a model's sidecar, model.KIND.gguf, at which ModelMap.sidecars() looks."""
    assert kind in SIDECARS, kind
    return beside(model, f"{kind}.gguf")


def fingerprint(model_map: ModelMap) -> str:
    """Returns the identity of a model, 64 hexadecimal digits; equal for a model, its copy in shards and its slim one.

    It is the SHA-256 of the architecture, the names, types and sizes of the routed experts' tensors, the routers'
    weights and the first bytes of an expert of each layer.

    Raises:
        FormatError: The model cannot be read.
    """
    if model_map.info.slim:
        return model_map.metadata(SLIM, str, "")
    import hashlib  # loads OpenSSL; see new_writer()

    digest = hashlib.sha256(model_map.info.arch.encode())
    for layer in model_map.layers:
        for index, role in sorted(enumerate(layer.roles), key=lambda pair: _ROLES.index(pair[1].name)):
            where = model_map.expert_range(layer.il, 0, index)
            digest.update(f"\nblk.{layer.il}.{role.name} {role.type} {layer.n_expert}*{where.size}\n".encode())
            digest.update(where.read(_SAMPLE_BYTES))
        digest.update(model_map.tensor_range(f"blk.{layer.il}.ffn_gate_inp.weight").read())
    return digest.hexdigest()


def refuse_sidecar(model_map: ModelMap) -> None:
    """Refuses a sidecar in place of its model.

    Raises:
        FormatError: The file is a sidecar.
    """
    if model_map.info.arch == _ARCH:
        kind = model_map.metadata(_KIND, str, "")
        what = "the pack of a model" if kind == "experts" else f"a sidecar of a model ({kind})"
        raise FormatError(f"{model_map.path} is {what}: name the model")


def write(
    path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap,
    metadata: Metadata, arrays: dict[str, np.ndarray],
) -> None:
    """Writes a sidecar, completely or not at all.

    Args:
        path: The file to write.
        kind: Its kind.
        version: The version of the kind's format.
        model_map: The model.
        metadata: Lists hold one type of element. Keys are stored with the kind in front.
        arrays: Not empty; float16, float32, float64, int8, int16, int32 or int64.

    Raises:
        PyorchError: The file cannot be written.
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
    """Returns a writer with kind, version and fingerprint, which has written nothing yet. path: None: set later."""
    import gguf  # takes a tenth of a second, here and below, for which a server without sidecars need not wait

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
    """Returns the metadata and the arrays that write() received. The arrays are read-only.

    They are a copy in memory, so that truncating the file cannot end this process. Only a file of more than
    _COPIED_BYTES is mapped.

    Args:
        path: The file.
        kind: The expected kind.
        version: The expected version.
        model_map: The model.
        until: The first array that is not needed, such as gigabytes of experts: this array and later ones may be zeros.

    Raises:
        FormatError: There is no such file; or it is no sidecar, of another kind, version or model, damaged or cut off.
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
    """Whether a file begins as a sidecar of this kind and this model, of any version, whole or damaged later.

    model_map: None: of any model.
    """
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
    """Encodes text as a GGUF does."""
    content = text.encode()
    return len(content).to_bytes(8, "little") + content


def checksum(array: np.ndarray) -> int:
    """Returns the XXH3 of a contiguous array's bytes. Its 64 bits find damage, but do not stop a forger."""
    data = ffi.from_buffer(array)
    return lib.pyorch_checksum(data, len(data))


class Sidecar:
    """The content of a sidecar, see read(). Accessors check it, and raise FormatError with the reason."""

    def __init__(self, path: str | os.PathLike[str], kind: str, version: int, model_map: ModelMap) -> None:
        self.path = os.fspath(path)
        self.metadata, self.arrays = read(path, kind, version, model_map)
        self._kind, self._map = kind, model_map

    def check(self, fits: bool | np.bool_, what: str) -> None:
        """Raises FormatError with the reason `what`, unless `fits`."""
        if not fits:
            raise FormatError(f"{self.path}: {what}: make it again")

    def check_layers(self, layers: Sequence[LayerInfo]) -> None:
        """Raises FormatError if the sidecar has other layers."""
        self.check(self.metadata.get("layers") == [layer.il for layer in layers],
                   f"it has {self._kind} for other layers than the {len(layers)} of {self._map.path} with routed "
                   "experts")

    def of_layer(self, il: int, name: str, dtype: Any, *shape: int | None, nan: bool = False) -> np.ndarray:
        """Returns an array of a layer with this type and shape; None: any size. nan: it may contain NaN."""
        found = self.arrays.get(f"blk.{il}.{name}")
        self.check(found is not None and found.dtype == dtype, f"layer {il} has no {name} of type {np.dtype(dtype)}")
        self.check(found.ndim == len(shape) and all(n in (None, m) for m, n in zip(found.shape, shape)),
                   f"{name} of layer {il} has the shape {list(found.shape)}, the model needs {list(shape)}")
        self.check(nan or np.isfinite(found).all(), f"{name} of layer {il} does not hold numbers only")
        return found


def _contents(path: Path, prefixes: tuple[str, ...], until: str) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns the metadata with these prefixes, and all arrays; see read()."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise FormatError(f"{path} is no file")  # reading a pipe would block
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise FormatError(f"{path} is not a sidecar of pyorch: it does not begin with GGUF")
    try:
        # The library first: GGUFReader would loop for hours over a count that the file cannot hold.
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
    """Returns the offset of a tensor, or None."""
    try:
        return of_file.tensor_range(tensor).offset if tensor else None
    except PyorchError:
        return None


def _reader(path: Path, n_bytes: int | None) -> gguf.GGUFReader:
    """Returns a reader of a file, or of a copy of its first bytes followed by zeros. Raises GGUFReader's errors."""
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
    """Returns the class of arrays that Python writes: numpy's own tofile() does not say why it failed."""

    class Tensor(np.ndarray):
        def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
            fid.write(memoryview(self).cast("B"))  # type: ignore[arg-type]  # an array is a buffer

    return Tensor


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    import gguf

    # Integers and floats as wide as Python's, so that read() returns the written values.
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
