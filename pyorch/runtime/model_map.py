"""The model map: where the file of a GGUF stores each routed expert, and the file's metadata."""

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

DEFAULT_CTX = 4096  # tokens of context by default, if the model was trained with more
SIDECARS = ("buddies", "maps", "predictor", "experts", "eviction", "ghosts")


@dataclass(frozen=True)
class MapInfo:
    """Sizes of a model, in bytes: fields of pyorch_model_map_info.

    Attributes:
        n_expert_used: The largest top-k of a layer.
        slim: Nonzero: only the pack has the bytes of the experts.
        n_params: Numbers in all tensors.
    """

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
    slim: int = 0
    n_params: int = 0


@dataclass(frozen=True)
class Role:
    """One matrix of an expert.

    Attributes:
        name: gate, up, down or gate_up.
        type: Its ggml type.
        n_in: Numbers of a row.
        layout: The order with the fastest kernels of this processor: "plain" as in the file, or one that
            ModelMap.repack() makes, with as many bytes.
    """

    name: str
    type: str
    n_in: int
    layout: str = "plain"


@dataclass(frozen=True)
class LayerInfo:
    """A block with routed experts.

    Attributes:
        il: llama.cpp's block number.
        n_expert: Experts of the layer.
        n_expert_used: The router's top-k.
        roles: The matrices of an expert.
        expert_bytes: Of one expert in the file.
        slot_bytes: Of one expert in memory.
    """

    il: int
    n_expert: int
    n_expert_used: int
    roles: tuple[Role, ...]
    expert_bytes: int
    slot_bytes: int

    @property
    def n_in(self) -> int:
        """Inputs of an expert: the hidden state, or fewer numbers if the model projects it first."""
        return next(role.n_in for role in self.roles if role.name != "down")

    @property
    def n_ff(self) -> int:
        """Numbers between the matrices of an expert."""
        return next(role.n_in for role in self.roles if role.name == "down")


@dataclass(frozen=True)
class ByteRange:
    """The place in a file of one matrix of an expert, or of a whole tensor. type: its ggml type, such as q4_K."""

    path: str
    offset: int
    size: int
    type: str = ""

    def read(self, at_most: int | None = None) -> bytes:
        """Returns the bytes, or the first `at_most` of them.

        Raises:
            FormatError: The file is too short or cannot be read.
        """
        size = self.size if at_most is None else min(self.size, at_most)
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(self.offset)
            content = file.read(size)
        if len(content) < size:
            raise FormatError(f"{self.path} is truncated: {size} bytes at offset {self.offset} are not all there")
        return content


def beside(model: str | os.PathLike[str], ending: str) -> Path:
    """Returns the path of a model's sidecar of this ending: model.ENDING next to the model."""
    stem, _ = os.path.splitext(Path(os.fsdecode(model)))  # accepts an empty name, which opening refuses
    return Path(f"{stem}.{ending}")


def shards_of(path: str | os.PathLike[str]) -> list[str]:
    """Returns all files of a split model, given the name of the first; for any other name, that name alone."""
    path = os.fsdecode(path)
    first = re.fullmatch(r"(.*)-00001-of-([0-9]{5})\.gguf", path, re.DOTALL)
    if first is None or int(first[2]) == 0:
        return [path]
    return [f"{first[1]}-{i + 1:05}-of-{first[2]}.gguf" for i in range(int(first[2]))]


