"""Chooses and reports the compression of a pack's experts, by trial on some of them (ZipMoE, section 3.1).

Matrices of 16 or 32-bit floats are stored in planes: their exponents in shards, each compressed, and their signs and
mantissas uncompressed. Quantized ones are stored whole, and compressed if that gains enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from pyorch.errors import PyorchError
from pyorch.library import codecs
from pyorch.library.codecs import AUTO, CHOICES, NONE
from pyorch.runtime import disk
from pyorch.runtime.decompression import n_processors
from pyorch.runtime.model_map import LayerInfo, ModelMap, Role

MAX_SHARDS = 64

# Quantized matrices are compressed from this gain on: a smaller one costs more to decode than to read.
_LEAST_GAIN = 0.05

# One thread decodes the shards of a matrix one after another, so that a decoded shard is in its core's cache when it is
# merged. Each shard has its own statistics, which cost a little.
_DEFAULT_SHARDS = 4
_LEAST_SHARD = 64 * 1024  # numbers

# The sample of each kind: matrices of layers and experts all over the model, at least two, and so many bytes.
_SAMPLE_BYTES = 1 << 20
_STRIDE = 7919  # a prime, so that the sample has no neighbours of the model
_ZSTD_LEVELS = (1, 3, 6, 9)
_LEVEL_SAMPLES = 8  # matrices
_TRIALS = 3  # of each speed; the best counts

# nibble needs no recovery: it is chosen if its kernels take at most so many times as long as plain ones.
_MOST_PACE = 1.5

_Result = TypeVar("_Result")
Read = Callable[[LayerInfo, int, int], np.ndarray]  # a matrix: layer, expert, role


@dataclass(frozen=True)
class Scheme:
    """The storage of the matrices of one kind. n_shards: of the exponents; 0: the matrix is whole."""

    codec: str = codecs.STORED
    level: int = 0
    n_shards: int = 0

    @property
    def is_plain(self) -> bool:
        return self == Scheme()

    def __str__(self) -> str:
        level = f":{self.level}" if self.level else ""
        return f"{self.codec}{level}/{self.n_shards}"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Parses a scheme. ValueError: the text is none."""
        name, _, n_shards = text.partition("/")
        codec, _, level = name.partition(":")
        return cls(codecs.NAMES[codecs.NAMES.index(codec)], int(level or 0), int(n_shards))


@dataclass(frozen=True)
class KindReport:
    """The measurements of the matrices of one role and type, from a sample.

    Attributes:
        entropy: Bits of an exponent, of floats.
        bound, ratio: Stored bytes relative to the bytes of the matrix, by the entropy and in fact.
        encode, decode: Bytes of matrices in a second, on one core. None: nothing is encoded.
    """

    kind: str
    codec: str
    entropy: float | None
    bound: float | None
    ratio: float
    encode: float | None
    decode: float | None

    @property
    def above_bound(self) -> float | None:
        """Returns how much larger than the bound the stored bytes are, as a share of it."""
        return None if self.bound is None else self.ratio / self.bound - 1

    def as_it_is(self) -> KindReport:
        """Returns the report of the same matrices without encoding."""
        return replace(self, codec=codecs.STORED, ratio=1.0, encode=None, decode=None)


@dataclass(frozen=True)
class Choice:
    """The chosen compression.

    Attributes:
        schemes: Of every matrix of every layer, in the order of the kernels.
        reason: Why this codec, or why nothing is compressed. "": the user's codec is used.
    """

    schemes: tuple[Scheme, ...]
    kinds: tuple[KindReport, ...]
    reason: str

    @property
    def ratio(self) -> float:
        """The largest ratio of a kind."""
        return max((kind.ratio for kind in self.kinds), default=1.0)


