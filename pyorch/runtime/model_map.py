"""The model map: where each routed expert of a GGUF lies, and what else the file says about itself."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pyorch.errors import FormatError, PyorchError
from pyorch.files import reading
from pyorch.library.bindings import call, check, ffi, lib, string
from pyorch.runtime.statistics import read

T = TypeVar("T", int, float, str)

DEFAULT_CTX = 4096  # tokens of context where nobody says how many, and the model was trained with more
SIDECARS = ("buddies", "maps", "predictor", "experts", "eviction", "ghosts")


@dataclass(frozen=True)
class MapInfo:
    """Sizes in bytes. The names are those of pyorch_model_map_info. n_expert_used is the largest top-k of a layer."""

    arch: str
    name: str
    n_files: int
    n_layers: int
    n_moe_layers: int
    n_expert_used: int
    file_bytes: int
    expert_bytes: int
    dense_bytes: int
    slots_bytes: int
    floor_bytes: int
    slim: int = 0  # nonzero: the file lacks the bytes of the experts, they are in its pack only
    n_params: int = 0  # numbers in all tensors


@dataclass(frozen=True)
class Role:
    """One matrix of an expert: what it is for (gate, up, down or gate_up), its ggml type, and the numbers of a row.

    layout: the order in which this processor's kernels are fastest with it, "plain" as in the file or one that
    ModelMap.repack() makes; as many bytes.
    """

    name: str
    type: str
    n_in: int
    layout: str = "plain"


@dataclass(frozen=True)
class LayerInfo:
    """A block with routed experts.

    n_expert_used is the top-k of its router. expert_bytes is one expert in the file, slot_bytes one in memory.
    """

    il: int
    n_expert: int
    n_expert_used: int
    roles: tuple[Role, ...]
    expert_bytes: int
    slot_bytes: int

    @property
    def n_in(self) -> int:
        """Numbers that go into an expert: those of the hidden state, or fewer where a model projects it first."""
        return next(role.n_in for role in self.roles if role.name != "down")

    @property
    def n_ff(self) -> int:
        """Numbers between the matrices of an expert."""
        return next(role.n_in for role in self.roles if role.name == "down")


@dataclass(frozen=True)
class ByteRange:
    """Where one matrix of an expert, or a whole tensor, lies, and its ggml type, such as q4_K."""

    path: str
    offset: int
    size: int
    type: str = ""

    def read(self, at_most: int | None = None) -> bytes:
        """Its bytes, or the first of them. FormatError where they are not all there, or cannot be read."""
        size = self.size if at_most is None else min(self.size, at_most)
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(self.offset)
            content = file.read(size)
        if len(content) < size:
            raise FormatError(f"{self.path} is truncated: {size} bytes at offset {self.offset} are not all there")
        return content


def beside(model: str | os.PathLike[str], ending: str) -> Path:
    """The file of this ending that belongs to a model: model.ENDING beside it."""
    stem, _ = os.path.splitext(Path(os.fsdecode(model)))  # also of a directory without a name, refused elsewhere
    return Path(f"{stem}.{ending}")


def shards_of(path: str | os.PathLike[str]) -> list[str]:
    """The files of a model that is split, by the name of its first one; of any other name that alone."""
    path = os.fsdecode(path)
    first = re.fullmatch(r"(.*)-00001-of-([0-9]{5})\.gguf", path, re.DOTALL)
    if first is None or int(first[2]) == 0:
        return [path]
    return [f"{first[1]}-{i + 1:05}-of-{first[2]}.gguf" for i in range(int(first[2]))]


class ModelMap:
    """The map of one GGUF, shards included.

    Raises FormatError if the file is missing, truncated, incomplete or no GGUF. `info` and `layers` are
    plain data that outlive close(). pack: that was attached, None: experts are read from the model. A model without
    routed experts has no layers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if "\0" in os.fsdecode(self.path):
            raise FormatError(f"{self.path!r} is not a path: it has a null character")
        opened = call(lib.pyorch_model_map_open, os.fsencode(self.path), out="pyorch_model_map *")[0]
        self._map = ffi.gc(opened, lib.pyorch_model_map_free)
        self.pack: Path | None = None
        self._read_sizes()

    def attach_pack(self, path: str | os.PathLike[str]) -> None:
        """Engines made of this map read experts from a pack of the model from now on, and slots are laid out for that.

        See pyorch.sidecars.packs.attach, which makes sure that it is this model's. Raises FormatError for a pack that
        is damaged, for other kernels, or does not hold these experts.
        """
        check(lib.pyorch_model_map_attach_pack(self.handle, os.fsencode(path)))
        self.pack = Path(path)
        self._read_sizes()

    def add_copy(self, file: int, disk: int, path: str | os.PathLike[str]) -> None:
        """Engines made of this map read a file of it, a shard or behind them the pack, from this copy too, which is on
        another disk: 1, 2, ... See pyorch.runtime.mirrors, which compares the two."""
        check(lib.pyorch_model_map_add_copy(self.handle, file, disk, os.fsencode(path)))

    @property
    def handle(self):
        """The pyorch_model_map *, owned by this object."""
        if self._map is None:
            raise FormatError(f"the map of {self.path} was closed")
        return self._map

    @property
    def shards(self) -> list[str]:
        """The files of the model, the first one first."""
        return [self.path] if self.info.n_files == 1 else shards_of(self.path)

    def close(self) -> None:
        """Frees the map; `info` and `layers` stay."""
        if self._map is not None:
            ffi.release(self._map)
            self._map = None

    def __enter__(self) -> ModelMap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layer(self, il: int) -> LayerInfo:
        """The layer with llama.cpp's block number il. KeyError if it has no routed experts."""
        return self._by_il[il]

    def expert_range(self, il: int, expert: int, role: int) -> ByteRange:
        """Where matrix `role` (an index into LayerInfo.roles) of an expert lies: in the model, or a slim one's pack.

        FormatError for a slim model whose pack is not attached, or is compressed there.
        """
        return _range(call(lib.pyorch_model_map_get_range, self.handle, il, expert, role, out="pyorch_range"))

    def read_expert(self, il: int, expert: int) -> bytes:
        """The bytes of all matrices of an expert, in the order of its roles, as Engine.offer() takes them.

        FormatError as of expert_range() and ByteRange.read().
        """
        return b"".join(self.expert_range(il, expert, role).read() for role in range(len(self.layer(il).roles)))

    def matrix_bytes(self, layer: LayerInfo, role: int) -> int:
        """Bytes of matrix `role` of any expert of a layer."""
        return self.tensor_range(f"blk.{layer.il}.ffn_{layer.roles[role].name}_exps.weight").size // layer.n_expert

    def repack(self, il: int, role: int, matrix: bytearray | memoryview) -> None:
        """Brings a matrix of any expert of a layer from the file's order into Role.layout, in place.

        PyorchError where that is plain, or the size is not that of one matrix.
        """
        buffer = ffi.from_buffer(matrix, require_writable=True)
        check(lib.pyorch_model_map_repack(self.handle, il, role, buffer, len(buffer)))

    def tensor_range(self, name: str) -> ByteRange:
        """Where any tensor lies. PyorchError if there is none of that name."""
        return _range(call(lib.pyorch_model_map_get_tensor, self.handle, name.encode(), out="pyorch_range"))

    def dense_bytes(self, il: int) -> int:
        """Of block il, without routed experts."""
        return lib.pyorch_model_map_dense_bytes(self.handle, il)

    def metadata(self, key: str, kind: type[T], default: T | None = None, index: int = 0) -> T | None:
        """A value of the metadata, int, float or str, of an array of integers the element at index; the default where
        there is none of this kind."""
        value = ffi.new("pyorch_value *")
        lib.pyorch_model_map_get_value(self.handle, key.encode(), index, value)
        found = {b"i": value.integer, b"f": value.number, b"s": string(value.text)}.get(value.kind)
        return found if isinstance(found, kind) else default

    def hparam(self, key: str, default: int | None = None, il: int = 0) -> int | None:
        """A hyperparameter of the architecture: a whole number, or an array with one for each layer."""
        return self.metadata(f"{self.info.arch}.{key}", int, default, il)

    @property
    def is_encoder(self) -> bool:
        """Whether the model makes embeddings and no text: it attends to the tokens behind a token, too."""
        return self.hparam("attention.causal") == 0

    def check_text(self) -> None:
        """PyorchError if the model makes embeddings and no text."""
        if self.is_encoder:
            raise PyorchError(f"{self.path} makes embeddings and no text: serve them with `pyorch serve {self.path} -- "
                              "--embeddings`")

    @property
    def trained_ctx(self) -> int:
        """Tokens of context that the model was trained with; DEFAULT_CTX where the file does not say it."""
        return self.hparam("context_length", DEFAULT_CTX)

    @property
    def default_ctx(self) -> int:
        """Tokens of context where nobody says how many."""
        return min(DEFAULT_CTX, self.trained_ctx)

    def kv_bytes(self, n_ctx: int) -> int:
        """Bytes of the KV cache for n_ctx tokens of one sequence in llama.cpp's default F16, an upper bound.

        Counts heads of each layer apart (grouped-query attention), the compressed cache of multi-head latent attention,
        and recurrent states in place of a cache; takes a sliding window for the whole context. llama.cpp itself says
        what a context takes: pyorch.llama.measure.
        """
        layers = range(self.info.n_layers)
        return n_ctx * 2 * sum(map(self._kv_width, layers)) + 4 * sum(map(self._state_width, layers))

    def sidecars(self) -> dict[str, Path]:
        """The files that pyorch adds, those that lie beside the model: kind and path."""
        paths = {kind: beside(self.path, f"{kind}.gguf") for kind in SIDECARS}
        return {kind: path for kind, path in paths.items() if os.path.isfile(path)}

    @property
    def decoded_layers(self) -> tuple[LayerInfo, ...]:
        """The layers with routed experts that run for every token: all but those, at the end, that only predict
        further tokens."""
        n_extra = self.hparam("nextn_predict_layers", 0)
        return tuple(layer for layer in self.layers if layer.il < self.info.n_layers - n_extra)

    def _is_recurrent(self, il: int) -> bool:
        """Whether layer il has a recurrent state in place of attention."""
        interval = self.hparam("full_attention_interval")
        return (il + 1) % interval != 0 if interval else self.hparam("attention.head_count_kv", 1, il) == 0

    def _state_width(self, il: int) -> int:
        """Values of the recurrent state of layer il in F32: of its convolution, and of its state space."""
        n_state = self.hparam("ssm.state_size", 0)
        if not n_state or not self._is_recurrent(il):
            return 0
        n_inner, n_groups = self.hparam("ssm.inner_size", 0), self.hparam("ssm.group_count", 0)
        return (self.hparam("ssm.conv_kernel", 1) - 1) * (n_inner + 2 * n_groups * n_state) + n_inner * n_state

    def _kv_width(self, il: int) -> int:
        """Values of K and V that one token keeps in layer il."""
        if self._is_recurrent(il):
            return 0
        latent = self.hparam("attention.kv_lora_rank")
        if latent:
            return latent + (self.hparam("rope.dimension_count") or 0)
        n_head = self.hparam("attention.head_count", il=il) or 1
        head = (self.hparam("embedding_length") or 0) // n_head
        key = self.hparam("attention.key_length") or head
        value = self.hparam("attention.value_length") or head
        return self.hparam("attention.head_count_kv", n_head, il) * (key + value)

    def _read_sizes(self) -> None:
        self.info = read(MapInfo, call(lib.pyorch_model_map_get_info, self.handle, out="pyorch_model_map_info"))
        self.layers = tuple(self._read_layer(i) for i in range(self.info.n_moe_layers))
        self._by_il = {layer.il: layer for layer in self.layers}
        for layer in self.layers:
            if layer.n_expert_used == 0:
                raise FormatError(f"{self.path}: {self.info.arch}.expert_used_count does not say how many experts "
                                  f"layer {layer.il} uses for a token")

    def _read_layer(self, index: int) -> LayerInfo:
        raw = call(lib.pyorch_model_map_get_layer, self.handle, index, out="pyorch_layer_info")
        roles = tuple(Role(string(raw.role[i]), string(raw.type[i]), raw.n_in[i], string(raw.layout[i]))
                      for i in range(raw.n_roles))
        return LayerInfo(raw.il, raw.n_expert, raw.n_expert_used, roles, raw.expert_bytes, raw.slot_bytes)


def _range(raw) -> ByteRange:
    return ByteRange(os.fsdecode(ffi.string(raw.path)), raw.offset, raw.size, string(raw.type))
