"""Devices that compute with experts in their own memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyorch.errors import PyorchError
from pyorch.library.bindings import check, ffi, lib, new, string
from pyorch.runtime import fatal
from pyorch.settings.device import REMOTE

_SOON_SECONDS = 2.0  # a device of another process answers within


@dataclass(frozen=True)
class Device:
    """A device of one of ggml's backends. handle: its ggml_backend_dev_t, valid as long as this process.

    buffers: what llama.cpp calls its buffers. is_remote: another process has it.
    """

    name: str
    buffers: str
    description: str
    handle: Any
    is_remote: bool

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self.handle))

    def free_bytes(self) -> int:
        """Of its memory, now."""
        return _info(self.handle).free_bytes

    def total_bytes(self) -> int:
        return _info(self.handle).total_bytes

    def is_lost(self) -> bool:
        """Whether it is one of another process, which is gone: what is asked of it fails. Asks that process."""
        try:
            return self.is_remote and self.total_bytes() == 0
        except PyorchError:
            return True


def find_device(name: str) -> Device:
    """By its name in ggml's registry, such as "CUDA0"; "auto": the first that there is; or "rpc:HOST:PORT".

    One of another process that has others to serve is waited for, and a line says so. PyorchError, with the names of
    those that there are, where there is none of this name, or none can be reached.
    """
    handle = ffi.new("void **")
    with _waiting_is_said(name):
        check(lib.pyorch_find_device(name.encode(), handle))
        info = _info(handle[0])
    return Device(string(info.name), string(info.buffers), string(info.description), handle[0], name.startswith(REMOTE))


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


def _info(handle: Any) -> Any:
    info = new("pyorch_device_info")
    check(lib.pyorch_get_device(handle, info))
    return info