class ModelMap:
    """The map of one GGUF, including its shards. A model without routed experts has no layers.

    Attributes:
        info: Sizes and counts; valid after close().
        layers: The layers with routed experts; valid after close().
        pack: The attached pack. None: experts are read from the model.

    Raises:
        FormatError: The file is missing, truncated, incomplete or no GGUF.
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
        """Makes engines of this map read experts from a pack of the model, and lays out slots for it.

        pyorch.sidecars.packs.attach() also checks that the pack belongs to the model.

        Raises:
            FormatError: The pack is damaged, for other kernels, or does not have these experts.
        """
        check(lib.pyorch_model_map_attach_pack(self.handle, os.fsencode(path)))
        self.pack = Path(path)
        self._read_sizes()

    def add_copy(self, file: int, disk: int, path: str | os.PathLike[str]) -> None:
        """Makes engines of this map read a file from a copy on another disk too. See pyorch.runtime.mirrors.

        Args:
            file: Index of the shard; the pack comes after the shards.
            disk: 1, 2, ...
            path: The copy. Its content is not compared here.
        """
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
        """Frees the map."""
        if self._map is not None:
            ffi.release(self._map)
            self._map = None

    def __enter__(self) -> ModelMap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layer(self, il: int) -> LayerInfo:
        """Returns the layer with llama.cpp's block number il.

        Raises:
            KeyError: The block has no routed experts.
        """
        return self._by_il[il]

    def expert_range(self, il: int, expert: int, role: int) -> ByteRange:
        """Returns the place of matrix `role` (an index into LayerInfo.roles) of an expert.

        The place is in the model, or in the pack if the model is slim.

        Raises:
            FormatError: The model is slim, and its pack is compressed or not attached.
        """
        return _range(call(lib.pyorch_model_map_get_range, self.handle, il, expert, role, out="pyorch_range"))

    def read_expert(self, il: int, expert: int) -> bytes:
        """Returns the bytes of all matrices of an expert, in the order of its roles, as Engine.offer() takes them.

        Raises:
            FormatError: The bytes cannot be read, or the model is slim and its pack is compressed or not attached.
        """
        return b"".join(self.expert_range(il, expert, role).read() for role in range(len(self.layer(il).roles)))

    def matrix_bytes(self, layer: LayerInfo, role: int) -> int:
        """Returns the bytes of matrix `role` of any expert of a layer."""
        return self.tensor_range(f"blk.{layer.il}.ffn_{layer.roles[role].name}_exps.weight").size // layer.n_expert

    def repack(self, il: int, role: int, matrix: bytearray | memoryview) -> None:
        """Repacks a matrix of any expert of a layer from the file's order into Role.layout, in place.

        Raises:
            PyorchError: The layout is plain, or the size is not that of one matrix.
        """
        buffer = ffi.from_buffer(matrix, require_writable=True)
        check(lib.pyorch_model_map_repack(self.handle, il, role, buffer, len(buffer)))

    def tensor_range(self, name: str) -> ByteRange:
        """Returns the place of any tensor.

        Raises:
            PyorchError: No tensor has this name.
        """
        return _range(call(lib.pyorch_model_map_get_tensor, self.handle, name.encode(), out="pyorch_range"))

    def dense_bytes(self, il: int) -> int:
        """Returns the bytes of block il without routed experts."""
        return lib.pyorch_model_map_dense_bytes(self.handle, il)

    def metadata(self, key: str, kind: type[T], default: T | None = None, index: int = 0) -> T | None:
        """Returns a value of the metadata: an int, float or str, or the element at `index` of an array of integers.

        The default, if the key does not exist or has another kind.
        """
        value = ffi.new("pyorch_value *")
        lib.pyorch_model_map_get_value(self.handle, key.encode(), index, value)
        found = {b"i": value.integer, b"f": value.number, b"s": string(value.text)}.get(value.kind)
        return found if isinstance(found, kind) else default

    def hparam(self, key: str, default: int | None = None, il: int = 0) -> int | None:
        """Returns a hyperparameter of the architecture: an integer, or the element for layer il of an array."""
        return self.metadata(f"{self.info.arch}.{key}", int, default, il)

    @property
    def is_encoder(self) -> bool:
        """Whether the model makes embeddings and no text: its attention is not causal."""
        return self.hparam("attention.causal") == 0

    def check_text(self) -> None:
        """Checks that the model makes text.

        Raises:
            PyorchError: It makes embeddings.
        """
        if self.is_encoder:
            raise PyorchError(f"{self.path} makes embeddings and no text: serve them with `pyorch serve {self.path} -- "
                              "--embeddings`")

    @property
    def trained_ctx(self) -> int:
        """Tokens of context that the model was trained with; DEFAULT_CTX if the file does not say."""
        return self.hparam("context_length", DEFAULT_CTX)

    @property
    def default_ctx(self) -> int:
        """Tokens of context by default."""
        return min(DEFAULT_CTX, self.trained_ctx)

    def kv_bytes(self, n_ctx: int) -> int:
        """Returns the bytes of the KV cache for n_ctx tokens of one sequence in llama.cpp's default F16, at most.

        Includes each layer's own number of heads (grouped-query attention), the compressed cache of multi-head latent
        attention, and recurrent states in place of a cache. A sliding window counts as the whole context.
        pyorch.llama.measure asks llama.cpp for the real bytes.
        """
        layers = range(self.info.n_layers)
        return n_ctx * 2 * sum(map(self._kv_width, layers)) + 4 * sum(map(self._state_width, layers))

    def sidecars(self) -> dict[str, Path]:
        """Returns the existing sidecars next to the model: kind and path."""
        paths = {kind: beside(self.path, f"{kind}.gguf") for kind in SIDECARS}
        return {kind: path for kind, path in paths.items() if os.path.isfile(path)}

    @property
    def decoded_layers(self) -> tuple[LayerInfo, ...]:
        """The layers with routed experts that run for every token: without final layers that predict further tokens."""
        n_extra = self.hparam("nextn_predict_layers", 0)
        return tuple(layer for layer in self.layers if layer.il < self.info.n_layers - n_extra)

    def _is_recurrent(self, il: int) -> bool:
        """Returns whether layer il has a recurrent state in place of attention."""
        interval = self.hparam("full_attention_interval")
        return (il + 1) % interval != 0 if interval else self.hparam("attention.head_count_kv", 1, il) == 0

    def _state_width(self, il: int) -> int:
        """Returns the values of layer il's recurrent state in F32: of its convolution and its state space."""
        n_state = self.hparam("ssm.state_size", 0)
        if not n_state or not self._is_recurrent(il):
            return 0
        n_inner, n_groups = self.hparam("ssm.inner_size", 0), self.hparam("ssm.group_count", 0)
        return (self.hparam("ssm.conv_kernel", 1) - 1) * (n_inner + 2 * n_groups * n_state) + n_inner * n_state

    def _kv_width(self, il: int) -> int:
        """Returns the values of K and V that one token stores in layer il."""
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
