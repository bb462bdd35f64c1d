"""Devices with experts in their memory: measured devices of this machine, or an assumed one."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.advise.machine import Compute
from pyorch.errors import PyorchError
from pyorch.llama.device_parameters import bias_bytes, header_of
from pyorch.llama.division import WIDE_UBATCH, device_margin
from pyorch.runtime.devices import find_devices, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.device_options import AUTO
from pyorch.sizes import format_bytes
from pyorch.traces.replay import token_bytes

# Bytes a second of uploads over sixteen lanes, about four fifths of the standards' values.
LINKS = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 50e9}
TYPICAL_LINK = "pcie4"
TYPICAL_BANDWIDTH = 250e9  # bytes of weights a second: two thirds of the 380 GB/s of a mid-range card's memory
# Assumed time of a layer in addition to its weights: 40 kernels are launched, and the host waits for the device twice,
# for the router's choice and for rows that the processor computes.
LAUNCH_SECONDS = 5e-6
TRIP_SECONDS = 25e-6
LAYER_SECONDS = 40 * LAUNCH_SECONDS + 2 * TRIP_SECONDS


@dataclass(frozen=True)
class DeviceSpeed:
    """The speeds of a device.

    Attributes:
        link: Bytes a second of uploads.
        decode: How many times as fast as the processor it computes a token. prefill: the same for a prompt's token.
        how: "measured", "given" or "assumed".
        layer_seconds: Additional time of each layer, independent of its tokens.
    """

    link: float
    decode: float
    prefill: float
    how: str
    layer_seconds: float = LAYER_SECONDS


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        name: None: it need not be in this machine.
        free_bytes: Free memory, None if only the memory for experts is known.
        number: The number of devices that this one stands for.
        shares_memory: Its memory is the processor's.
    """

    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    speed: DeviceSpeed
    number: int = 1
    shares_memory: bool = False


def measured(setting: str, model_map: ModelMap, n_threads: int) -> Device:
    """Measures the devices of this machine. Several count as one with the memory of all.

    A token passes through them one after another, through as many layers of each as its free memory allows.

    Raises:
        PyorchError: A name has no device, or a device cannot be measured.
    """
    found = find_devices(setting)
    rates = [rates_of(device, model_map, n_threads) for device in found]
    _, processor, processor_more, _, _ = rates[0]
    sooner = [i for i, each in enumerate(rates) if each[3] > each[1]]
    if setting == AUTO and sooner:  # a model would be loaded on these devices
        found, rates = [found[i] for i in sooner], [rates[i] for i in sooner]
    free_bytes = [device.free_bytes() for device in found]
    shares = [max(1, free) for free in free_bytes]

    def of_all(rate: int) -> float:
        """Returns one of the rates for all layers."""
        return sum(shares) / sum(share / each[rate] for share, each in zip(shares, rates))

    speed = DeviceSpeed(of_all(0), of_all(3) / processor, of_all(4) / processor_more, "measured")
    return Device(", ".join(device.name for device in found), sum(device.total_bytes() for device in found),
                  sum(free_bytes), speed, len(found), all(device.shares_memory for device in found))


def given(memory_bytes: int | None, link: float, bandwidth: float, model_map: ModelMap, compute: Compute) -> Device:
    """Returns a device with given speeds, in bytes a second: of uploads, and of weights to compute one token.

    It is assumed to gain as much for prompts.
    """
    speed = bandwidth * compute.decode_seconds / sum(token_bytes(model_map))
    return Device(None, memory_bytes, memory_bytes, DeviceSpeed(link, speed, speed, "given"))


def rest_for_experts(device: Device, model_map: ModelMap, host_dense_bytes: int, n_context_bytes: int) -> int:
    """Returns the bytes that --vram-budget auto leaves for experts.

    Raises:
        PyorchError: The dense layers and the context do not fit.
    """
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
