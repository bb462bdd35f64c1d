"""Where a model computes: its dense layers on a device, and how much of them is in host memory all the same."""

from __future__ import annotations

import contextlib
import ctypes

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.runtime.devices import Device
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import MiB

# Of the device's memory, what stays free under the automatic budget: for what its driver and others take, and for what
# llama.cpp makes beside the buffers that it reports.
MARGIN_SHARE, MARGIN_BYTES = 0.05, 256 * MiB


def margin_bytes(total_bytes: int) -> int:
    """What stays free of a device with so much memory."""
    return max(MARGIN_BYTES, round(MARGIN_SHARE * total_bytes))


def place(params: llama.llama_model_params, device: Device | None) -> None:
    """Sets the parameters with which llama.cpp loads the model: all dense layers on the device, unless the caller chose
    how many; without one, and without such a choice, everything on the processor."""
    if device is not None:
        params.n_gpu_layers = params.n_gpu_layers or -1
    elif params.n_gpu_layers != 0:
        return
    devices = [device.address] if device is not None else []
    device_list = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    params.device_list = device_list  # which lives as long as what points to it
    params.devices = ctypes.addressof(device_list)  # type: ignore[assignment]


def host_dense_bytes(model_map: ModelMap, device: Device | None, params: llama.llama_model_params) -> int:
    """Of the dense weights, those that are in host memory when llama.cpp loads the model with these parameters."""
    info = model_map.info
    if device is None or 0 <= params.n_gpu_layers <= info.n_layers:
        return info.dense_bytes
    return host_bytes_beside_device(model_map)


def host_bytes_beside_device(model_map: ModelMap) -> int:
    """Of the dense weights, those that are in host memory with all layers on a device: the table of embeddings, and
    copies of the experts' biases, which both sides compute with."""
    try:
        return min(model_map.info.dense_bytes,
                   model_map.tensor_range("token_embd.weight").size + bias_bytes(model_map))
    except PyorchError:
        return model_map.info.dense_bytes


def bias_bytes(model_map: ModelMap) -> int:
    """Of the experts."""
    total = 0
    for layer in model_map.layers:
        for role in ("gate", "up", "down", "gate_up"):
            with contextlib.suppress(PyorchError):
                total += model_map.tensor_range(f"blk.{layer.il}.ffn_{role}_exps.bias").size
    return total
