"""Reads importance matrices of llama.cpp's llama-imatrix: the weight of each input of a matrix."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np

from pyorch.errors import FormatError

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME = 1024  # bytes; a longer name means that the file is none

_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError, struct.error, UnicodeDecodeError)


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads mean squares of the inputs, by the name of the weight: float32[n_matrices * n_inputs], 1 without data.

    n_matrices is the number of experts of an expert tensor, otherwise 1. Reads GGUF, and the older unnamed format.

    Raises:
        FormatError: The file is missing, damaged or no importance matrix.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        found = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    except _DAMAGE:
        raise FormatError(f"{path} is damaged, or no importance matrix") from None
    if not found:
        raise FormatError(f"{path} holds no importance matrix")
    wrong = next((name for name, values in found.items() if not np.isfinite(values).all()), None)
    if wrong is not None:
        raise FormatError(f"{path}: the importance of {wrong} is not finite")
    return found


def _read_gguf(path: Path) -> dict[str, np.ndarray]:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts = np.asarray(tensors[weight + _COUNTS].data, np.float32).reshape(-1, 1)
        sums = np.asarray(tensor.data, np.float32).reshape(len(counts), -1)
        means = np.ones_like(sums)
        np.divide(sums, counts, out=means, where=counts > 0)
        found[weight] = np.ascontiguousarray(means.reshape(-1))
    return found


def _read_legacy(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    (n_entries,), at = struct.unpack_from("<i", content), 4
    found = {}
    for _ in range(n_entries):
        (length,) = struct.unpack_from("<i", content, at)
        if not 0 < length <= _MAX_NAME:
            raise ValueError(length)
        name = content[at + 4 : at + 4 + length].decode()
        n_calls, n_values = struct.unpack_from("<ii", content, at + 4 + length)
        at += 12 + length
        values = np.frombuffer(content, "<f4", n_values, at) if n_values > 0 else None
        if values is None:
            raise ValueError(n_values)
        found[name] = values / np.float32(n_calls) if n_calls > 0 else values.copy()
        at += 4 * n_values
    return found
