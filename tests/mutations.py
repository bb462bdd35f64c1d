"""Files damaged on purpose: a valid one, changed at a place that means something.

A damaged byte of a weight is another weight. What tries a reader is a count, a length, a type, a dimension, an offset
or a string; a file is taken apart into these, one or two are changed, and it is put together again.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ELEMENTS = 4  # of an array, that are worth a change

_INTEGERS = (0, 1, 2, 3, 5, 7, 31, 64, 127, 128, 255, 256, 511, 512, 513, 1000, 65535, 65536, 100_000, 10**6,
             2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
             -1, -2, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-38, 1e38, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = (b"", b"\xff\xfe\x80", b"%s%n", b"\0", b"a" * 100, b"../../x", b"\n", "ü".encode())


# Of other types than a reader may expect: (type, value as it is written)
_VALUES = (
    *((value_type, struct.pack(_FORMATS[value_type], value)) for value_type, value in
      ((0, 1), (0, 255), (4, 0), (4, 2), (5, -1), (6, 2.0), (6, float("nan")), (7, 1), (10, 2**63), (11, -(2**63)),
       (12, float("inf")))),
    *((_STRING, struct.pack("<Q", len(text)) + text) for text in (b"", b"1e9", b"\xff\xfe")),
    (_ARRAY, struct.pack("<IQ", 4, 0)), (_ARRAY, struct.pack("<IQII", 4, 2, 1, 0)),
    (_ARRAY, struct.pack("<IQQ", _STRING, 1, 0)), (_ARRAY, struct.pack("<IQff", 6, 2, 0.5, float("nan"))),
    (_ARRAY, struct.pack("<IQ", 5, 600) + struct.pack("<i", -1) * 600),
    (_ARRAY, struct.pack("<IQBB", 7, 2, 1, 0)),
)


def flip(path: Path, at: int) -> None:
    """Changes a bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@dataclass(frozen=True)
class Place:
    """What can be changed in a file without moving the rest. format: of struct, "" for the bytes of a string."""

    what: str
    kind: str
    offset: int
    format: str
    size: int = 0


@dataclass(frozen=True)
class Anatomy:
    """Of a GGUF: its places, and the parts [begin, end) that can be left out or repeated. data: where that of the first
    tensor begins; at: by tensor, where its own does."""

    places: list[Place]
    metadata: list[tuple[str, int, int]]
    tensors: list[tuple[str, int, int]]
    data: int
    alignment: int
    at: dict[str, int]


class _Cursor:
    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.places = content, 0, []

    def number(self, what: str, kind: str, format: str) -> int:
        value = struct.unpack_from(format, self.content, self.at)[0]
        if kind:
            self.places.append(Place(what, kind, self.at, format))
        self.at += struct.calcsize(format)
        return value

    def string(self, what: str, kind: str) -> str:
        size = self.number(f"length of {what}", kind and f"{kind} length", "<Q")
        if kind:
            self.places.append(Place(what, kind, self.at, "", size))
        self.at += size
        return self.content[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, key: str, value_type: int, kind: str = "value") -> None:
        if value_type == _STRING:
            self.string(key, kind and "string")
        elif value_type == _ARRAY:
            element = self.number(f"element type of {key}", kind and "type", "<I")
            n = self.number(f"length of {key}", kind and "array length", "<Q")
            for i in range(n):
                self.value(f"{key}[{i}]", element, kind and "element" if i < _ELEMENTS or i == n - 1 else "")
        else:
            self.number(key, kind, _FORMATS[value_type])


