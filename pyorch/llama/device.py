"""Where a model computes: on which device, how many of its dense layers, and how much of them is in host memory all the
same."""

from __future__ import annotations

import contextlib
import ctypes

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.llama import measure
from pyorch.llama.cores import physical_cores
from pyorch.runtime.devices import Device, find_device, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.device import AUTO, NONE
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB

# Of the device's memory, what stays free under the automatic budget: for what its driver and others take, and for what
# llama.cpp makes beside the buffers that it reports.
MARGIN_SHARE, MARGIN_BYTES = 0.05, 256 * MiB

# Beside dense weights and a KV cache: what all layers certainly fit with.
_ROOM_TO_SPARE = 1536 * MiB


def margin_bytes(total_bytes: int) -> int:
    """What stays free of a device with so much memory."""
    return max(MARGIN_BYTES, round(MARGIN_SHARE * total_bytes))


def choose(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, context: llama.llama_context_params
) -> tuple[Device | None, str]:
    """The device that the settings name, None for none, and a note of what was decided. llama.cpp then loads the model
    there, with these parameters: unless the caller said how many layers, as many of the last ones as fit beside their
    part of this context.

    PyorchError for a device that there is not.
    """
    device, note = _named(settings, model_map)
    chosen = params.n_gpu_layers not in (0, -1)  # which llama.cpp takes for nothing said
    if device is None and settings.device == AUTO:
        params.n_gpu_layers = 0
    place(params, device)
    if device is None or chosen:
        return device, note
    n, n_blocks = _layers_that_fit(device, model_map, params, context), model_map.info.n_layers
    if n <= 1 and settings.device == AUTO:
        params.n_gpu_layers = 0
        place(params, None)
        return None, f"{device.name} has no room for a layer beside its part of the context, and is not used"
    params.n_gpu_layers = n if 0 < n <= n_blocks else -1
    if 0 < n <= n_blocks:
        note += (f"{'; ' if note else ''}{device.name} has room for {n - 1} of {n_blocks} layers beside their part of "
                 "the context: the processor computes the others")
    return device, note


def _named(settings: Settings, model_map: ModelMap) -> tuple[Device | None, str]:
    """That the settings name, None for none; and a note of what was chosen."""
    if settings.device == NONE:
        return None, ""
    device = find_device(settings.device)
    if settings.device != AUTO or not model_map.layers:
        return device, ""
    said = f"{device.name} ({device.description})"
    try:
        _, processor, _, there, _ = rates_of(device, model_map, settings.n_threads or physical_cores())
    except PyorchError as error:
        return None, f"{said} is not used: {error}"
    if there <= processor:
        return None, (f"{said} computes experts at {there / processor:.2g} of the processor's speed, and is not used: "
                      f"--device {device.name} uses it all the same")
    return device, f"{said} computes experts {there / processor:.2g} times as fast as the processor: it is used"


def _layers_that_fit(
    device: Device, model_map: ModelMap, params: llama.llama_model_params, context: llama.llama_context_params
) -> int:
    """As llama.cpp counts them: what comes behind the blocks is the first one. Leaves params with another number."""
    info = model_map.info
    if info.slim:  # of which llama.cpp knows nothing without an engine
        return info.n_layers + 1
    left = device.free_bytes() - margin_bytes(device.total_bytes())
    if info.dense_bytes + model_map.kv_bytes(context.n_ctx or model_map.trained_ctx) + _ROOM_TO_SPARE <= left:
        return info.n_layers + 1

    def fits(n: int) -> bool:
        needed = device_dense_bytes(model_map, n) + measure.chain_bytes(model_map, context.n_ubatch)
        params.n_gpu_layers = n
        return needed < left and needed + measure.sizes_of(model_map, params, context, device).device <= left

    fitting, not_fitting = 0, info.n_layers + 1
    if fits(not_fitting):
        return not_fitting
    while not_fitting - fitting > 1:
        n = (fitting + not_fitting) // 2
        fitting, not_fitting = (n, not_fitting) if fits(n) else (fitting, n)
    return fitting


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


def device_dense_bytes(model_map: ModelMap, n_layers: int) -> int:
    """Of the dense weights, those that are on a device with so many layers, as llama.cpp counts them; below 0: all."""
    info = model_map.info
    if n_layers == 0:
        return 0
    blocks = [model_map.dense_bytes(il) for il in range(info.n_layers)]
    first = 0 if n_layers < 0 else max(0, len(blocks) + 1 - n_layers)
    rest = info.dense_bytes - sum(blocks)
    with contextlib.suppress(PyorchError):  # else the table of embeddings is the output's matrix, too
        if model_map.tensor_range("output.weight").size > 0:
            rest -= model_map.tensor_range("token_embd.weight").size  # which stays in host memory
    return rest + sum(blocks[first:])


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
