"""Planes and codecs give back every bit, and refuse what they did not make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyorch.errors import FormatError
from pyorch.library import codecs

TYPES = st.sampled_from(sorted(codecs.TYPES))
ENCODING = st.sampled_from((codecs.ZSTD, codecs.TABLE))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """A type, and numbers of it: any bits, or weights near zero with some of any bits among them."""
    type_name, n = draw(TYPES), draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_bytes = codecs.TYPES[type_name] // 8
    raw = rng.integers(0, 256, (n, n_bytes), np.uint8)
    if draw(st.booleans()):
        weights = rng.normal(0, 0.02, n).astype(np.float16 if type_name == "f16" else np.float32)
        high = weights.view(np.uint8).reshape(n, -1)[:, -n_bytes:]  # BF16 is the high half of a float
        raw = np.where(rng.random((n, 1)) < draw(st.sampled_from((0, 0.1))), raw, high)
    return type_name, np.ascontiguousarray(raw).reshape(-1)


@settings(max_examples=60)
@given(matrices(), ENCODING, st.integers(1, 4))
def test_every_number_comes_back(matrix: tuple[str, np.ndarray], codec: str, n_shards: int) -> None:
    type_name, raw = matrix
    e, sm = codecs.split(type_name, raw)
    step, recovered = codecs.shard_numbers(len(e), n_shards), np.empty_like(raw)
    width = codecs.TYPES[type_name] // 8
    for first in range(0, len(e), step):
        shard = e[first : first + step]
        stored = codecs.encode(codec, 0, shard)
        name, stored = (codecs.STORED, shard) if stored is None else (codec, stored)
        assert np.array_equal(codecs.decode(name, stored, len(shard)), shard)
        of_shard = sm[codecs.sm_bytes(type_name, first) : codecs.sm_bytes(type_name, first + len(shard))]
        codecs.recover(type_name, name, stored, of_shard, recovered[first * width : (first + len(shard)) * width])
    assert np.array_equal(recovered, raw)


@pytest.mark.parametrize("codec", [codecs.ZSTD, codecs.TABLE])
@pytest.mark.parametrize("type_name", ["bf16", "f16"])
def test_each_number_of_16_bits_comes_back(type_name: str, codec: str) -> None:
    """Zeros of both signs, denormals, infinities and every NaN, among numbers that make the codec worth it."""
    every = np.arange(1 << 16, dtype=np.uint16)
    common = np.full(1 << 18, 0x3C00, np.uint16)
    common[:: len(common) // len(every)] = every
    e, sm = codecs.split(type_name, common.view(np.uint8))
    stored = codecs.encode(codec, 0, e)
    assert stored is not None and np.array_equal(codecs.decode(codec, stored, len(e)), e)
    recovered = np.empty_like(common)
    codecs.recover(type_name, codec, stored, sm, recovered.view(np.uint8))
    assert np.array_equal(recovered, common)


@settings(max_examples=60)
@given(ENCODING, st.binary(max_size=300), st.integers(1, 500))
def test_any_bytes_are_decoded_or_refused(codec: str, stored: bytes, n: int) -> None:
    try:
        assert len(codecs.decode(codec, np.frombuffer(stored, np.uint8), n)) == n
    except FormatError as error:
        assert codec in str(error)


def test_signs_and_mantissas_take_as_many_bytes_as_the_format_says() -> None:
    assert [codecs.sm_bytes(name, 65) for name in ("bf16", "f16", "f32", "q4_0")] == [128, 176, 384, 0]
