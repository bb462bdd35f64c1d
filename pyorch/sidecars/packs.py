"""Packs: the sidecar model.experts.gguf, which holds the experts of a model one after another, each with checksums.

`pyorch pack` (pyorch.convert.pack) writes it, and the library reads it; docs/reference/packs.md has the format. This
module finds the pack of a model, and refuses a pack that belongs to another model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.errors import FormatError
from pyorch.library import codecs
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "experts"
VERSION = 1
PAGE = 4096  # what records begin at
ALIGNMENT = 64  # what matrices in a record begin at

# From this size of the largest expert on, both regions of a compressed record begin at a page: they may be read around
# the page cache (region_alignment() in native/src/model/pack.cpp).
ALIGNED_BYTES = 120 * 1024
LAYOUTS = "layouts"  # metadata: of every matrix of every layer, PLAIN or Role.layout
PLAIN = "plain"  # as matrices lie in the model

# Metadata of packs with other matrices than those that are stored as they are: of every one of every layer, with what.
CODECS = "codecs"

# Metadata of a pack with a share of the experts, for one of several servers: which. It lies beside a slim model only.
SHARE = "share"

NOWHERE = -1  # the offset of the chunks of the others

# A row of the tensor blk.N.index: a chunk, which is a matrix of an expert or, for codecs that take it apart, a plane of
# one. expert, role: whose. codec: in pyorch.library.codecs.NAMES. offset: in the tensor blk.N.experts. stored, raw:
# bytes in the pack, and of what it stands for. checksum: XXH3 with 64 bits of what is stored.
CHUNK = np.dtype([(name, np.int64) for name in ("expert", "role", "plane", "codec", "offset", "stored", "raw")]
                 + [("checksum", np.uint64)])


# Codecs of matrices that kernels compute from as they are stored: a layer with no others is not recovered.
IN_SLOTS = (codecs.NAMES.index(codecs.STORED), codecs.NAMES.index(codecs.NIBBLE))


def data_name(il: int) -> str:
    return f"blk.{il}.experts"


def index_name(il: int) -> str:
    return f"blk.{il}.index"


def role_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in a record the matrices of an expert begin, which are so many bytes, and how long a record is."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + size
    return offsets, -(-end // PAGE) * PAGE


def read(path: str | os.PathLike[str], model_map: ModelMap) -> tuple[container.Metadata, dict[str, np.ndarray]]:
    """As container.read(), without the experts. FormatError for what is no pack of this model, or is damaged."""
    until = data_name(model_map.layers[0].il) if model_map.layers else ""
    metadata, arrays = container.read(path, KIND, VERSION, model_map, until)
    if not isinstance(metadata.get(CODECS, []), list):
        raise FormatError(f"{path} is damaged: its {KIND}.{CODECS} is no list; make it again")
    return metadata, arrays


@dataclass(frozen=True)
class Contents:
    """Of an attached pack. codecs: that matrices are stored with, () if all are as they are; stored_bytes: of all."""

    codecs: tuple[str, ...]
    stored_bytes: int


def contents(model_map: ModelMap) -> Contents | None:
    """None without an attached pack. FormatError if it is damaged."""
    if model_map.pack is None:
        return None
    metadata, arrays = read(model_map.pack, model_map)
    schemes = metadata.get(CODECS, [])
    rows = (np.ascontiguousarray(arrays[index_name(layer.il)]).view(CHUNK) for layer in model_map.layers)
    return Contents(tuple(dict.fromkeys(str(scheme).partition("/")[0] for scheme in schemes)),
                    sum(int(of_layer["stored"][of_layer["offset"] != NOWHERE].sum()) for of_layer in rows))


def is_native(model_map: ModelMap) -> bool:
    """Whether the attached pack has experts in the order of one processor's kernels, or as nibbles, which only kernels
    of that order multiply. FormatError if it is damaged."""
    if model_map.pack is None:
        return False
    metadata, _ = read(model_map.pack, model_map)
    return _has_nibbles(metadata) or not _is_plain(metadata)


def _has_nibbles(metadata: Mapping[str, Any]) -> bool:
    return any(str(scheme).startswith(codecs.NIBBLE) for scheme in metadata.get(CODECS, []))


def _is_plain(metadata: Mapping[str, Any]) -> bool:
    layouts = metadata.get(LAYOUTS)
    return isinstance(layouts, list) and all(layout == PLAIN for layout in layouts)


def share_digest(share: Mapping[int, np.ndarray]) -> str:
    """Which experts these are. share: by layer (il), bool[n_expert]."""
    import hashlib  # see container.fingerprint()

    return hashlib.sha256(b"".join(np.packbits(share[il]).tobytes() for il in sorted(share))).hexdigest()


def share_of(model_map: ModelMap) -> dict[int, np.ndarray] | None:
    """By layer (il), bool[n_expert]: the experts that the attached pack has; None for a model that has all. FormatError
    if the pack is damaged."""
    if model_map.pack is None or not model_map.info.slim:
        return None
    metadata, arrays = read(model_map.pack, model_map)
    if SHARE not in metadata:
        return None
    return _held(model_map.pack, arrays, model_map)


def open_model(path: str | os.PathLike[str], share: bool = False) -> ModelMap:
    """The map of a model, and of a slim one with the pack that has its experts. FormatError if that is no good.
    share: see require()."""
    model_map = ModelMap(path)
    container.refuse_sidecar(model_map)
    if model_map.info.slim:
        require(model_map, share=share)
    return model_map


def require(model_map: ModelMap, plain: bool = False, share: bool = False, stock: bool = False) -> None:
    """Attaches the pack beside a slim model. FormatError if there is none, or it is refused.

    plain, stock: see attach(). share: it need not have all experts."""
    refusal = attach(model_map, plain, stock)
    if model_map.pack is None:
        raise FormatError(f"{model_map.path} is slim, its experts are in its pack: "
                          f"{refusal or f'{container.default_path(model_map.path, KIND)}: no such file'}")
    if not share and share_of(model_map) is not None:
        raise FormatError(f"{model_map.path} has a share of the experts, for one server of a cluster: `pyorch cluster "
                          "up --plan` runs it with the others")


def attach(model_map: ModelMap, plain: bool = False, stock: bool = False) -> str:
    """Has engines of a model read its experts from the pack beside it, if one lies there.

    plain: they are to compute with experts as they lie in the model: a pack that has them repacked is refused. stock:
    with llama.cpp's kernels alone: a pack of nibbles is refused.

    Returns why one that lies there is not used; "" otherwise.
    """
    path = model_map.sidecars().get(KIND)
    if path is None or model_map.pack is not None or not model_map.layers:
        return ""
    try:
        metadata, arrays = read(path, model_map)
        if SHARE in metadata and not model_map.info.slim:
            return beside_whole(path, arrays, model_map)
        if (plain or stock) and _has_nibbles(metadata):
            return (f"{path} holds nibbles, from which devices, plain and stock kernels do not compute: for these "
                    "`pyorch pack --codec table` makes one of the whole model")
        if plain and not _is_plain(metadata):
            return f"{path} holds experts in an order that the plain kernels do not compute with"
        model_map.attach_pack(path)
    except FormatError as error:
        return str(error)
    return ""


def beside_whole(path: Path, arrays: Mapping[str, np.ndarray], model_map: ModelMap) -> str:
    """Why the pack of a share is not used beside a model with all experts."""
    held = _held(path, arrays, model_map)
    n_lacking, n_experts = sum(int((~row).sum()) for row in held.values()), sum(map(len, held.values()))
    return (f"{path} has a share of the experts, without {n_lacking} of {n_experts}, and belongs beside the slim model "
            "that was written with it")


# How large the parts of compressed experts are, by the index of the pack that a model has attached


@dataclass(frozen=True)
class PartSizes:
    """Of an expert of a layer, in bytes: its exponents (E), and all the rest (SM). Without planes it is all SM.

    e_bytes, sm_bytes: that are read, the mean over experts; e_memory, sm_memory: that a slot has, for the largest of
    the layers whose experts are as large (give_part_slots() in native/src/model/form.cpp), in whole pages. n_shards:
    that exponents of a matrix are in, the most of any.
    """

    e_bytes: float
    sm_bytes: float
    e_memory: int
    sm_memory: int
    n_shards: int


def part_sizes(model_map: ModelMap) -> dict[int, PartSizes] | None:
    """By layer, of those whose experts are compressed; None for a model without a pack, or where none are.

    FormatError if the pack is damaged.
    """
    if model_map.pack is None:
        return None
    _, arrays = read(model_map.pack, model_map)
    sizes = {}
    for layer in model_map.layers:
        chunks = np.ascontiguousarray(arrays[index_name(layer.il)]).view(CHUNK).ravel()
        if np.isin(chunks["codec"], IN_SLOTS).all() and not chunks["plane"].any():
            continue
        # Planes above 0 are shards of exponents; the last one of a matrix, and what is whole, is of the other part.
        matrix = chunks["expert"] * len(layer.roles) + chunks["role"]
        last = np.zeros(layer.n_expert * len(layer.roles), np.int64)
        np.maximum.at(last, matrix, chunks["plane"])
        is_e = chunks["plane"] < last[matrix]
        e, sm = (np.bincount(chunks["expert"], np.where(of, chunks["stored"], 0), layer.n_expert)
                 for of in (is_e, ~is_e))
        n_shards = int(max(1, last.max() - 1))
        sizes[layer.il] = PartSizes(float(e.mean()), float(sm.mean()), _pages(e), _pages(sm), n_shards)
    return {il: _slots(il, sizes, model_map) for il in sizes} or None


def required_part_sizes(model_map: ModelMap) -> dict[int, PartSizes]:
    """The same. FormatError without a compressed pack, or for one that is damaged."""
    parts = part_sizes(model_map)
    if parts is None:
        beside = ""
        if model_map.pack is not None:
            beside = (f"; of {model_map.pack.name} nothing is to be recovered: it has one form, and all memory is for "
                      "that" if contents(model_map).codecs else
                      f"; {model_map.pack.name} is not compressed, and need not be: 16-bit floats shrink, quantized "
                      "experts hardly do")
        raise FormatError(f"{model_map.path} has no compressed pack: make one with `pyorch pack --codec table`{beside}")
    return parts


def require_compressed(model_map: ModelMap) -> None:
    """Attaches the compressed pack beside a model. FormatError if there is none, or it is refused."""
    if not model_map.layers:
        raise FormatError(f"{model_map.path} is a dense model: it has no experts that could be packed")
    refusal = attach(model_map)
    if refusal:
        raise FormatError(refusal)
    required_part_sizes(model_map)


def _slots(il: int, sizes: dict[int, PartSizes], model_map: ModelMap) -> PartSizes:
    """Layers whose experts are as large have slots of one size."""
    expert_bytes = model_map.layer(il).expert_bytes
    alike = [size for other, size in sizes.items() if model_map.layer(other).expert_bytes == expert_bytes]
    return replace(sizes[il], e_memory=max(size.e_memory for size in alike),
                   sm_memory=max(size.sm_memory for size in alike))


def _held(path: Path, arrays: Mapping[str, np.ndarray], model_map: ModelMap) -> dict[int, np.ndarray]:
    held = {}
    try:
        for layer in model_map.layers:
            rows = np.ascontiguousarray(arrays[index_name(layer.il)]).view(CHUNK).ravel()
            held[layer.il] = np.ones(layer.n_expert, bool)
            held[layer.il][rows["expert"][rows["offset"] == NOWHERE]] = False
    except (KeyError, ValueError, IndexError):
        raise FormatError(f"{path} is damaged where it says what is where; make it again") from None
    return held


def _pages(n_bytes: np.ndarray) -> int:
    return int(-(-n_bytes.max() // PAGE) * PAGE)