def anatomy(content: bytes) -> Anatomy:
    """Of a valid GGUF."""
    cursor = _Cursor(content)
    cursor.at = 4
    cursor.number("version", "header", "<I")
    n_tensors = cursor.number("number of tensors", "header", "<Q")
    n_metadata = cursor.number("number of metadata", "header", "<Q")
    metadata, tensors, offsets = [], [], {}
    for _ in range(n_metadata):
        begin = cursor.at
        key = cursor.string("a key", "key")
        value_type = cursor.number(f"type of {key}", "type", "<I")
        cursor.value(key, value_type)
        metadata.append((key, begin, cursor.at))
    for _ in range(n_tensors):
        begin = cursor.at
        name = cursor.string("a tensor's name", "name")
        for i in range(cursor.number(f"dimensions of {name}", "dimensions", "<I")):
            cursor.number(f"dimension {i} of {name}", "dimension", "<Q")
        cursor.number(f"type of {name}", "tensor type", "<I")
        offsets[name] = cursor.number(f"offset of {name}", "offset", "<Q")
        tensors.append((name, begin, cursor.at))
    aligned = [place for place in cursor.places if place.what == "general.alignment"]
    alignment = struct.unpack_from("<I", content, aligned[0].offset)[0] if aligned else 32
    data = -(-cursor.at // alignment) * alignment
    return Anatomy(cursor.places, metadata, tensors, data, alignment,
                   {name: data + offset for name, offset in offsets.items()})


def gguf_mutator(content: bytes) -> Callable[[random.Random], tuple[str, bytes]]:
    """A function that returns a damaged copy and what is wrong with it."""
    known = anatomy(content)
    by_kind: dict[str, list[Place]] = {}
    for place in known.places:
        by_kind.setdefault(place.kind, []).append(place)
    # What most readers trust gets most tries.
    kinds = sorted(by_kind) + ["value"] * 6 + ["structure"] * 5
    kinds += [kind for kind in ("array length", "array length", "string") if kind in by_kind]

    def mutate(chance: random.Random) -> tuple[str, bytes]:
        damaged, said = bytearray(content), []
        for _ in range(chance.choice((1, 1, 1, 2))):
            kind = chance.choice(kinds)
            if kind == "structure":
                return _restructured(content, known, chance)
            said.append(_change(damaged, chance.choice(by_kind[kind]), chance))
        return ", ".join(said), bytes(damaged)

    return mutate


def pack_mutator(content: bytes) -> Callable[[random.Random], tuple[str, bytes]]:
    """As gguf_mutator, of a pack: half of the cases change a number of its index, or bytes of its experts, instead."""
    in_structure = gguf_mutator(content)
    data = len(content) - len(content) % 8

    def mutate(chance: random.Random) -> tuple[str, bytes]:
        how = chance.randrange(4)
        if how < 2:
            return in_structure(chance)
        damaged = bytearray(content)
        # What is told of the experts lies in the pages behind the first one, and before the experts themselves.
        at = 4096 + 8 * chance.randrange(1024) if how == 2 else 8 * chance.randrange(data // 8)
        at = min(at, data - 8)
        value = chance.choice(_INTEGERS) % 2**64
        struct.pack_into("<Q", damaged, at, value)
        return f"{value} at {at}", bytes(damaged)

    return mutate


_COLUMNS = ("expert", "role", "plane", "codec", "offset", "stored", "raw", "checksum")
_ROW = struct.Struct(f"<{len(_COLUMNS)}Q")


def index_mutator(content: bytes, checksum: Callable[[bytes], int]) -> Callable[[random.Random], tuple[str, bytes]]:
    """As gguf_mutator, of a pack: most cases change rows of an index, or what is stored of a chunk and its checksum
    with it, so that a decoder gets it."""
    in_structure, known = gguf_mutator(content), anatomy(content)
    indices = {}  # of blk.N.index: where its rows are, and where what they tell of begins
    for name in known.at:
        if name.endswith(".index"):
            block = name.removesuffix(".index")
            n = next(place for place in known.places if place.what == f"dimension 1 of {name}")
            n_rows = struct.unpack_from(n.format, content, n.offset)[0]
            indices[block] = ([known.at[name] + i * _ROW.size for i in range(n_rows)], known.at[f"{block}.experts"])

    def mutate(chance: random.Random) -> tuple[str, bytes]:
        how = chance.choice(("structure", "cell", "cell", "cell", "column", "exchanged", "chunk", "chunk", "shortened"))
        if how == "structure":
            return in_structure(chance)
        damaged = bytearray(content)
        block = chance.choice(sorted(indices))
        rows, data = indices[block]
        row, other = chance.choice(rows), chance.choice(rows)
        fields, others = (dict(zip(_COLUMNS, _ROW.unpack_from(content, at))) for at in (row, other))
        said = f"{how} of {block}, row {rows.index(row)}"
        if how in ("cell", "column"):
            column = chance.choice(_COLUMNS)
            before = fields[column]
            value = chance.choice((*_INTEGERS, *(before + step for step in (-4096, -64, -1, 1, 64, 4096)), 2 * before,
                                   others[column], 2**64 - before)) % 2**64
            changed = [row]
            if how == "column":  # the same of all experts
                changed = [at for at in rows if _ROW.unpack_from(content, at)[1:3] == (fields["role"], fields["plane"])]
            for at in changed:
                struct.pack_into("<Q", damaged, at + 8 * _COLUMNS.index(column), value)
            return f"{said}: {column} is {value}, not {before}", bytes(damaged)
        if how == "exchanged":
            taken = chance.choice((_COLUMNS, ("offset", "stored", "checksum"), ("codec", "checksum"), ("expert",)))
            for at, values in ((row, others), (other, fields)):
                for column in taken:
                    struct.pack_into("<Q", damaged, at + 8 * _COLUMNS.index(column), values[column])
            return f"{said}: {', '.join(taken)} with row {rows.index(other)}", bytes(damaged)
        at, n = data + fields["offset"], fields["stored"]
        if how == "shortened":
            n = chance.randrange(n)
            struct.pack_into("<Q", damaged, row + 8 * _COLUMNS.index("stored"), n)
        else:
            begin = chance.randrange(n)
            size = chance.choice((1, 2, 8, n)) if begin else chance.choice((1, 8, n))
            size = min(size, n - begin)
            damaged[at + begin : at + begin + size] = chance.choice(
                (chance.randbytes(size), b"\0" * size, b"\xff" * size))
            said += f", {size} bytes at {begin}"
        struct.pack_into("<Q", damaged, row + 8 * _COLUMNS.index("checksum"), checksum(bytes(damaged[at : at + n])))
        return said, bytes(damaged)

    return mutate


def json_mutator(content: bytes) -> Callable[[random.Random], tuple[str, bytes]]:
    """As gguf_mutator, of JSON: a value anywhere in it, or its text."""
    whole = json.loads(content)
    paths = list(_paths(whole))

    def mutate(chance: random.Random) -> tuple[str, bytes]:
        how = chance.randrange(12)
        if how == 0:
            cut = chance.randrange(len(content))
            return f"cut off at {cut}", content[:cut]
        if how == 1:
            damaged, at = bytearray(content), chance.randrange(len(content))
            damaged[at] = chance.randrange(256)
            return f"{damaged[at]} at {at}", bytes(damaged)
        if how == 2:
            levels = chance.choice((100, 100_000))
            return f"{levels} nested arrays", b'{"kind": ' + b"[" * levels
        value = json.loads(content)
        path = chance.choice(paths)
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        if how == 3:
            del parent[path[-1]]
            return f"no {path}", json.dumps(value).encode()
        if how == 4 and isinstance(parent, list):
            parent.append(parent[path[-1]])
            return f"one more of {path[:-1]}", json.dumps(value).encode()
        before = parent[path[-1]]
        choices = [None, True, False, "", "F", "x" * 70, "\ud800", [], {}, [before], {"a": before}, 1.5, 1e300, -1.0,
                   float("nan"), float("inf"), *_INTEGERS, 10**400]
        if isinstance(before, (int, float)):
            choices += [-before, 2 * before, before / 2, str(before)] * 4
        parent[path[-1]] = chance.choice(choices)
        return f"{path} is {str(parent[path[-1]])[:60]}", json.dumps(value).encode()

    return mutate


def _paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Of a value of JSON and all that is in it, of long lists the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1} if value else ()):
            yield from _paths(value[i], (*path, i))


