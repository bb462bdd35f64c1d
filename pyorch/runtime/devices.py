"""Devices that compute with experts in their own memory: names, layers and rates.

Rates are measured once per device, number of threads and kind of experts, and stored.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyorch.errors import PyorchError
from pyorch.library.bindings import call, check, ffi, lib, string
from pyorch.runtime import fatal, kept
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.device_options import AUTO, REMOTE, device_names

_SOON_SECONDS = 2.0  # a free device of another process answers faster
_DIGITS = 3  # significant digits of a measured rate


@dataclass(frozen=True)
class Device:
    """A device of one of ggml's backends.

    Attributes:
        buffers: llama.cpp's name for its buffers.
        handle: Its ggml_backend_dev_t, valid as long as this process.
        is_remote: The device belongs to another process.
        shares_memory: The device uses the processor's memory.
    """

    name: str
    buffers: str
    description: str
    handle: Any
    is_remote: bool
    shares_memory: bool = False

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self.handle))

    def free_bytes(self) -> int:
        """Returns the free bytes of its memory."""
        return call(lib.pyorch_get_device, self.handle, out="pyorch_device_info").free_bytes

    def total_bytes(self) -> int:
        return call(lib.pyorch_get_device, self.handle, out="pyorch_device_info").total_bytes

    def memory(self) -> tuple[int, int]:
        """Returns the free bytes and all bytes of its memory."""
        return self.free_bytes(), self.total_bytes()

    def is_lost(self) -> bool:
        """Returns whether the device belongs to another process that has ended. Asks that process."""
        try:
            return self.is_remote and self.total_bytes() == 0
        except PyorchError:
            return True


@dataclass(frozen=True)
class Devices:
    """The devices that compute a model, each some consecutive blocks. ends: by device, the block after its last."""

    each: tuple[Device, ...]
    ends: tuple[int, ...]

    @property
    def name(self) -> str:
        return ", ".join(device.name for device in self.each)

    @property
    def is_remote(self) -> bool:
        """Whether a device belongs to another process."""
        return any(device.is_remote for device in self.each)

    def is_lost(self) -> bool:
        """Returns whether a device is lost."""
        return any(device.is_lost() for device in self.each)

    def layer_ends(self, model_map: ModelMap) -> list[int]:
        """Returns the ends in layers with experts, as pyorch_config.device_ends counts them."""
        return [sum(layer.il < end for layer in model_map.layers) for end in self.ends]


def find_devices(name: str) -> list[Device]:
    """Finds the devices of a setting. "auto": all with memory of their own.

    Raises:
        PyorchError: A device is not found or named twice, or there is none.
    """
    names = device_names(name)
    remote = [each for each in names if each.startswith(REMOTE)] if len(names) > 1 else []
    addresses = [_address(each) for each in remote]
    for one, address in zip(remote, addresses):
        if addresses.count(address) > 1:  # its process would wait for itself
            raise PyorchError(f'device "{name}" names {one} twice, by another name')
    found = [find_device(each) for each in names]
    while name == AUTO and (handle := call(lib.pyorch_next_device, found[-1].handle, out="void *")[0]):
        found.append(_described(handle))
    return found


def _address(name: str) -> tuple[str, int]:
    """Returns host and port of a device of another process, with the host resolved if possible."""
    host, _, port = name.removeprefix(REMOTE).rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return host, int(port)


def find_device(name: str) -> Device:
    """Finds a device by its name.

    If a device of another process is busy, waits for it and prints a line.

    Args:
        name: A name of ggml's registry such as "CUDA0", "auto" for the first with memory of its own, or
            "rpc:HOST:PORT".

    Raises:
        PyorchError: No device has this name, with the names of all devices; or it cannot be reached.
    """
    fatal.show()  # ggml reports an unreachable device as a fatal error
    with _waiting_is_said(name):
        return _described(call(lib.pyorch_find_device, name.encode(), out="void *")[0], name.startswith(REMOTE))


def _described(handle: Any, is_remote: bool = False) -> Device:
    info = call(lib.pyorch_get_device, handle, out="pyorch_device_info")
    return Device(string(info.name), string(info.buffers), string(info.description), handle, is_remote,
                  bool(info.shares_memory))


def has_gpu() -> bool:
    """Returns whether this build finds a device with memory of its own."""
    try:
        find_device(AUTO)
    except PyorchError:
        return False
    return True


@contextlib.contextmanager
def _waiting_is_said(name: str) -> Iterator[None]:
    line = f"waiting for the device {name}, which serves one process at a time"
    timer = threading.Timer(_SOON_SECONDS, fatal.notice, (line,))
    if name.startswith(REMOTE):
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def rates_of(device: Device, model_map: ModelMap, n_threads: int) -> list[float]:
    """Returns the stored rates of a device, or measures and stores them (pyorch_measure_device).

    Returns:
        Bytes of weights a second: of uploads, of the processor for the first row of an expert and for each further
        row, and the same two of the device.

    Raises:
        PyorchError: The device cannot be measured.
    """
    layer = model_map.layers[0]
    # The endpoint of another process is no part of the name, because its port changes.
    name = kept.name_of("device", [
        device.description if not device.is_remote else "remote", n_threads, layer.expert_bytes,
        *(f"{role.name} {role.type}" for role in layer.roles), os.environ.get("PYORCH_UPLOADS", "locked"),
    ])
    rates = kept.read(name)
    if (not isinstance(rates, list) or len(rates) != 5
            or not all(type(rate) is float and 0 < rate < math.inf for rate in rates)):
        rates = measure(model_map, device, n_threads)
        kept.keep(name, rates)
    return rates


def measure(model_map: ModelMap, device: Device, n_threads: int) -> list[float]:
    """Measures the rates."""
    rates = ffi.new("double[5]")
    check(lib.pyorch_measure_device(model_map.handle, device.handle, n_threads, rates))
    return [float(f"{rate:.{_DIGITS}g}") for rate in rates]
