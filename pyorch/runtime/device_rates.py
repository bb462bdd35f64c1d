"""How fast a device takes experts and computes with them, beside the processor: what --device-misses auto goes by.

It is measured once for each device, number of threads and kind of experts, and kept in the user's cache directory: what
is computed where follows from it, and so do the last bits of an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path

from pyorch.errors import PyorchError
from pyorch.files import write_text
from pyorch.library.bindings import check, ffi, lib
from pyorch.runtime.devices import Device
from pyorch.runtime.disk import cache_directory
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.device import AUTO, DeviceMisses

_DIGITS = 3  # that a measured rate has: as many as its text


def rates_for(misses: DeviceMisses, model_map: ModelMap, device: Device, n_threads: int) -> DeviceMisses:
    """What was asked for; of auto without rates, with those that were kept, or are measured and kept now.

    PyorchError where the device cannot be measured.
    """
    if misses.who != AUTO or misses.rates:
        return misses
    path = _kept_in(model_map, device, n_threads)
    kept = _kept(path)
    if kept is None:
        kept = measure(model_map, device, n_threads)
        if path is not None:
            with contextlib.suppress(PyorchError):
                write_text(path, json.dumps(kept) + "\n")
    return DeviceMisses(AUTO, tuple(kept))


def measure(model_map: ModelMap, device: Device, n_threads: int) -> list[float]:
    """The five rates of DeviceMisses, now."""
    rates = ffi.new("double[5]")
    check(lib.pyorch_measure_device(model_map.handle, device.handle, n_threads, rates))
    return [float(f"{rate:.{_DIGITS}g}") for rate in rates]


def _kept(path: Path | None) -> list[float] | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8")) if path is not None else []
        if len(kept) == 5 and all(type(rate) is float and 0 < rate < math.inf for rate in kept):
            return kept
    return None


def _kept_in(model_map: ModelMap, device: Device, n_threads: int) -> Path | None:
    """None where nothing can be kept. An endpoint of another process is not what it is known by: ports come and go."""
    layer = model_map.layers[0]
    of = [device.description if not device.is_remote else "remote", n_threads, layer.expert_bytes,
          *(f"{role.name} {role.type}" for role in layer.roles), *filter(None, [os.environ.get("PYORCH_UPLOADS")])]
    name = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return None
    return directory / f"device-{name}.json"
