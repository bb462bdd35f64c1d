"""Models come and go on a device, and nothing of them stays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import device_loads_process
import pytest
from devices import DeviceProcess
from ggufs import write_moe_model
from processes import python

from pyorch.sizes import MiB

N_LOADS, WARM_UP = 50, 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process")
def test_memory_of_both_processes_is_flat_over_50_loads(tmp_path: Path) -> None:
    """The slots alone are 200 KiB each time. An arena of the allocator that comes at some time, or comes and goes, is
    no leak: what leaks has more left after most loads than ever again."""
    write_moe_model(tmp_path / "model.gguf")
    device = DeviceProcess(tmp_path / "log")
    try:
        done = python(Path(device_loads_process.__file__), tmp_path / "model.gguf", device.name,
                      device.process.pid, N_LOADS)
    finally:
        device.stop()
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    assert len(held) == N_LOADS
    for sizes in zip(*held[WARM_UP:]):  # of this process, and of the device's
        least = [min(sizes[i:]) for i in range(len(sizes))]  # that is held from then on
        grown = sum(after - before >= MiB // 16 for before, after in zip(least, least[1:]))
        assert grown < len(sizes) // 5
