"""The memory left for experts, computed as for the budget "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama

from pyorch.advise import device_estimate as devices
from pyorch.advise.device_estimate import Device
from pyorch.errors import PyorchError
from pyorch.llama import logs, measure
from pyorch.llama.device_parameters import host_bytes_beside_device
from pyorch.llama.division import WIDE_UBATCH, MemoryLimit
from pyorch.runtime.model_map import MapInfo, ModelMap
from pyorch.sizes import MiB, as_option

# Compute buffers of a model that llama.cpp does not load, such as a header without a tokenizer.
_BUFFERS = 512 * MiB


@dataclass(frozen=True)
class Room:
    """The memory for the experts of a model, beside its other layers and a context.

    Attributes:
        context_bytes: KV cache and compute buffers, in host or device memory.
        others_bytes: Host memory for all but experts.
        without: Host memory for experts without the device; None below the floor.
        left: The same with the device.
        vram_budgets: Budgets of the device; empty without one.
    """

    context_bytes: int
    others_bytes: int
    without: int | None
    left: int | None
    vram_budgets: tuple[str, ...]


def room_for(
    model_map: ModelMap, limit: MemoryLimit, n_ctx: int, n_threads: int, device: Device | None = None,
    vram_budgets: Sequence[str] = (),
) -> Room:
    """Divides the memory. vram_budgets: as the user gave them.

    Raises:
        PyorchError: The other layers and the context do not fit on the device.
    """
    info = model_map.info
    n_context_bytes = n_host_bytes = context_bytes(model_map, n_ctx, n_threads)
    host_dense_bytes, budgets = info.dense_bytes, []
    without = rest_for_experts(info, limit, host_dense_bytes, n_context_bytes)
    if device is not None:
        if not device.shares_memory:
            host_dense_bytes = host_bytes_beside_device(model_map)
            n_host_bytes -= model_map.kv_bytes(n_ctx)
        # A device that shares the processor's memory has none for experts unless the user gives a budget.
        budgets = [
            budget if budget != "auto" else "0" if device.shares_memory else
            as_option(devices.rest_for_experts(device, model_map, host_dense_bytes, n_context_bytes))
            for budget in vram_budgets or ("auto",)]
    left = rest_for_experts(info, limit, host_dense_bytes, n_host_bytes)
    return Room(n_context_bytes, host_dense_bytes + n_host_bytes, without, left, tuple(budgets))


def context_bytes(model_map: ModelMap, n_ctx: int, n_threads: int) -> int:
    """Returns the bytes of KV cache and compute buffers, without allocating them."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, n_threads, n_threads
    params.n_batch = params.n_ubatch = min(n_ctx, WIDE_UBATCH)
    logs.install()  # pyorch reads llama.cpp's lines about sizes and does not show them
    logs.set_quiet(True)
    try:
        with measure.twin(model_map.path, llama.llama_model_default_params()) as twin:
            return measure.growth(twin, params, model_map).needed(n_ctx)
    except PyorchError:
        return model_map.kv_bytes(n_ctx) + _BUFFERS


def rest_for_experts(info: MapInfo, limit: MemoryLimit, dense_bytes: int, n_context_bytes: int) -> int | None:
    """Returns the bytes left after dense weights and context, at most those of all experts; None below the floor."""
    rest = limit.rest_bytes(dense_bytes, n_context_bytes)
    return min(rest, info.slots_bytes) if rest >= info.floor_bytes else None
