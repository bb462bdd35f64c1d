"""A probe: a model of the same shape with only its first blocks, by which this machine's computing is measured.

It is made from the header alone, so it represents a model of any size, also one that is not downloaded yet. Kernels
take as long for zeros as for other weights, so nearly all of the file is a hole. Only the routers and the embeddings of
the first tokens are random, because they decide which experts a token uses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import MiB

N_TOKEN_IDS = 256  # tokens with an embedding

# Bytes of a probe's experts of a layer: many times a processor's cache for each token, and little memory.
LAYER_BYTES = 128 * MiB

_WIDE = 4  # additional layers with experts of the larger probe
_ALIGNMENT = 32
# Blocks of zeros with other bytes than zeros: a scale of 2^-127 would be slower than others.
_NOTHING = {gguf.GGMLQuantizationType.MXFP4: b"\x7f" + bytes(16)}

# Arrays whose elements do not belong to layers, although a model may have as many layers.
_NOT_BY_LAYER = ("rope.dimension_sections",)

_LONG = 4096  # elements of an array, more than a model has layers

_LEFT_OUT = ("tokenizer.", "split.", "general.", "quantize.")


@dataclass(frozen=True)
class _Tensor:
    """A tensor. shape: in numpy's order, the slowest dimension first."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    n_bytes: int

    @property
    def block(self) -> int | None:
        """The number of its block, None outside of blocks."""
        head, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if head == "blk" else None

    @property
    def is_of_experts(self) -> bool:
        part = self.name.split(".")[2] if self.block is not None else ""
        return part.endswith("_exps") or part in ("ffn_gate_inp", "exp_probs_b")


@dataclass(frozen=True)
class Shape:
    """The shape of a model, from its header.

    metadata: key, value, type and type of elements. active_bytes: weights that a decoded token reads, by block.
    """

    arch: str
    n_expert: int
    n_expert_used: int
    metadata: tuple[tuple[str, object, gguf.GGUFValueType, gguf.GGUFValueType | None], ...]
    tensors: tuple[_Tensor, ...]
    moe_blocks: tuple[int, ...]
    active_bytes: tuple[float, ...]

    @property
    def token_bytes(self) -> float:
        """Bytes of all weights that a decoded token reads: of the blocks, and the output matrix."""
        tables = {tensor.name: tensor.n_bytes for tensor in self.tensors}
        return sum(self.active_bytes) + tables.get("output.weight", tables.get("token_embd.weight", 0))

    def sizes(self, least: int = 0) -> tuple[int, int]:
        """Returns the blocks of the smaller and the larger probe; equal if the model has no more.

        least: the fewest blocks of a probe.
        """
        first = next((i for i, il in enumerate(self.moe_blocks) if il + 1 >= least), len(self.moe_blocks) - 1)
        last = min(first + _WIDE, len(self.moe_blocks) - 1)
        return self.moe_blocks[first] + 1, self.moe_blocks[last] + 1


class _Reader(gguf.GGUFReader):
    """Skips long arrays: gguf's reader makes several objects of each word of a vocabulary, which takes seconds."""

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, n = struct.unpack_from("<IQ", self.data, orig_offs)
        if n < _LONG or kind == gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        at = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(n):
                at += 8 + struct.unpack_from("<Q", self.data, at)[0]
        else:
            at += n * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize
        return at - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]


def read_shape(model_map: ModelMap) -> Shape:
    """Reads the shape of a model with routed experts, without reading its weights."""
    arch = model_map.info.arch
    metadata, tensors = [], []
    for number, shard in enumerate(model_map.shards):
        reader = _Reader(shard)
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith(("GGUF.", *_LEFT_OUT)):
                    of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                    metadata.append((key, field.contents(), field.types[0], of))
        tensors += [_Tensor(tensor.name, tensor.tensor_type, tuple(map(int, tensor.shape[::-1])), int(tensor.n_bytes))
                    for tensor in reader.tensors]
    n_expert = max(layer.n_expert for layer in model_map.layers)
    shares = {layer.il: layer.n_expert_used / layer.n_expert for layer in model_map.layers}
    active = [0.0] * model_map.info.n_layers
    for tensor in tensors:
        if tensor.block is not None:
            share = shares[tensor.block] if tensor.is_of_experts and len(tensor.shape) > 2 else 1.0
            active[tensor.block] += share * tensor.n_bytes
    return Shape(arch, n_expert, model_map.info.n_expert_used, tuple(metadata), tuple(tensors),
                 tuple(layer.il for layer in model_map.decoded_layers), tuple(active))


