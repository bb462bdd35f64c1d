"""A stand-in for a checkpoint that is not converted yet: a header of a GGUF with the same experts.

Only llama.cpp's converter knows the tensors of an architecture's GGUF, and it needs the checkpoint. The stand-in is of
one architecture for all. Its layers have the checkpoint's routed experts, attention by config.json, and all other
weights as one shared expert. So it has the same bytes to keep, to read and to compute with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyorch.errors import FormatError, PyorchError

ARCHITECTURE = "bailingmoe2"  # with leading dense layers, and a shared expert of any width

_Types = gguf.GGMLQuantizationType
# The type of most matrices, and of the matrices to which llama.cpp gives more bits (values and outputs of some layers).
RECIPES = {
    "Q8_0": (_Types.Q8_0, _Types.Q8_0), "Q6_K": (_Types.Q6_K, _Types.Q6_K), "Q5_K_M": (_Types.Q5_K, _Types.Q6_K),
    "Q4_K_M": (_Types.Q4_K, _Types.Q6_K),
}
# In rows that are no multiple of 256.
_FALLBACKS = {_Types.Q4_K: _Types.Q5_0, _Types.Q5_K: _Types.Q5_1, _Types.Q6_K: _Types.Q8_0}

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "moe_topk", "moe_top_k", "moe_k",
         "top_k_experts", "experts_per_token")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_ROUTED = re.compile(r"\.experts\.|\.experts$|\.experts_|\.w[123]_experts|_exps\b")
_SCALE = re.compile(r"(?:_scale|_scale_inv|_scales|\.scales|_scale_2|\.qzeros|\.g_idx|_global_scale|_zero_point)$")
_WIDTH = 256  # the shared expert is as wide as a multiple of this


@dataclass(frozen=True)
class Outline:
    """The sizes of a checkpoint.

    Attributes:
        n_elements: Weights in all tensors.
        n_dense: Layers without experts.
        n_head, n_head_kv, n_head_width: Of the stand-in. Its queries are as wide as the hidden state, and its KV cache
            has about the checkpoint's size.
        n_ff: Numbers between the matrices of an expert.
        moe_elements: Weights of a layer with experts, but the experts. dense_elements: the same without experts.
    """

    n_elements: int
    n_layers: int
    n_dense: int
    n_embd: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    n_head_width: int
    n_ctx: int
    n_expert: int
    n_used: int
    n_ff: int
    moe_elements: int
    dense_elements: int
    tied: bool


def read(where: str, config: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> Outline:
    """Returns the outline of a checkpoint.

    Args:
        where: The name of the checkpoint, for messages.
        config: Its config.json.
        entries: The entries of its safetensors headers.

    Raises:
        FormatError: The files contradict each other, or lack a value.
        PyorchError: The model has no routed experts.
    """
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, Mapping) else config

    def value(*names: str, default: int | None = None) -> int:
        found = next((values[name] for name in names if isinstance(values.get(name), int)), default)
        if found is None or found <= 0:
            raise FormatError(f"{where}/config.json has no {names[0]}")
        return int(found)

    packed = values.get("quantization_config")
    bits = packed.get("bits", 4) if isinstance(packed, Mapping) else 4
    layers: dict[int, list[int]] = {}  # elements of experts, and of the rest
    n_elements = 0
    for name, entry in entries.items():
        n = _elements(where, name, entry, bits)
        n_elements += n
        layer = _LAYER.search(name)
        if layer is not None:
            layers.setdefault(int(layer[1]), [0, 0])[0 if _ROUTED.search(name) else 1] += n
    n_layers = value("num_hidden_layers", "n_layer", "num_layers")
    of_layers = [layers[il] for il in sorted(layers) if il < n_layers]
    sparse = [one for one in of_layers if one[0]]
    if not sparse:
        raise PyorchError(f"{where} is a dense model: it has no experts that could be read while it runs")
    dense = [one for one in of_layers if not one[0]]
    n_embd, n_head = value("hidden_size", "n_embd"), value("num_attention_heads", "n_head")
    n_expert = value(*_EXPERTS)
    n_ff = round(_median(one[0] for one in sparse) / (3 * n_embd * n_expert))
    if n_ff < 1:
        raise FormatError(f"{where} has fewer weights of experts than its config.json says")
    width = value("head_dim", default=max(1, n_embd // n_head))
    kv_width = 2 * width * value("num_key_value_heads", default=n_head)
    if isinstance(values.get("kv_lora_rank"), int):  # multi-head latent attention
        kv_width = value("kv_lora_rank") + value("qk_rope_head_dim", default=64)
    n_heads, n_heads_kv, width = _heads(n_embd, width, kv_width)
    return Outline(
        n_elements, len(of_layers), len(dense), n_embd, value("vocab_size"), n_heads, n_heads_kv, width,
        value("max_position_embeddings", "n_positions", default=4096), n_expert, value(*_USED), n_ff,
        _median(one[1] for one in sparse), _median(one[1] for one in dense) if dense else 0,
        values.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True,
    )


def _heads(n_embd: int, width: int, kv_width: int) -> tuple[int, int, int]:
    """Returns heads, heads of the KV cache, and the width of a head: near the wanted width and size of the cache."""
    width = next(w for w in (width, 128, 64, 96, 80, 32, 16, 8, 4, 2, n_embd) if n_embd % w == 0)
    n_head = n_embd // width
    divisors = [n for n in range(1, n_head + 1) if n_head % n == 0]
    return n_head, min(divisors, key=lambda n: abs(n - kv_width / (2 * width))), width


def write(outline: Outline, quantization: str, path: Path) -> None:
    """Writes the header of the stand-in in one of RECIPES. Weights are holes.

    Raises:
        PyorchError: The file cannot be written.
    """
    usual, more = RECIPES[quantization]
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    n_shared = _width(outline, outline.moe_elements - outline.n_expert * outline.n_embd)
    writer.add_block_count(outline.n_layers)
    writer.add_context_length(outline.n_ctx)
    writer.add_embedding_length(outline.n_embd)
    writer.add_feed_forward_length(_width(outline, outline.dense_elements))
    writer.add_head_count(outline.n_head)
    writer.add_head_count_kv(outline.n_head_kv)
    writer.add_key_length(outline.n_head_width)
    writer.add_value_length(outline.n_head_width)
    writer.add_rope_dimension_count(outline.n_head_width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_leading_dense_block_count(outline.n_dense)
    writer.add_expert_count(outline.n_expert)
    writer.add_expert_used_count(outline.n_used)
    writer.add_expert_feed_forward_length(outline.n_ff)
    writer.add_expert_shared_feed_forward_length(n_shared)
    writer.add_expert_shared_count(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    n_bytes = 0
    for name, kind, shape in _tensors(outline, usual, more, n_shared):
        if kind != _Types.F32 and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = _FALLBACKS.get(kind, kind)
            kind = kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else _Types.F16
        values, size = gguf.GGML_QUANT_SIZES[kind]
        taken = math.prod(shape) // values * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), taken, kind)
        n_bytes += -(-taken // 32) * 32
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with path.open("r+b") as file:
            file.truncate(-(-file.seek(0, 2) // 32) * 32 + n_bytes)
    except OSError as error:
        raise PyorchError(f"a header cannot be written to {path.parent}: {error.strerror}") from None


def _tensors(
    outline: Outline, usual: gguf.GGMLQuantizationType, more: gguf.GGMLQuantizationType, n_shared: int
) -> Iterator[tuple[str, gguf.GGMLQuantizationType, tuple[int, ...]]]:
    """Yields name, type and shape, the slowest dimension first."""
    one, n_embd, n_layers = outline, outline.n_embd, outline.n_layers
    yield "token_embd.weight", usual, (one.n_vocab, n_embd)
    yield "output_norm.weight", _Types.F32, (n_embd,)
    if not one.tied:
        yield "output.weight", more if usual != _Types.Q8_0 else usual, (one.n_vocab, n_embd)
    for il in range(n_layers):
        # llama.cpp's rule: the first and the last eighth of the layers, and each third between.
        more_bits = il < n_layers // 8 or il >= 7 * n_layers // 8 or (il - n_layers // 8) % 3 == 2
        down, block = more if more_bits else usual, f"blk.{il}."
        for name, n in (("attn_norm", n_embd), ("ffn_norm", n_embd), ("attn_q_norm", one.n_head_width),
                        ("attn_k_norm", one.n_head_width)):
            yield f"{block}{name}.weight", _Types.F32, (n,)
        yield f"{block}attn_qkv.weight", usual, (one.n_head_width * (one.n_head + 2 * one.n_head_kv), n_embd)
        yield f"{block}attn_output.weight", usual, (n_embd, one.n_head_width * one.n_head)
        if il < one.n_dense:
            parts = [("", _width(one, one.dense_elements), ())]
        else:
            yield f"{block}ffn_gate_inp.weight", _Types.F32, (one.n_expert, n_embd)
            parts = [("_exps", one.n_ff, (one.n_expert,)), ("_shexp", n_shared, ())]
        for part, n_ff, first in parts:
            yield f"{block}ffn_gate{part}.weight", usual, (*first, n_ff, n_embd)
            yield f"{block}ffn_up{part}.weight", usual, (*first, n_ff, n_embd)
            yield f"{block}ffn_down{part}.weight", down, (*first, n_embd, n_ff)


def _width(outline: Outline, n_elements: int) -> int:
    """Returns the width of a feed-forward network that, with the attention, has so many elements."""
    attention = outline.n_head_width * (2 * outline.n_head + 2 * outline.n_head_kv) * outline.n_embd
    return max(1, round((n_elements - attention) / (3 * outline.n_embd * _WIDTH))) * _WIDTH


def _elements(where: str, name: str, entry: Mapping[str, Any], bits: int) -> int:
    """Returns the weights of a tensor. Some types have several in a number."""
    try:
        n = math.prod(map(int, entry["shape"]))
        kind = str(entry["dtype"])
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"{where}: the header says neither type nor shape of {name}") from None
    if n < 0 or _SCALE.search(name):
        return 0
    return n * 2 if kind == "U8" else n * 32 // bits if kind == "I32" and bits in (2, 3, 4, 8) else n


def _median(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
