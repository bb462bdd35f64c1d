"""On which processors a model is computed, and with how many threads.

Threads meet at every operation: one on a slow core would make all others wait, and so would two on one core.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pyorch.library.bindings import check, lib
from pyorch.llama import control_groups
from pyorch.settings.cpus import ANY, AUTO, cpu_numbers
from pyorch.settings.settings import Settings


def physical_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, of the fast kind where a processor has several; no more than its control groups
    give it the time of: threads beyond that would stop, all of them, in each period."""
    return max(1, min([len(_fast_cores(root)[0]), *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Processors that a control group has the time of, such as docker's --cpus; of each group that says so."""
    for group in control_groups.of_process("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.v1 else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((group.directory / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def compute_cpus(settings: Settings, n_threads: int, root: Path = Path("/")) -> list[int]:
    """Numbers of the processors on which to compute, none for where the system places threads: as it was said, else one
    of each fast core, where a processor has slow ones too, these do for the threads, and no variable of OpenMP says it.
    """
    if settings.cpus not in (ANY, AUTO):
        return cpu_numbers(settings.cpus)
    cores, has_slow = _fast_cores(root)
    said = settings.cpus == ANY or any(name in os.environ for name in _OPENMP)
    return [] if said or not has_slow or n_threads > len(cores) else cores


_OPENMP = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


def place(settings: Settings, n_threads: int) -> None:
    """Keeps threads that compute on compute_cpus(), and those that read on the others, from the next decode on.
    PyorchError for processors that this process may not use."""
    global allowed_at_first
    with contextlib.suppress(AttributeError, OSError):
        allowed_at_first = _may_use()  # this thread may use fewer once it has computed
    cpus = compute_cpus(settings, n_threads)
    check(lib.pyorch_set_compute_cpus(cpus, len(cpus)))


allowed_at_first: set[int] = set()  # what this process might use before its threads were placed


def _may_use() -> set[int]:
    """AttributeError or OSError where the system does not say."""
    return allowed_at_first or os.sched_getaffinity(0)


def _fast_cores(root: Path) -> tuple[list[int], bool]:
    """A processor of each core of the fast kind that this process may use; whether it may use slow ones, too. A second
    hardware thread of a core does not make it compute faster."""
    try:
        allowed = _may_use()
        text = (root / "proc/cpuinfo").read_text()
    except (AttributeError, OSError):
        return list(range(os.cpu_count() or 1)), False
    fast = allowed & _fast_cpus(root / "sys/devices") or allowed
    cores: dict[tuple[str | None, str], int] = {}
    for block in text.split("\n\n"):
        cpu = dict(re.findall(r"^(processor|physical id|core id)\s*:\s*(\d+)$", block, re.MULTILINE))
        number = int(cpu.get("processor", -1))
        if number in fast:
            cores.setdefault((cpu.get("physical id"), cpu.get("core id", cpu["processor"])), number)
    return sorted(cores.values() or fast), fast != allowed


_FAST = 0.75  # of the fastest core's capacity, at least


def _fast_cpus(devices: Path) -> set[int]:
    """Numbers of the processors of the fast kind; none where the system does not tell.

    Intel's hybrid processors have a device for each kind; those of ARM have capacities, the fastest of which is 1024.
    """
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for path in devices.glob("system/cpu/cpu[0-9]*/cpu_capacity"):
            found[int(path.parent.name[3:])] = int(path.read_text())
        return _faster(found) or set(cpu_numbers((devices / "cpu_core/cpus").read_text()))
    return set()


def _faster(capacities: dict[int, int]) -> set[int]:
    """Those about as fast as the fastest; but where these are fewer than half of all that are not of the slowest kind,
    as a single prime core is, all of the latter."""
    fast = {cpu for cpu, capacity in capacities.items() if capacity >= _FAST * max(capacities.values())}
    above = {cpu for cpu, capacity in capacities.items() if capacity > min(capacities.values())}
    return fast if 2 * len(fast) >= len(above) else above
