"""Chooses the processors and the number of threads that compute a model.

Threads synchronize at every operation. A thread on a slow core, or two on one core, would delay all others.
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
    """Counts the fast cores that this process may use, limited by its control groups' share of processor time.

    The system would stop all threads in each period if there were more.
    """
    return max(1, min([len(_fast_cores(root)[0]), *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the limit of each control group on processor time, in processors, such as docker's --cpus."""
    for group in control_groups.of_process("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.v1 else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((group.directory / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def compute_cpus(settings: Settings, n_threads: int, root: Path = Path("/")) -> list[int]:
    """Returns the numbers of the processors that compute. Empty: the system places threads.

    Without a setting, one processor of each fast core computes, if the processor has slow cores too, the fast ones
    suffice for the threads, and no variable of OpenMP is set.
    """
    if settings.cpus not in (ANY, AUTO):
        return cpu_numbers(settings.cpus)
    cores, has_slow = _fast_cores(root)
    said = settings.cpus == ANY or any(name in os.environ for name in _OPENMP)
    return [] if said or not has_slow or n_threads > len(cores) else cores


_OPENMP = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


def place(settings: Settings, n_threads: int) -> None:
    """Keeps compute threads on compute_cpus() and reader threads on the others, from the next decode on.

    Raises:
        PyorchError: This process may not use one of the processors.
    """
    global allowed_at_first
    with contextlib.suppress(AttributeError, OSError):
        allowed_at_first = _may_use()  # later, this thread may be restricted
    cpus = compute_cpus(settings, n_threads)
    check(lib.pyorch_set_compute_cpus(cpus, len(cpus)))


allowed_at_first: set[int] = set()  # the processors of this process before its threads were placed


def _may_use() -> set[int]:
    """Returns the processors that this process may use. AttributeError or OSError: the system does not tell."""
    return allowed_at_first or os.sched_getaffinity(0)


def _fast_cores(root: Path) -> tuple[list[int], bool]:
    """Returns a processor of each fast core that this process may use, and whether it may use slow ones too.

    A second hardware thread of a core does not make it compute faster.
    """
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


_FAST = 0.75  # a fast core has at least this share of the fastest core's capacity


def _fast_cpus(devices: Path) -> set[int]:
    """Returns the numbers of the fast processors; none if the system does not tell.

    Intel's hybrid processors have a device for each kind. ARM's have capacities, of which the fastest is 1024.
    """
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for path in devices.glob("system/cpu/cpu[0-9]*/cpu_capacity"):
            found[int(path.parent.name[3:])] = int(path.read_text())
        return _faster(found) or set(cpu_numbers((devices / "cpu_core/cpus").read_text()))
    return set()


def _faster(capacities: dict[int, int]) -> set[int]:
    """Returns the processors about as fast as the fastest one.

    If these are fewer than half of all that are faster than the slowest kind, as a single prime core is, returns all
    that are faster than the slowest kind.
    """
    fast = {cpu for cpu, capacity in capacities.items() if capacity >= _FAST * max(capacities.values())}
    above = {cpu for cpu, capacity in capacities.items() if capacity > min(capacities.values())}
    return fast if 2 * len(fast) >= len(above) else above
