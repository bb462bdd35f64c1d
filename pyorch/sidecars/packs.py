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
PAGE = 4096  # alignment of records
ALIGNMENT = 64  # alignment of matrices in a record

# If the largest expert has this size, both regions of a compressed record begin at a page, so that they can be read
# past the page cache (region_alignment() in native/src/model/pack.cpp).
ALIGNED_BYTES = 120 * 1024
LAYOUTS = "layouts"  # metadata: for every matrix of every layer, PLAIN or Role.layout
PLAIN = "plain"  # the order of the model

# Metadata of packs with codecs: the codec of every matrix of every layer.
CODECS = "codecs"

# Metadata of a pack with a share of the experts, for one of several servers. It belongs to a slim model only.
SHARE = "share"

NOWHERE = -1  # the offset of chunks of experts that the pack lacks

# A row of the tensor blk.N.index: a chunk, which is a matrix of an expert, or a plane of one. expert, role: its owner.
# codec: index in pyorch.library.codecs.NAMES. offset: in the tensor blk.N.experts. stored, raw: bytes in the pack, and
# after decoding. checksum: XXH3 with 64 bits of the stored bytes.
CHUNK = np.dtype([(name, np.int64) for name in ("expert", "role", "plane", "codec", "offset", "stored", "raw")]
                 + [("checksum", np.uint64)])


# Codecs of matrices from which kernels compute directly: a layer with only these needs no recovery.
IN_SLOTS = (codecs.NAMES.index(codecs.STORED), codecs.NAMES.index(codecs.NIBBLE))


def data_name(il: int) -> str:
    return f"blk.{il}.experts"


def index_name(il: int) -> str:
    return f"blk.{il}.index"


