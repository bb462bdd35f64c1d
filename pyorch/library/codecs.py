"""Planes of numbers, and what they are compressed with: section "planes and codecs" of pyorch.h, on arrays.

Numbers of the ggml types in TYPES divide into exponents, a byte each, and signs with mantissas. Every function may be
called by several threads, and lets others run meanwhile.
"""

from __future__ import annotations

from pyorch.library.bindings import check, ffi, lib
from pyorch.library.numerics import np

TYPES = {"bf16": 16, "f16": 16, "f32": 32}  # ggml types, and their bits
STORED, ZSTD, TABLE, NIBBLE = "stored", "zstd", "table", "nibble"
NAMES = (STORED, ZSTD, "lz4", TABLE, NIBBLE)  # by their numbers in packs; lz4 is no longer read or written
NONE, AUTO = "none", "auto"
CHOICES = (ZSTD, TABLE, NIBBLE, NONE, AUTO)  # that can be asked for


def sm_bytes(type_name: str, n: int) -> int:
    """Bytes of the signs and mantissas of n numbers."""
    return lib.pyorch_sm_bytes(type_name.encode(), n)


def shard_numbers(n: int, n_shards: int) -> int:
    """How many of n exponents each of n_shards shards has; the last has fewer, and there may be fewer shards."""
    return lib.pyorch_shard_numbers(n, n_shards)


def split(type_name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8[bytes of n numbers] -> exponents uint8[n], signs and mantissas uint8[sm_bytes]."""
    n = len(raw) * 8 // TYPES[type_name]
    e, sm = np.empty(n, np.uint8), np.empty(sm_bytes(type_name, n), np.uint8)
    check(lib.pyorch_split(type_name.encode(), _pointer(raw), n, _pointer(e), _pointer(sm)))
    return e, sm


def encode(codec: str, level: int, raw: np.ndarray) -> np.ndarray | None:
    """uint8[n] -> what is stored of it, fewer bytes; None where the codec cannot make it smaller.

    level: of zstd, 0 for its default; for nibble, which is for whole matrices, the numbers of a row.
    """
    to, stored = np.empty(len(raw), np.uint8), ffi.new("uint64_t *")
    check(lib.pyorch_encode(NAMES.index(codec), level, _pointer(raw), len(raw), _pointer(to), stored))
    return to[: stored[0]] if stored[0] else None


def decode(codec: str, stored: np.ndarray, n: int) -> np.ndarray:
    """The other way, uint8[n]. FormatError for what is not stored of n bytes."""
    raw = np.empty(n, np.uint8)
    check(lib.pyorch_decode(NAMES.index(codec), _pointer(stored), len(stored), _pointer(raw), n))
    return raw


def recover(type_name: str, codec: str, stored: np.ndarray, sm: np.ndarray, raw: np.ndarray) -> None:
    """Stored exponents, and signs and mantissas of the same numbers, into raw, uint8[bytes of the numbers].

    FormatError for exponents that are not of so many.
    """
    n = len(raw) * 8 // TYPES[type_name]
    assert len(sm) == sm_bytes(type_name, n), (len(sm), n)
    check(lib.pyorch_recover(type_name.encode(), NAMES.index(codec), _pointer(stored), len(stored), _pointer(sm), n,
                             _pointer(raw, True)))


def nibble_bytes(type_name: str, n_in: int, n_bytes: int) -> int:
    """What nibble makes of any matrix of n_bytes whose rows have n_in numbers; 0: it is not for such matrices."""
    per_row = n_in * TYPES.get(type_name, 0) // 8
    return lib.pyorch_nibble_bytes(type_name.encode(), n_in, n_bytes // per_row) if per_row else 0


def nibble_pace(n_in: int, n_out: int) -> float:
    """How long a kernel takes with such a matrix of [n_out, n_in] in memory, as a ratio to a plain one; measured."""
    ratio = ffi.new("double *")
    check(lib.pyorch_nibble_pace(n_in, n_out, ratio))
    return ratio[0]


def _pointer(array: np.ndarray, writable: bool = False):
    return ffi.from_buffer(array, require_writable=writable) if len(array) else ffi.NULL