def trace_mutator(content: bytes) -> Callable[[random.Random], tuple[str, bytes]]:
    """As gguf_mutator, of a trace: its header says what is changed, with a checksum that is right."""
    prefix = struct.Struct("<8sIII")
    magic, version, length, _ = prefix.unpack_from(content)
    header = json.loads(content[prefix.size :][:length])

    def mutate(chance: random.Random) -> tuple[str, bytes]:
        how = chance.randrange(8)
        if how == 0:
            cut = chance.randrange(len(content))
            return f"cut off at {cut}", content[:cut]
        if how == 1:
            damaged = bytearray(content)
            places = [Place(what, "", 8 + 4 * i, "<I") for i, what in enumerate(("version", "length", "checksum"))]
            return _change(damaged, chance.choice(places), chance), bytes(damaged)
        if how == 2:
            damaged = bytearray(content)
            at = chance.randrange(4096, len(content) - 8)
            damaged[at : at + 8] = chance.randbytes(8)
            return f"other bytes at {at}", bytes(damaged)
        changed = dict(header)
        key = chance.choice(sorted(header))
        if how == 3:
            del changed[key]
            said = f"no {key}"
        else:
            changed[key] = chance.choice((
                None, True, "", "topk", "x" * 70, [], [1, 2], [0, 0], [-1], ["a"], [[1]], {}, {"a": 1}, 1.5, 1e300,
                float("nan"), *_INTEGERS))
            said = f"{key} is {changed[key]!r}"
        text = json.dumps(changed).encode()
        if chance.randrange(12) == 0:
            text, said = b"[" * chance.choice((1000, 4000)), "nested"
        rest = content[4096:]
        return said, (prefix.pack(magic, version, len(text), zlib.crc32(text)) + text).ljust(4096, b"\0") + rest

    return mutate


