"""Planes of numbers and their codecs: section "planes and codecs" of pyorch.h, on arrays.

A number of a ggml type in TYPES divides into its exponent, one byte, and its sign with the mantissa. Several threads
may call each function, and a call releases the GIL.
"""

from __future__ import annotations

from pyorch.library.bindings import check, ffi, lib
from pyorch.library.numerics import np

TYPES = {"bf16": 16, "f16": 16, "f32": 32}  # ggml types, and their bits
STORED, ZSTD, TABLE, NIBBLE = "stored", "zstd", "table", "nibble"
NAMES = (STORED, ZSTD, "lz4", TABLE, NIBBLE)  # by their numbers in packs; lz4 is no longer read or written
NONE, AUTO = "none", "auto"
CHOICES = (ZSTD, TABLE, NIBBLE, NONE, AUTO)  # for users


def sm_bytes(type_name: str, n: int) -> int:
    """Returns the bytes of the signs and mantissas of n numbers."""
    return lib.pyorch_sm_bytes(type_name.encode(), n)


def shard_numbers(n: int, n_shards: int) -> int:
    """Returns the exponents in each of n_shards shards. The last shard can have fewer, and some can be missing."""
    return lib.pyorch_shard_numbers(n, n_shards)


def split(type_name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits uint8[bytes of n numbers] into exponents uint8[n], and signs and mantissas uint8[sm_bytes]."""
    n = len(raw) * 8 // TYPES[type_name]
    e, sm = np.empty(n, np.uint8), np.empty(sm_bytes(type_name, n), np.uint8)
    check(lib.pyorch_split(type_name.encode(), _pointer(raw), n, _pointer(e), _pointer(sm)))
    return e, sm


def encode(codec: str, level: int, raw: np.ndarray) -> np.ndarray | None:
    """Encodes uint8[n]. Returns fewer bytes, or None if the codec cannot make it smaller.

    level: for zstd, 0 is its default; for nibble, which encodes whole matrices, the numbers of a row.
    """
    to, stored = np.empty(len(raw), np.uint8), ffi.new("uint64_t *")
    check(lib.pyorch_encode(NAMES.index(codec), level, _pointer(raw), len(raw), _pointer(to), stored))
    return to[: stored[0]] if stored[0] else None


def decode(codec: str, stored: np.ndarray, n: int) -> np.ndarray:
    """Decodes to uint8[n].

    Raises:
        FormatError: `stored` is no encoding of n bytes.
    """
    raw = np.empty(n, np.uint8)
    check(lib.pyorch_decode(NAMES.index(codec), _pointer(stored), len(stored), _pointer(raw), n))
    return raw


def recover(type_name: str, codec: str, stored: np.ndarray, sm: np.ndarray, raw: np.ndarray) -> None:
    """Combines stored exponents with signs and mantissas into raw, uint8[bytes of the numbers].

    Raises:
        FormatError: `stored` is no encoding of that many exponents.
    """
    n = len(raw) * 8 // TYPES[type_name]
    assert len(sm) == sm_bytes(type_name, n), (len(sm), n)
    check(lib.pyorch_recover(type_name.encode(), NAMES.index(codec), _pointer(stored), len(stored), _pointer(sm), n,
                             _pointer(raw, True)))


def nibble_bytes(type_name: str, n_in: int, n_bytes: int) -> int:
    """Returns the bytes of nibble for a matrix of n_bytes with n_in numbers a row; 0 if nibble cannot encode it."""
    per_row = n_in * TYPES.get(type_name, 0) // 8
    return lib.pyorch_nibble_bytes(type_name.encode(), n_in, n_bytes // per_row) if per_row else 0


def nibble_pace(n_in: int, n_out: int) -> float:
    """Returns the measured time of a kernel with a nibble matrix [n_out, n_in], relative to a plain one."""
    ratio = ffi.new("double *")
    check(lib.pyorch_nibble_pace(n_in, n_out, ratio))
    return ratio[0]


def _pointer(array: np.ndarray, writable: bool = False):
    return ffi.from_buffer(array, require_writable=writable) if len(array) else ffi.NULL