def choose(
    model_map: ModelMap, read: Read, codec: str, level: int | None = None, n_shards: int | None = None,
    slim: bool = False,
) -> Choice:
    """Tries the codec on a sample of the experts.

    Args:
        model_map: The model.
        read: Reads a matrix.
        codec: One of CHOICES.
        level: Of zstd 1 to 22, or below 0. None: the one with the fewest bytes.
        n_shards: Of the exponents. None: the default.
        slim: The pack will be the only copy of the experts. "auto" then takes no form that only processors compute
            from, because no device could run such a model.

    Raises:
        PyorchError: The codec, level or number of shards is invalid.
    """
    _check(codec, level, n_shards)
    kinds = _kinds(model_map)
    if codec == NONE:
        return _choice(model_map, {kind: (Scheme(), None) for kind in kinds}, "")
    samples = {kind: _sample(places, read) for kind, places in kinds.items()}
    if codec == AUTO and not slim and (nibbles := _nibbles_that_pay(samples)) is not None:
        return _choice(model_map, *nibbles)
    tried = {name: {kind: _try(kind, sample, name, level, n_shards) for kind, sample in samples.items()}
             for name in ((codecs.ZSTD, codecs.TABLE) if codec == AUTO else (codec,))}
    if all(scheme.is_plain for of_kinds in tried.values() for scheme, _ in of_kinds.values()):
        types = ", ".join(sorted({kind.type for kind in kinds}))
        gain = "" if set(codecs.TYPES) & {kind.type for kind in kinds} else f" by more than {_LEAST_GAIN:.0%}"
        who = "no codec makes" if codec == AUTO else f"{codec} does not make"
        return _choice(model_map, {kind: (Scheme(), None) for kind in kinds},
                       f"none: {who} these experts ({types}) smaller{gain}: they are stored as they are")
    if codec != AUTO:
        return _choice(model_map, tried[codec], "")
    bandwidth = disk.kept_bandwidth(model_map) or disk.measure_and_keep(model_map)[0]
    tried[NONE] = {kind: (Scheme(), None) for kind in kinds}
    weights = {kind: sum(layer.n_expert * model_map.matrix_bytes(layer, role) for layer, role in places)
               for kind, places in kinds.items()}
    seconds = {name: _seconds(of_kinds, weights, bandwidth.bytes_per_second) for name, of_kinds in tried.items()}
    best = min((NONE, *tried), key=seconds.__getitem__)  # NONE wins if equal
    others = ", ".join(f"{name} {1e3 * took:.0f} ms" for name, took in sorted(seconds.items(), key=lambda one: one[1])
                       if name != best)
    reason = (f"{best}: a GiB of experts takes {1e3 * seconds[best]:.0f} ms from a disk of "
              f"{bandwidth.bytes_per_second / 2**30:.2f} GiB/s and through {n_processors()} cores, with {others}")
    return _choice(model_map, tried[best], reason)


