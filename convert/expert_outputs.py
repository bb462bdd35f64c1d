"""Computes the outputs of a GGUF's experts in numpy, to fit and to compare them.

One layer and one matrix of an expert at a time, from the weights of the GGUF, quantized or not. Each row of a matrix
has the weights of one output, as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np

from pyorch.convert import compression
from pyorch.convert.pack_plan import chunks_of
from pyorch.errors import FormatError, PyorchError
from pyorch.library import codecs
from pyorch.runtime.model_map import ByteRange, LayerInfo, ModelMap
from pyorch.sidecars import packs
from pyorch.sidecars.container import checksum
from pyorch.traces.routers import expert_inputs, quantization


def _silu(gate: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate))


def _gelu(gate: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi).astype(gate.dtype) * (gate + 0.044715 * gate**3)))


def _relu(gate: np.ndarray) -> np.ndarray:
    return np.maximum(gate, 0)


def _gated(activation: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray | None, np.ndarray], np.ndarray]:
    return lambda gate, up: activation(up) if gate is None else activation(gate) * up


def _swiglu_oai(gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
    """gpt-oss: the gate limited above, up limited on both sides and shifted, a steeper sigmoid."""
    gate = np.minimum(gate, 7)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


_SILU_ARCHS = (
    "afmoe", "arctic", "bailingmoe", "bailingmoe2", "cohere2moe", "dbrx", "deepseek", "deepseek2", "deepseek32",
    "dots1", "ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "granite_swa", "granitehybrid", "granitemoe",
    "hunyuan-moe", "jamba", "kimi-linear", "laguna", "lfm2moe", "llada-moe", "llama", "mellum", "mimo2",
    "minimax-01", "minimax-m2", "mistral3", "mistral4", "olmoe", "phimoe", "qwen2moe", "qwen35moe", "qwen3moe",
    "qwen3next", "qwen3vlmoe", "rnd1",
)

# Architectures whose experts have no own outputs that are then multiplied by weights.
UNKNOWN = {
    "llama4": "it multiplies the input of an expert by its weight, not its output",
    "grovemoe": "several of its experts share another one",
}

# general.architecture: hidden(gate or None, up), as in llama.cpp. Architectures of UNKNOWN, and architectures with
# limits of their own, are missing.
HIDDEN = {
    **dict.fromkeys(_SILU_ARCHS, _gated(_silu)),
    "gemma4": _gated(_gelu),
    "grok": _gated(_gelu),
    "gpt-oss": _swiglu_oai,
    "minimax-m3": _swiglu_oai,
    "nemotron_h_moe": _gated(lambda up: _relu(up) ** 2),
    "smallthinker": _gated(_relu),
}


def check_known(model_map: ModelMap) -> None:
    """Raises PyorchError if pyorch does not know how the model's experts compute, or how they are quantized."""
    arch = model_map.info.arch
    if arch not in HIDDEN:
        why = UNKNOWN.get(arch, "")
        raise PyorchError(f"pyorch does not know how an expert of {arch} computes" + (f": {why}" if why else ""))
    for layer in model_map.layers:
        for role in layer.roles:
            quantization(role.type)


class LayerExperts:
    """The experts of one layer. Reads and dequantizes a matrix at each access.

    Raises:
        FormatError: The file is truncated.
        PyorchError: The architecture or a type is unknown.
    """

    def __init__(self, model_map: ModelMap, il: int):
        check_known(model_map)
        self._map = model_map
        self._layer: LayerInfo = model_map.layer(il)
        self._roles = {role.name: index for index, role in enumerate(self._layer.roles)}
        self._hidden = HIDDEN[model_map.info.arch]
        # By expert and role, if only a pack has the layer (a slim model).
        self._chunks: dict[tuple[int, int], np.ndarray] = {}
        if model_map.info.slim:
            _, arrays = packs.read(model_map.pack, model_map)
            with ModelMap(model_map.pack) as packed:
                self._chunks = chunks_of(arrays, packed, self._layer)

    @property
    def n_expert(self) -> int:
        return self._layer.n_expert

    def hidden(self, expert: int, inputs: np.ndarray) -> np.ndarray:
        """Computes the input of the down projection, float32[n, n_ff], from router inputs float32[n, n_embd]."""
        inputs = expert_inputs(self._map, self._layer.il, inputs)
        if "gate_up" in self._roles:
            gate, up = np.split(self._project("gate_up", expert, inputs), 2, axis=1)
        else:
            up = self._project("up", expert, inputs)
            gate = self._project("gate", expert, inputs) if "gate" in self._roles else None
        return self._hidden(gate, up)

    def down(self, expert: int, hidden: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
        """Computes some of the outputs, float32[n, n_rows], from float32[n, n_ff]. Only their rows are read."""
        return self._project("down", expert, hidden, rows)

    def outputs(self, expert: int, inputs: np.ndarray) -> np.ndarray:
        """Computes float32[n, n_in] for router inputs float32[n, n_embd], before the routing weight.

        n_in is n_embd unless the experts are narrower than the hidden state.
        """
        return self.down(expert, self.hidden(expert, inputs))

    def _project(self, role: str, expert: int, inputs: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
        outputs = inputs @ self._matrix(self._roles[role], expert, inputs.shape[1], rows).T
        scale = self._vector(role, "scale", expert)
        if scale is not None:
            outputs *= scale
        bias = self._vector(role, "bias", expert)
        return outputs if bias is None else outputs + bias[rows]

    def _matrix(self, index: int, expert: int, n_in: int, rows: slice) -> np.ndarray:
        """Returns some rows of an expert's matrix, float32[n_rows, n_in]. Reads only these, unless it is compressed."""
        role, size = self._layer.roles[index], self._map.matrix_bytes(self._layer, index)
        kind = quantization(role.type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = n_in // block * block_bytes
        if n_in % block or size % row_bytes:
            raise FormatError(f"{self._map.path}: an expert's matrix of {size} bytes has no rows of {n_in} weights "
                              f"of the type {role.type}")
        start, stop, _ = rows.indices(size // row_bytes)
        if self._chunks:
            matrix = compression.decode_matrix([self._chunk(row) for row in self._chunks[expert, index]], role, size)
            part = matrix[start * row_bytes : stop * row_bytes]
        else:
            where = self._map.expert_range(self._layer.il, expert, index)
            part = _read(where.path, where.offset + start * row_bytes, (stop - start) * row_bytes)
        return gguf.quants.dequantize(part.reshape(stop - start, row_bytes), kind)

    def _chunk(self, row: np.void) -> tuple[str, np.ndarray]:
        """Returns the codec and the stored bytes."""
        stored = _read(str(self._map.pack), int(row["offset"]), int(row["stored"]))
        if checksum(stored) != row["checksum"]:
            raise FormatError(f"{self._map.pack} is damaged: expert {row['expert']} of layer {self._layer.il} is not "
                              "as it was packed")
        return codecs.NAMES[row["codec"]], stored

    def _vector(self, role: str, name: str, expert: int) -> np.ndarray | None:
        """Returns an expert's part of an optional tensor next to its matrices, float32[...], or None."""
        try:
            where = self._map.tensor_range(f"blk.{self._layer.il}.ffn_{role}_exps.{name}")
        except PyorchError:
            return None
        size = where.size // self._layer.n_expert
        return _read(where.path, where.offset + expert * size, size).view(np.float32)


def _read(path: str, offset: int, size: int) -> np.ndarray:
    return np.frombuffer(ByteRange(path, offset, size).read(), np.uint8)