def role_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of matrices of these sizes in a record, and the size of the record."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + size
    return offsets, -(-end // PAGE) * PAGE


def read(path: str | os.PathLike[str], model_map: ModelMap) -> tuple[container.Metadata, dict[str, np.ndarray]]:
    """Reads a pack without its experts, as container.read() does.

    Raises:
        FormatError: It is no pack of this model, or damaged.
    """
    until = data_name(model_map.layers[0].il) if model_map.layers else ""
    metadata, arrays = container.read(path, KIND, VERSION, model_map, until)
    if not isinstance(metadata.get(CODECS, []), list):
        raise FormatError(f"{path} is damaged: its {KIND}.{CODECS} is no list; make it again")
    return metadata, arrays


@dataclass(frozen=True)
class Contents:
    """An attached pack. codecs: codecs of its matrices, () if none is encoded. stored_bytes: bytes of all experts."""

    codecs: tuple[str, ...]
    stored_bytes: int


def contents(model_map: ModelMap) -> Contents | None:
    """Returns the content of the attached pack, or None.

    Raises:
        FormatError: The pack is damaged.
    """
    if model_map.pack is None:
        return None
    metadata, arrays = read(model_map.pack, model_map)
    schemes = metadata.get(CODECS, [])
    rows = (np.ascontiguousarray(arrays[index_name(layer.il)]).view(CHUNK) for layer in model_map.layers)
    return Contents(tuple(dict.fromkeys(str(scheme).partition("/")[0] for scheme in schemes)),
                    sum(int(of_layer["stored"][of_layer["offset"] != NOWHERE].sum()) for of_layer in rows))


def is_native(model_map: ModelMap) -> bool:
    """Whether the attached pack has experts in the order of one processor's kernels, or as nibbles.

    Only kernels of that order multiply nibbles.

    Raises:
        FormatError: The pack is damaged.
    """
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
    """Returns a digest of a share of the experts. share: by layer (il), bool[n_expert]."""
    import hashlib  # see container.fingerprint()

    return hashlib.sha256(b"".join(np.packbits(share[il]).tobytes() for il in sorted(share))).hexdigest()


def share_of(model_map: ModelMap) -> dict[int, np.ndarray] | None:
    """Returns the experts of the attached pack by layer (il), bool[n_expert]; None for a model with all experts.

    Raises:
        FormatError: The pack is damaged.
    """
    if model_map.pack is None or not model_map.info.slim:
        return None
    metadata, arrays = read(model_map.pack, model_map)
    if SHARE not in metadata:
        return None
    return _held(model_map.pack, arrays, model_map)


def open_model(path: str | os.PathLike[str], share: bool = False) -> ModelMap:
    """Opens a model, and the pack of a slim model. share: see require().

    Raises:
        FormatError: The model or its pack is damaged or missing.
    """
    model_map = ModelMap(path)
    container.refuse_sidecar(model_map)
    if model_map.info.slim:
        require(model_map, share=share)
    return model_map


def require(model_map: ModelMap, plain: bool = False, share: bool = False, stock: bool = False) -> None:
    """Attaches the pack of a slim model.

    Args:
        model_map: The model.
        plain: See attach().
        share: The pack may lack experts.
        stock: See attach().

    Raises:
        FormatError: There is no pack, or it is refused.
    """
    refusal = attach(model_map, plain, stock)
    if model_map.pack is None:
        raise FormatError(f"{model_map.path} is slim, its experts are in its pack: "
                          f"{refusal or f'{container.default_path(model_map.path, KIND)}: no such file'}")
    if not share and share_of(model_map) is not None:
        raise FormatError(f"{model_map.path} has a share of the experts, for one server of a cluster: `pyorch cluster "
                          "up --plan` runs it with the others")


def attach(model_map: ModelMap, plain: bool = False, stock: bool = False) -> str:
    """Lets engines of a model read experts from its pack, if there is one.

    Args:
        model_map: The model.
        plain: Experts must have the order of the model: a repacked pack is refused.
        stock: Only llama.cpp's kernels compute: a pack of nibbles is refused.

    Returns:
        Why an existing pack is not used; otherwise "".
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
    """Returns why the pack of a share is not used with a model that has all experts."""
    held = _held(path, arrays, model_map)
    n_lacking, n_experts = sum(int((~row).sum()) for row in held.values()), sum(map(len, held.values()))
    return (f"{path} has a share of the experts, without {n_lacking} of {n_experts}, and belongs beside the slim model "
            "that was written with it")


# Sizes of the parts of compressed experts, from the index of the attached pack.


@dataclass(frozen=True)
class PartSizes:
    """Bytes of an expert's exponents (E) and of all else (SM). An expert without planes is all SM.

    Attributes:
        e_bytes: Bytes to read, the mean over experts. sm_bytes: the same for SM.
        e_memory: Bytes of a slot in whole pages, for the largest of all layers with equally large experts
            (give_part_slots() in native/src/model/form.cpp). sm_memory: the same for SM.
        n_shards: The most shards of any matrix's exponents.
    """

    e_bytes: float
    sm_bytes: float
    e_memory: int
    sm_memory: int
    n_shards: int


def part_sizes(model_map: ModelMap) -> dict[int, PartSizes] | None:
    """Returns sizes by layer, for layers with compressed experts; None without such layers.

    Raises:
        FormatError: The pack is damaged.
    """
    if model_map.pack is None:
        return None
    _, arrays = read(model_map.pack, model_map)
    sizes = {}
    for layer in model_map.layers:
        chunks = np.ascontiguousarray(arrays[index_name(layer.il)]).view(CHUNK).ravel()
        if np.isin(chunks["codec"], IN_SLOTS).all() and not chunks["plane"].any():
            continue
        # Planes above 0 are shards of exponents. The last plane of a matrix, and whole matrices, belong to SM.
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
    """Returns part_sizes().

    Raises:
        FormatError: There is no compressed pack, or it is damaged.
    """
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
    """Attaches the compressed pack of a model.

    Raises:
        FormatError: There is none, or it is refused.
    """
    if not model_map.layers:
        raise FormatError(f"{model_map.path} is a dense model: it has no experts that could be packed")
    refusal = attach(model_map)
    if refusal:
        raise FormatError(refusal)
    required_part_sizes(model_map)


def _slots(il: int, sizes: dict[int, PartSizes], model_map: ModelMap) -> PartSizes:
    """Returns the sizes with slots of one size for all layers with equally large experts."""
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