def _nibbles_that_pay(
    samples: dict[Role, list[np.ndarray]]
) -> tuple[dict[Role, tuple[Scheme, KindReport | None]], str] | None:
    """Returns the scheme and report of nibble for each kind, and the reason for it.

    None unless all matrices of an expert have that form, and its kernels are about as fast as plain ones.
    """
    of_kinds = {kind: _try(kind, sample, codecs.NIBBLE, None, None) for kind, sample in samples.items()}
    shapes = {(kind.n_in, len(sample[0]) // 2 // kind.n_in) for kind, sample in samples.items()}
    if any(scheme.is_plain for scheme, _ in of_kinds.values()):
        return None
    pace = max(codecs.nibble_pace(*shape) for shape in shapes)
    reason = (f"{codecs.NIBBLE}: kernels take {pace:.2f} times as long with it as with plain matrices, and a budget "
              "holds more experts")
    return (of_kinds, reason) if pace <= _MOST_PACE else None


def encode_matrix(raw: np.ndarray, role: Role, scheme: Scheme) -> list[tuple[int, str, int, np.ndarray]]:
    """Encodes uint8[bytes of a matrix] into chunks: plane, codec, decoded bytes, and a copy of the stored bytes."""
    if scheme.n_shards == 0:
        level = role.n_in if scheme.codec == codecs.NIBBLE else scheme.level
        return [(0, *_encode(replace(scheme, level=level), raw.copy()))]
    e, sm = codecs.split(role.type, raw)
    step = codecs.shard_numbers(len(e), scheme.n_shards)
    chunks = [(1 + i, *_encode(scheme, e[first : first + step])) for i, first in enumerate(range(0, len(e), step))]
    return [*chunks, (1 + len(chunks), codecs.STORED, len(sm), sm)]


def decode_matrix(chunks: Sequence[tuple[str, np.ndarray]], role: Role, n_bytes: int) -> np.ndarray:
    """Decodes a matrix, uint8[n_bytes], from the codec and stored bytes of each plane. FormatError: it is damaged."""
    if len(chunks) == 1:
        return codecs.decode(*chunks[0], n_bytes)
    raw = np.empty(n_bytes, np.uint8)
    n = n_bytes * 8 // codecs.TYPES[role.type]
    step, sm = codecs.shard_numbers(n, len(chunks) - 1), chunks[-1][1]
    for (codec, stored), first in zip(chunks[:-1], range(0, n, step)):
        of_shard = slice(codecs.sm_bytes(role.type, first), codecs.sm_bytes(role.type, min(first + step, n)))
        numbers = slice(first * n_bytes // n, min(first + step, n) * n_bytes // n)
        codecs.recover(role.type, codec, stored, sm[of_shard], raw[numbers])
    return raw


def name_of(role: Role) -> str:
    """Returns the name of a kind of matrices for reports."""
    return f"{role.name} {role.type}"


def entropy(values: np.ndarray) -> float:
    """Returns the mean bits that a value of uint8[n] needs, by its frequency."""
    counts = np.bincount(values)
    shares = counts[counts > 0] / len(values)
    return float(-(shares * np.log2(shares)).sum())


def _check(codec: str, level: int | None, n_shards: int | None) -> None:
    if codec not in CHOICES:
        raise PyorchError(f"there is no codec {codec!r}: use one of {', '.join(CHOICES)}")
    if level is not None:
        if codec != codecs.ZSTD:
            raise PyorchError(f"--level is for the codec zstd, not for {codec}")
        if level not in range(-50, 23) or level == 0:
            raise PyorchError(f"zstd has no level {level}: use 1 to 22, or -50 to -1")
    if n_shards is not None and codec == NONE:
        raise PyorchError("--shards is for compressed packs: give a --codec")
    if n_shards is not None and codec == codecs.NIBBLE:
        raise PyorchError("--shards is for codecs that take exponents apart, not for nibble")
    if n_shards is not None and not 1 <= n_shards <= MAX_SHARDS:
        raise PyorchError(f"there are 1 to {MAX_SHARDS} shards of a matrix, not {n_shards}")


def _kinds(model_map: ModelMap) -> dict[Role, list[tuple[LayerInfo, int]]]:
    """Returns the matrices of each kind: layers, and indices of their roles."""
    kinds: dict[Role, list[tuple[LayerInfo, int]]] = {}
    for layer in model_map.layers:
        for index, role in enumerate(layer.roles):
            kinds.setdefault(replace(role, layout=""), []).append((layer, index))
    return kinds


def _choice(
    model_map: ModelMap, of_kinds: dict[Role, tuple[Scheme, KindReport | None]], reason: str
) -> Choice:
    schemes = tuple(of_kinds[replace(role, layout="")][0] for layer in model_map.layers for role in layer.roles)
    return Choice(schemes, tuple(report for _, report in of_kinds.values() if report is not None), reason)


def _sample(places: list[tuple[LayerInfo, int]], read: Read) -> list[np.ndarray]:
    """Reads the sample: whole matrices, uint8."""
    sample: list[np.ndarray] = []
    n_bytes = 0
    n_matrices = sum(layer.n_expert for layer, _ in places)
    for i in range(n_matrices):
        layer, role = places[i * _STRIDE % len(places)]
        sample.append(read(layer, (i // len(places) + i * _STRIDE) % layer.n_expert, role).copy())
        n_bytes += len(sample[-1])
        if len(sample) >= 2 and n_bytes >= _SAMPLE_BYTES:
            break
    return sample


def _try(
    role: Role, sample: list[np.ndarray], codec: str, level: int | None, n_shards: int | None
) -> tuple[Scheme, KindReport]:
    scheme = _scheme(role, sample, codec, level, n_shards)
    # Measures one large matrix, because the overhead of calls would dominate small ones.
    joined = np.concatenate(sample)
    encode_seconds, encoded = _best(lambda: encode_matrix(joined, role, scheme))
    chunks = [(name, stored) for _, name, _, stored in encoded]
    decode_seconds, decoded = _best(lambda: decode_matrix(chunks, role, len(joined)))
    if not np.array_equal(decoded, joined):
        raise PyorchError(f"{codec} does not restore the matrices of {role.name}: this is a defect of pyorch")
    bits = bound = None
    if role.type in codecs.TYPES:
        bits = entropy(codecs.split(role.type, joined)[0])
        of_exponent = 5 if role.type == "f16" else 8
        bound = (codecs.TYPES[role.type] - of_exponent + bits) / codecs.TYPES[role.type]
    plain = scheme.is_plain
    return scheme, KindReport(
        name_of(role), str(scheme).partition("/")[0], bits, bound,
        _stored_bytes(role, sample, scheme) / len(joined),
        None if plain else len(joined) / encode_seconds, None if plain else len(joined) / decode_seconds)


def _scheme(role: Role, sample: list[np.ndarray], codec: str, level: int | None, n_shards: int | None) -> Scheme:
    """Returns the part of a codec that suits this kind; it may be none."""
    if codec == codecs.NIBBLE:
        if not all(codecs.nibble_bytes(role.type, role.n_in, len(raw)) for raw in sample):
            return Scheme()
        scheme = Scheme(codec)
    elif role.type in codecs.TYPES:
        n = min(map(len, sample)) * 8 // codecs.TYPES[role.type]
        most = n_shards or min(_DEFAULT_SHARDS, max(1, n // _LEAST_SHARD))
        made = -(-n // codecs.shard_numbers(n, most))
        scheme = Scheme(codec, _level(role, sample, Scheme(codec, level or 0, made)), made)
    elif codec == codecs.TABLE:
        return Scheme()
    else:
        scheme = Scheme(codec, _level(role, sample, Scheme(codec, level or 0)))
    gain = 1 - _stored_bytes(role, sample, scheme) / sum(map(len, sample))
    return scheme if gain > (0 if role.type in codecs.TYPES else _LEAST_GAIN) else Scheme()


def _level(role: Role, sample: list[np.ndarray], scheme: Scheme) -> int:
    """Returns the best level. More effort can give more bytes: matches in place of plain Huffman codes."""
    if scheme.level or scheme.codec != codecs.ZSTD:
        return scheme.level
    some = sample[: _LEVEL_SAMPLES]
    return min(_ZSTD_LEVELS, key=lambda level: _stored_bytes(role, some, replace(scheme, level=level)))


def _stored_bytes(role: Role, sample: Iterable[np.ndarray], scheme: Scheme) -> int:
    return sum(len(stored) for raw in sample for _, _, _, stored in encode_matrix(raw, role, scheme))


def _encode(scheme: Scheme, raw: np.ndarray) -> tuple[str, int, np.ndarray]:
    stored = None if scheme.codec == codecs.STORED else codecs.encode(scheme.codec, scheme.level, raw)
    return (codecs.STORED, len(raw), raw) if stored is None else (scheme.codec, len(raw), stored)


def _seconds(
    of_kinds: dict[Role, tuple[Scheme, KindReport | None]], weights: dict[Role, int], bytes_per_second: float
) -> float:
    """Returns the seconds to load a GiB of absent experts. Decoding adds to reading: its threads compute too."""
    total = 0.0
    for kind, (_, report) in of_kinds.items():
        share = weights[kind] / sum(weights.values()) * 2**30
        total += share * (report.ratio if report else 1.0) / bytes_per_second
        total += share / report.decode / n_processors() if report and report.decode else 0.0
    return total


def _best(run: Callable[[], _Result]) -> tuple[float, _Result]:
    """Returns the seconds of the fastest of some trials, and the result of the last one."""
    best = math.inf
    for _ in range(_TRIALS):
        begin = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - begin)
    return best, result
