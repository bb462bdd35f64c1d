"""Reads routers, and the projections around narrow experts, from a model's file: a replay has no graph."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np

from pyorch.errors import PyorchError
from pyorch.library.choices import gatings
from pyorch.runtime.model_map import LayerInfo, ModelMap
from pyorch.runtime.routers import Router

# Gating functions that llama.cpp does not read from the file. Other models use softmax if the file does not say.
_GATING = {"llama4": "sigmoid", "gpt-oss": "softmax-selected", "nemotron_h_moe": "sigmoid"}


def read_router(model_map: ModelMap, il: int) -> Router:
    """Reads how the router of a layer chooses experts. A replay does not need how it weighs them.

    Raises:
        PyorchError: The file has no such router, or it cannot be dequantized.
    """
    arch = model_map.info.arch
    gate = _tensor(model_map, f"blk.{il}.ffn_gate_inp.weight")
    if gate is None:
        raise PyorchError(f"{model_map.path} has no router weights blk.{il}.ffn_gate_inp.weight: only predictors that "
                          "do without can be replayed")
    n_expert = model_map.layer(il).n_expert
    norms = (_tensor(model_map, f"blk.{il}.{name}.weight") for name in ("ffn_norm", "post_attention_norm", "attn_norm"))
    norm = next((norm for norm in norms if norm is not None), None)
    eps = model_map.metadata(f"{arch}.attention.layer_norm_rms_epsilon", float)
    n_groups = max(1, model_map.hparam("expert_group_count", 1))
    return Router(
        gate=gate.reshape(n_expert, -1),
        bias=_tensor(model_map, f"blk.{il}.ffn_gate_inp.bias"),
        norm=norm if eps is not None else None,  # not an RMS normalization
        eps=eps or 0.0,
        selection_bias=_tensor(model_map, f"blk.{il}.exp_probs_b.bias"),
        gating=_GATING.get(arch)
        or gatings().named(model_map.hparam("expert_gating_func", 0))
        or "softmax",
        n_used=model_map.layer(il).n_expert_used,
        n_groups=n_groups,
        n_groups_used=model_map.hparam("expert_group_used_count", 1) if n_groups > 1 else 1,
    )


def expert_inputs(model_map: ModelMap, il: int, states: np.ndarray) -> np.ndarray:
    """Computes the inputs of a layer's experts, float32[n, layer.n_in], from the router's states float32[n, n_embd].

    In most models the two are equal; a latent MoE first projects the states to fewer numbers.

    Raises:
        PyorchError: The model projects the states in an unknown way.
    """
    layer = model_map.layer(il)
    if states.shape[1] == layer.n_in:
        return states
    down = _tensor(model_map, f"blk.{il}.ffn_latent_down.weight")
    if down is None:
        raise _unknown_projection(model_map, layer, states.shape[1])
    return states @ down.reshape(layer.n_in, -1).T


def hidden_outputs(model_map: ModelMap, il: int, outputs: np.ndarray, n_embd: int) -> np.ndarray:
    """Projects outputs of experts, float32[n, layer.n_in], to the hidden state: float32[n, n_embd].

    Raises:
        PyorchError: The model projects the outputs in an unknown way.
    """
    layer = model_map.layer(il)
    if layer.n_in == n_embd:
        return outputs
    up = _tensor(model_map, f"blk.{il}.ffn_latent_up.weight")
    if up is None:
        raise _unknown_projection(model_map, layer, n_embd)
    return outputs @ up.reshape(n_embd, -1).T


def _unknown_projection(model_map: ModelMap, layer: LayerInfo, n_embd: int) -> PyorchError:
    return PyorchError(f"{model_map.path}: the experts of layer {layer.il} compute with {layer.n_in} numbers of a "
                       f"hidden state of {n_embd}; how {model_map.info.arch} projects them is unknown")


def _tensor(model_map: ModelMap, name: str) -> np.ndarray | None:
    """Returns float32 of any tensor, flat; None if it does not exist. PyorchError: it cannot be dequantized."""
    try:
        where = model_map.tensor_range(name)
    except PyorchError:
        return None
    kind = quantization(where.type)
    blocks = np.frombuffer(where.read(), np.uint8)
    rows = gguf.quants.dequantize(blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]), kind)
    return rows.astype(np.float32, copy=False).reshape(-1)


@cache
def quantization(type_name: str) -> gguf.GGMLQuantizationType:
    """Returns the type with a name of ggml, such as q4_K.

    Raises:
        PyorchError: numpy cannot dequantize the type.
    """
    kind = getattr(gguf.GGMLQuantizationType, type_name.upper(), None)
    try:
        if kind is not None:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            return kind
    except (NotImplementedError, ValueError):
        pass
    raise PyorchError(f"weights of the type {type_name} cannot be dequantized here")
