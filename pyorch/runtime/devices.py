"""Devices that compute with experts in their own memory, how they divide a model's layers, and how fast they are, which
is measured once for each device, number of threads and kind of experts, and kept.
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
from pyorch.settings.device import AUTO, REMOTE, device_names

_SOON_SECONDS = 2.0  # a device of another process answers within
_DIGITS = 3  # that a measured rate has: as many as its text


@dataclass(frozen=True)
class Device:
    """A device of one of ggml's backends. handle: its ggml_backend_dev_t, valid as long as this process.

    buffers: what llama.cpp calls its buffers. is_remote: another process has it. shares_memory: it has none of its own,
    but the processor's.
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
        """Of its memory, now."""
        return call(lib.pyorch_get_device, self.handle, out="pyorch_device_info").free_bytes

    def total_bytes(self) -> int:
        return call(lib.pyorch_get_device, self.handle, out="pyorch_device_info").total_bytes

    def memory(self) -> tuple[int, int]:
        """Free bytes of its memory, now, and all."""
        return self.free_bytes(), self.total_bytes()

    def is_lost(self) -> bool:
        """Whether it is one of another process, which is gone: what is asked of it fails. Asks that process."""
        try:
            return self.is_remote and self.total_bytes() == 0
        except PyorchError:
            return True


@dataclass(frozen=True)
class Devices:
    """Those that compute a model, each of them some blocks in a row. ends: of each, the block behind its last one."""

    each: tuple[Device, ...]
    ends: tuple[int, ...]

    @property
    def name(self) -> str:
        return ", ".join(device.name for device in self.each)

    @property
    def is_remote(self) -> bool:
        """Whether another process has one of them."""
        return any(device.is_remote for device in self.each)

    def is_lost(self) -> bool:
        """Whether one of them is."""
        return any(device.is_lost() for device in self.each)

    def layer_ends(self, model_map: ModelMap) -> list[int]:
        """As pyorch_config.device_ends says them: of those blocks that have experts."""
        return [sum(layer.il < end for layer in model_map.layers) for end in self.ends]


def find_devices(name: str) -> list[Device]:
    """Those of a setting, as find_device() finds them. "auto": all with memory of their own, at least one."""
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
    """Of a device of another process; a host that cannot be resolved as it is."""
    host, _, port = name.removeprefix(REMOTE).rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return host, int(port)


def find_device(name: str) -> Device:
    """By its name in ggml's registry, such as "CUDA0"; "auto": the first with memory of its own; or "rpc:HOST:PORT".

    One of another process that has others to serve is waited for, and a line says so. PyorchError, with the names of
    those that there are, where there is none of this name, or none can be reached.
    """
    fatal.show()  # what cannot be reached is a fatal error in ggml
    with _waiting_is_said(name):
        return _described(call(lib.pyorch_find_device, name.encode(), out="void *")[0], name.startswith(REMOTE))


def _described(handle: Any, is_remote: bool = False) -> Device:
    info = call(lib.pyorch_get_device, handle, out="pyorch_device_info")
    return Device(string(info.name), string(info.buffers), string(info.description), handle, is_remote,
                  bool(info.shares_memory))


def has_gpu() -> bool:
    """Whether this build finds one with memory of its own."""
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
    """In bytes of weights a second: of uploads, of the processor for the first row of an expert and for each further
    one, and the same of the device (pyorch_measure_device). As they were kept, or are measured and kept now.

    PyorchError where the device cannot be measured.
    """
    layer = model_map.layers[0]
    # An endpoint of another process is not what it is known by: ports come and go.
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
    """The rates, now."""
    rates = ffi.new("double[5]")
    check(lib.pyorch_measure_device(model_map.handle, device.handle, n_threads, rates))
    return [float(f"{rate:.{_DIGITS}g}") for rate in rates]