def write_probe(shape: Shape, path: Path, n_blocks: int, filled: bool = False) -> None:
    """Writes the model's first blocks as a GGUF without a tokenizer.

    Args:
        shape: The shape of the model.
        path: The file to write.
        n_blocks: The number of blocks.
        filled: Write experts as zeros in place of holes, so that the file shows the speed of the disk.

    Raises:
        PyorchError: The file cannot be written.
    """
    n_expert = _experts_of_probe(shape, n_blocks)
    writer = gguf.GGUFWriter(path, shape.arch)
    for key, value, kind, of in shape.metadata:
        value = _metadata_of_probe(shape, key, value, n_blocks, n_expert)
        if value is not None:
            writer.add_key_value(key, value, kind, of)
    table = next((tensor for tensor in shape.tensors if tensor.name == "token_embd.weight"), None)
    if table is None or len(table.shape) != 2:
        raise PyorchError("the model has no table of embeddings, so no probe can be made of it")
    writer.add_vocab_size(table.shape[0])
    writer.add_tokenizer_model("none")
    tensors = [_of_probe(tensor, shape.n_expert, n_expert) for tensor in shape.tensors
               if tensor.block is None or tensor.block < n_blocks]
    if not any(tensor.name == "output.weight" for tensor in tensors):
        tensors.append(replace(table, name="output.weight"))
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, tensor.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        _write_weights(path, tensors, filled)
    except OSError as error:
        raise PyorchError(f"a probe of the model cannot be written to {path.parent}: {error.strerror}") from None


def _write_weights(path: Path, tensors: list[_Tensor], filled: bool) -> None:
    with path.open("r+b") as file:
        at = _padded(file.seek(0, 2))
        for tensor in tensors:
            file.seek(at)
            for piece in _pieces(tensor, filled):
                file.write(piece)
            at = _padded(at + tensor.n_bytes)
        file.truncate(at)


def _pieces(tensor: _Tensor, filled: bool) -> Iterator[bytes | memoryview]:
    """Yields the written part of a tensor, from its beginning; the rest is a hole."""
    random = np.random.default_rng(tensor.block or 0)
    if tensor.name == "token_embd.weight":
        rows = random.normal(0, 1, (min(N_TOKEN_IDS, tensor.shape[0]), tensor.shape[1])).astype(np.float32)
        yield gguf.quants.quantize(rows, tensor.kind).tobytes()
    elif ".ffn_gate_inp." in tensor.name and tensor.name.endswith(".weight"):
        yield random.normal(0, 0.1, tensor.shape).astype(np.float32).tobytes()
    elif ("norm" in tensor.name and tensor.name.endswith(".weight")) or "rope_f" in tensor.name:
        yield np.ones(tensor.shape, np.float32).tobytes()
    elif tensor.is_of_experts and (filled or tensor.kind == gguf.GGMLQuantizationType.MXFP4):
        block = _NOTHING.get(tensor.kind, b"\0")
        piece = memoryview(block * (4 * MiB // len(block)))
        for at in range(0, tensor.n_bytes, len(piece)):
            yield piece[: tensor.n_bytes - at]


def _of_probe(tensor: _Tensor, n_expert: int, n_kept: int) -> _Tensor:
    """Returns the tensor with fewer experts, and with a type in which random numbers can be written."""
    if tensor.is_of_experts and tensor.shape[0] == n_expert:
        tensor = replace(tensor, shape=(n_kept, *tensor.shape[1:]), n_bytes=tensor.n_bytes // n_expert * n_kept)
    if tensor.name == "token_embd.weight":
        kind = gguf.GGMLQuantizationType.Q4_0 if tensor.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F16
    elif ".ffn_gate_inp." in tensor.name or len(tensor.shape) == 1 or "norm" in tensor.name:
        kind = gguf.GGMLQuantizationType.F32
    else:
        return tensor
    values, size = gguf.GGML_QUANT_SIZES[kind]
    return replace(tensor, kind=kind, n_bytes=int(np.prod(tensor.shape)) // values * size)


def _experts_of_probe(shape: Shape, n_blocks: int) -> int:
    """Returns the experts of a probe's layer: enough that a token uses few of them.

    Layers of a deep probe have fewer, so that all need no more memory than in a probe of _WIDE + 1 layers.
    """
    groups = next((value for key, value, _, _ in shape.metadata if key == f"{shape.arch}.expert_group_count"), 0)
    if groups and int(groups) > 1:
        return shape.n_expert  # every group needs its part
    largest = max(sum(tensor.n_bytes for tensor in shape.tensors if tensor.block == il and tensor.is_of_experts)
                  for il in shape.moe_blocks)
    n_layers = max(_WIDE + 1, sum(il < n_blocks for il in shape.moe_blocks))
    fit = int(LAYER_BYTES * (_WIDE + 1) / n_layers * shape.n_expert / max(1, largest))
    return min(shape.n_expert, max(fit, 2 * shape.n_expert_used + 1))


def _metadata_of_probe(shape: Shape, key: str, value: object, n_blocks: int, n_expert: int) -> object:
    """Returns the metadata of a probe for a key; None to leave the key out."""
    name = key.removeprefix(f"{shape.arch}.")
    if name in ("nextn_predict_layers", "vocab_size"):
        return None
    if name == "block_count":
        return n_blocks
    if name == "expert_count":
        return n_expert
    if isinstance(value, list) and len(value) == len(shape.active_bytes) and name not in _NOT_BY_LAYER:
        return value[:n_blocks]
    return value


def _padded(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
