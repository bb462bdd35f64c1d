"""Slim models: a GGUF that ends before its experts, for a model whose experts are only in a pack.

It has all tensors of the model, dense ones first. So it is a short file that any tool can copy, and llama.cpp refuses
it as incomplete unless an engine supplies the experts. The key `pyorch.slim` has the fingerprint of the whole model.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np

from pyorch import files
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

_OF_SHARDS = re.compile(r"split\.(no|count|tensors\.count)")
_STRING = gguf.GGUFValueType.STRING
_COPIED_BYTES = 4 << 20  # at a time


def write_slim(model_map: ModelMap, target: Path) -> int:
    """Writes a model, including its shards, to one GGUF without the bytes of its experts. Returns the bytes written.

    The file appears whole or not at all.

    Raises:
        PyorchError: The model is slim or has no experts, or the file cannot be written.
    """
    check_slim(model_map, target)
    plan = _Plan(model_map)
    files.check_free_space(target.parent, plan.n_bytes, files.FEW_BYTES)
    with files.writing(target) as part, part.open("wb") as file:
        file.write(plan.head)
        for tensor, reader in plan.dense:
            _copy(reader.data, int(tensor.data_offset), int(tensor.n_bytes), file)
            file.write(b"\0" * (-file.tell() % plan.alignment))
    return target.stat().st_size


def check_slim(model_map: ModelMap, target: Path) -> None:
    """Raises PyorchError if write_slim() would refuse the model or the target."""
    files.check_target(target)
    if model_map.info.slim:
        raise PyorchError(f"{model_map.path} is slim already: copy it, and its pack")
    if not model_map.layers:
        raise PyorchError(f"{model_map.path} has no routed experts: there is nothing to leave out")
    files.check_no_source(target, model_map.shards)


def is_slim_of(path: Path, model_map: ModelMap) -> bool:
    """Returns whether a file is the slim model of this one."""
    try:
        with ModelMap(path) as found:
            return bool(found.info.slim) and container.fingerprint(found) == container.fingerprint(model_map)
    except FormatError:
        return False


def slim_bytes(model_map: ModelMap) -> int:
    """Returns the length of the file that write_slim() makes of a model that it accepts."""
    return _Plan(model_map).n_bytes


class _Plan:
    """The content of the slim file: everything before the first tensor's data, and the tensors with data."""

    def __init__(self, model_map: ModelMap) -> None:
        experts = {f"blk.{layer.il}.ffn_{role.name}_exps.weight" for layer in model_map.layers for role in layer.roles}
        readers = [gguf.GGUFReader(path) for path in model_map.shards]
        tensors = [(tensor, reader) for reader in readers for tensor in reader.tensors]
        tensors.sort(key=lambda of: of[0].name in experts)  # stable: dense ones first
        self.alignment = readers[0].alignment
        self.dense = [(tensor, reader) for tensor, reader in tensors if tensor.name not in experts]

        infos, offset = [], 0
        for tensor, _ in tensors:
            infos.append(_text(tensor.name) + struct.pack("<I", len(tensor.shape)) + struct.pack(
                f"<{len(tensor.shape)}QIQ", *map(int, tensor.shape), int(tensor.tensor_type), offset))
            offset += self._aligned(int(tensor.n_bytes))
        metadata = [_field(readers[0], field) for key, field in readers[0].fields.items()
                    if not key.startswith("GGUF.") and not _OF_SHARDS.fullmatch(key)]
        metadata.append(_text(container.SLIM) + struct.pack("<I", _STRING) + _text(container.fingerprint(model_map)))
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + b"".join(metadata) + b"".join(infos)
        self.head = head.ljust(self._aligned(len(head)), b"\0")
        self.n_bytes = len(self.head) + sum(self._aligned(int(tensor.n_bytes)) for tensor, _ in self.dense)

    def _aligned(self, n_bytes: int) -> int:
        return -(-n_bytes // self.alignment) * self.alignment


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _field(reader: gguf.GGUFReader, field: gguf.ReaderField) -> bytes:
    """Returns key, type and value as in the file."""
    size = sum(part.nbytes for part in field.parts)
    return reader.data[field.offset : field.offset + size].tobytes()


def _copy(data: np.ndarray, offset: int, n_bytes: int, file) -> None:
    for at in range(offset, offset + n_bytes, _COPIED_BYTES):
        file.write(data[at : min(at + _COPIED_BYTES, offset + n_bytes)])
