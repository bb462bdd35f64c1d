"""Where a model computes: its dense layers on a device, and how much of that one's memory is left for experts."""

from __future__ import annotations

import contextlib
import ctypes

import llama_cpp.llama_cpp as llama

from pyorch.errors import DeviceError, PyorchError
from pyorch.llama import measure
from pyorch.llama.managed import ManagedModel, find
from pyorch.llama.originals import original
from pyorch.runtime import fatal
from pyorch.runtime.devices import find_device
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO
from pyorch.settings.device import NONE
from pyorch.sizes import MiB, format_bytes

# Of the device's memory, what stays free under the automatic budget: for what its driver and others take, and for what
# llama.cpp makes beside the buffers that it reports.
MARGIN_SHARE, MARGIN_BYTES = 0.05, 256 * MiB


def margin_bytes(total_bytes: int) -> int:
    """What stays free of a device with so much memory."""
    return max(MARGIN_BYTES, round(MARGIN_SHARE * total_bytes))


def place(managed: ManagedModel) -> None:
    """Sets the parameters with which llama.cpp loads the model: all dense layers on the device, unless the caller chose
    how many; without one, and without such a choice, everything on the processor. PyorchError for a device that there
    is not."""
    params = managed.params
    devices = []
    if managed.settings.device != NONE:
        managed.device = find_device(managed.settings.device)
        devices = [managed.device.address]
        params.n_gpu_layers = params.n_gpu_layers or -1
    if devices or params.n_gpu_layers == 0:
        managed.device_list = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.addressof(managed.device_list)


def host_dense_bytes(managed: ManagedModel) -> int:
    """Of the dense weights, those that are in host memory."""
    info, n_gpu_layers = managed.map.info, managed.params.n_gpu_layers
    if managed.device is None or 0 <= n_gpu_layers <= info.n_layers:
        return info.dense_bytes
    return host_bytes_beside_device(managed.map)


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


def refuse_lost(model: int, context: int) -> None:
    """DeviceError where the llama_model * computes on a device of another process, and that is gone.

    Before a decode, which might ask it for memory, and that ends the process; and after one that went well: who reads
    logits that were never computed is told nothing else.
    """
    managed = find(model)
    device = managed.device if managed is not None else None
    if device is None or not device.is_remote:
        return
    llama.llama_synchronize(context)
    if device.is_lost():
        raise DeviceError(f"{lost(managed)}; load the model again, with it or without --device")


def lost(managed: ManagedModel) -> str:
    """Says that the device is."""
    return f"the device {managed.settings.device} is lost: its process ended, or cannot be reached"


def plan_device(managed: ManagedModel, params: llama.llama_context_params, is_loaded: bool = True) -> None:
    """What experts get of the device: under the automatic budget, what a first context with these parameters will leave
    of it; of a budget that was given, no more than that, and a line says so.

    is_loaded: the dense weights are there already.
    """
    device = managed.device
    if managed.engine is None or device is None or managed.device_planned:
        return
    info, budget = managed.map.info, managed.settings.vram_budget
    with managed.engine.capture(), measure.twin(
        original("llama_model_load_from_file"), managed.path, managed.params
    ) as twin:
        sizes = measure.context_sizes(original("llama_init_from_model"), twin, params, managed.map, managed.device)
    needed = sizes.device + measure.chain_bytes(managed.map, params.n_ubatch)
    if not is_loaded:
        needed += info.dense_bytes - host_dense_bytes(managed) + bias_bytes(managed.map)
    left = device.free_bytes() - needed
    if budget == AUTO:
        managed.engine.set_device_budget(max(0, left - margin_bytes(device.total_bytes())))
    elif left < (given := min(budget.amount.of(info.expert_bytes), info.expert_bytes)):
        managed.engine.set_device_budget(max(0, left))
        fatal.notice(f"note: {device.name} has {format_bytes(max(0, left))} left beside the other layers and the "
                     f"context: so much is for experts, not {format_bytes(given)}")
    managed.device_planned = True
