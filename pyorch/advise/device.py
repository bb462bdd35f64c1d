"""A device with experts in its memory: one of this machine, which is measured, or one that is said to be there."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.advise.machine import Compute
from pyorch.errors import PyorchError
from pyorch.llama.device import bias_bytes, margin_bytes
from pyorch.llama.measure import WIDE_UBATCH, chain_bytes
from pyorch.runtime.devices import find_device, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import format_bytes
from pyorch.traces.replay import token_bytes

# Bytes a second of uploads over sixteen lanes, some four fifths of what the standards say.
LINKS = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 50e9}
TYPICAL_LINK = "pcie4"
TYPICAL_BANDWIDTH = 250e9  # bytes of weights a second: two thirds of the 380 GB/s of a middling card's memory
# What a layer takes beside its weights, assumed: 40 kernels are launched, and twice the host waits for the device, for
# what the router chose and for rows that the processor computes.
LAUNCH_SECONDS = 5e-6
TRIP_SECONDS = 25e-6
LAYER_SECONDS = 40 * LAUNCH_SECONDS + 2 * TRIP_SECONDS


@dataclass(frozen=True)
class DeviceSpeed:
    """link: bytes a second of uploads. decode, prefill: how many times as fast as the processor it computes a token,
    and a token of a prompt. how: "measured", "given" or "assumed". layer_seconds: what each layer takes beside that,
    however many tokens it has.
    """

    link: float
    decode: float
    prefill: float
    how: str
    layer_seconds: float = LAYER_SECONDS


@dataclass(frozen=True)
class Device:
    """name: None: it need not be in this machine. free_bytes: of its memory, None where only that for experts is known.
    """

    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    speed: DeviceSpeed


def measured(name: str, model_map: ModelMap, n_threads: int) -> Device:
    """One of this machine. PyorchError where there is none of that name, or it cannot be measured."""
    device = find_device(name)
    link, processor, processor_more, first, more = rates_of(device, model_map, n_threads)
    return Device(device.name, device.total_bytes(), device.free_bytes(),
                  DeviceSpeed(link, first / processor, more / processor_more, "measured"))


def given(memory_bytes: int | None, link: float, bandwidth: float, model_map: ModelMap, compute: Compute) -> Device:
    """One of such speeds: uploads, and weights with which it computes one token, in bytes a second. It is taken to gain
    as much with prompts."""
    speed = bandwidth * compute.decode_seconds / sum(token_bytes(model_map))
    return Device(None, memory_bytes, memory_bytes, DeviceSpeed(link, speed, speed, "given"))


def rest_for_experts(device: Device, model_map: ModelMap, host_dense_bytes: int, n_context_bytes: int) -> int:
    """What --vram-budget auto takes of it. PyorchError where the dense layers and the context do not fit beside."""
    info = model_map.info
    assert device.free_bytes is not None and device.total_bytes is not None
    needed = info.dense_bytes - host_dense_bytes + bias_bytes(model_map) + n_context_bytes
    needed += chain_bytes(model_map, WIDE_UBATCH)
    left = device.free_bytes - needed - margin_bytes(device.total_bytes)
    if left <= 0:
        raise PyorchError(
            f"{format_bytes(device.free_bytes)} of device memory leave nothing for experts: the other layers and the "
            f"context need {format_bytes(needed, round_up=True)}, and {format_bytes(margin_bytes(device.total_bytes))} "
            "stay free; a smaller --ctx needs less")
    return min(left, info.expert_bytes)
