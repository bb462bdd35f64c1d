"""Devices with experts in their memory: those of this machine, which are measured, or one that is said to be there."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.advise.machine import Compute
from pyorch.errors import PyorchError
from pyorch.llama.device import bias_bytes, header_of
from pyorch.llama.division import WIDE_UBATCH, device_margin
from pyorch.runtime.devices import find_devices, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.device import AUTO
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
    number: of devices, for which this one stands. shares_memory: its memory is the processor's.
    """

    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    speed: DeviceSpeed
    number: int = 1
    shares_memory: bool = False


def measured(setting: str, model_map: ModelMap, n_threads: int) -> Device:
    """Those of this machine. Several are taken for one with the memory of all: a token goes through them one after
    another, through as many layers of each as its free memory allows.

    PyorchError where there is none of a name, or it cannot be measured.
    """
    found = find_devices(setting)
    rates = [rates_of(device, model_map, n_threads) for device in found]
    _, processor, processor_more, _, _ = rates[0]
    sooner = [i for i, each in enumerate(rates) if each[3] > each[1]]
    if setting == AUTO and sooner:  # whose like a model is loaded on
        found, rates = [found[i] for i in sooner], [rates[i] for i in sooner]
    free_bytes = [device.free_bytes() for device in found]
    shares = [max(1, free) for free in free_bytes]

    def of_all(rate: int) -> float:
        """One of the rates, in all layers."""
        return sum(shares) / sum(share / each[rate] for share, each in zip(shares, rates))

    speed = DeviceSpeed(of_all(0), of_all(3) / processor, of_all(4) / processor_more, "measured")
    return Device(", ".join(device.name for device in found), sum(device.total_bytes() for device in found),
                  sum(free_bytes), speed, len(found), all(device.shares_memory for device in found))


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
    needed += device.number * header_of(model_map).chain_bytes(WIDE_UBATCH)
    margin = device.number * device_margin(device.total_bytes // device.number)
    left = device.free_bytes - needed - margin
    if left <= 0:
        raise PyorchError(
            f"{format_bytes(device.free_bytes)} of device memory leave nothing for experts: the other layers and the "
            f"context need {format_bytes(needed, round_up=True)}, and {format_bytes(margin)} "
            "stay free; a smaller --ctx needs less")
    return min(left, info.expert_bytes)