def set_metadata(content: bytes, key: str, value: int) -> bytes:
    """A copy of a GGUF with another value of an integer of its metadata, modulo the size of its type."""
    place = next(place for place in anatomy(content).places if place.what == key)
    damaged = bytearray(content)
    _store(damaged, place, value)
    return bytes(damaged)


def retyped(content: bytes, key: str, value_type: int, value: bytes) -> bytes:
    """A copy of a GGUF in which the metadata of this key have another type, by its number, and value, as it is
    written."""
    known = anatomy(content)
    metadata = [content[begin:end] for _, begin, end in known.metadata]
    i = [name for name, _, _ in known.metadata].index(key)
    end_of_key = 8 + struct.unpack_from("<Q", metadata[i])[0]
    metadata[i] = metadata[i][:end_of_key] + struct.pack("<I", value_type) + value
    return _joined(content, known, metadata, [content[begin:end] for _, begin, end in known.tensors])


def nested(content: bytes, levels: int) -> bytes:
    """A copy of a GGUF with an array in an array in an array."""
    known, key = anatomy(content), b"pyorch.nested"
    value = struct.pack("<IQ", _ARRAY, 1) * levels + struct.pack("<IQ", 4, 0)
    metadata = [content[begin:end] for _, begin, end in known.metadata]
    metadata.append(struct.pack("<Q", len(key)) + key + struct.pack("<I", _ARRAY) + value)
    return _joined(content, known, metadata, [content[begin:end] for _, begin, end in known.tensors])


def _change(damaged: bytearray, place: Place, chance: random.Random) -> str:
    if not place.format:
        text = chance.choice(_TEXTS)[: place.size].ljust(place.size, b"x")
        damaged[place.offset : place.offset + place.size] = text
        return f"{place.what} is {text[:20]!r}"
    before = struct.unpack_from(place.format, damaged, place.offset)[0]
    if place.format in ("<f", "<d"):
        value = chance.choice(_FLOATS)
        try:
            struct.pack_into(place.format, damaged, place.offset, value)
        except OverflowError:
            value = float("inf")
            struct.pack_into(place.format, damaged, place.offset, value)
    else:
        value = chance.choice((*_INTEGERS, before + 1, before - 1, 2 * before, before // 2, chance.getrandbits(64)))
        value = _store(damaged, place, value)
    return f"{place.what} is {value}, not {before}"


def _store(damaged: bytearray, place: Place, value: int) -> int:
    size = struct.calcsize(place.format)
    damaged[place.offset : place.offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return struct.unpack_from(place.format, damaged, place.offset)[0]


def _restructured(content: bytes, known: Anatomy, chance: random.Random) -> tuple[str, bytes]:
    """Without a part, with one twice, with one in another's place, or cut off."""
    metadata = [content[begin:end] for _, begin, end in known.metadata]
    tensors = [content[begin:end] for _, begin, end in known.tensors]
    how = chance.choice(("no", "no", "no", "retyped", "retyped", "retyped", "twice", "cut", "nested", "exchanged"))
    parts, names = chance.choice(((metadata, known.metadata), (metadata, known.metadata), (tensors, known.tensors)))
    i = chance.randrange(len(parts))
    said = f"{how} {names[i][0]}"
    if how == "cut":
        cut = chance.choice((chance.randrange(len(content)), chance.randrange(known.data)))
        return f"cut off at {cut}", content[:cut]
    if how == "retyped":
        key = chance.choice(known.metadata)[0]
        value_type, value = chance.choice(_VALUES)
        return f"{key} has the type {value_type} and the bytes {value.hex()}", retyped(content, key, value_type, value)
    if how == "no":
        del parts[i]
    elif how == "twice":
        parts.append(parts[i])
    elif how == "exchanged":
        j = chance.randrange(len(parts))
        parts[i], parts[j] = parts[j], parts[i]
    else:
        levels = chance.choice((2, 5, 100_000))
        return f"{levels} nested arrays", nested(content, levels)
    return said, _joined(content, known, metadata, tensors)


def _joined(content: bytes, known: Anatomy, metadata: list[bytes], tensors: list[bytes]) -> bytes:
    head = content[:8] + struct.pack("<QQ", len(tensors), len(metadata)) + b"".join(metadata) + b"".join(tensors)
    return head.ljust(-(-len(head) // known.alignment) * known.alignment, b"\0") + content[known.data :]
