"""How many bytes the real memory limit leaves for the routed experts, beside a margin that stays free.

The real limit is the tightest of the process's control groups (version 1 and 2, all ancestors) and of physical
memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyorch.errors import BudgetError
from pyorch.llama import control_groups
from pyorch.runtime.model_map import MapInfo
from pyorch.sizes import Amount, KiB, MiB, format_bytes


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process's memory. free_bytes: what may still be allocated under it."""

    source: str
    limit_bytes: int
    free_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The limit that leaves least free. Tests pass a root with a proc and a sys of their own."""
    limits = [*_cgroup_limits(root), _physical_memory(root)]
    return min(limits, key=lambda limit: limit.free_bytes)


def peak_bytes() -> int:
    """The most that was resident of this process since its program began.

    Linux gives a process that was forked, and started a program, its parent's maximum in getrusage.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KiB)
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * KiB


def resident_bytes() -> int:
    """Bytes of this process that are in memory now (VmRSS). 0 where the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return 0
    return int(re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[1]) * KiB


def _physical_memory(root: Path) -> MemoryLimit:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:  # not Linux: what is in use is not known
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MemoryLimit("physical memory", total, total // 2)
    meminfo = {m[1]: int(m[2]) * KiB for m in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return MemoryLimit("physical memory", meminfo["MemTotal"], meminfo["MemAvailable"])


@dataclass(frozen=True)
class _Hierarchy:
    """Names of the files of a cgroup version. Page cache counts as usage but is given back under pressure."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1 = _Hierarchy(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Hierarchy(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    for group in control_groups.of_process("memory", root):
        limit = _read_group(group.directory, _V1 if group.v1 else _V2, f"cgroup {group.name}")
        if limit is not None:
            yield limit


def _read_group(directory: Path, names: _Hierarchy, source: str) -> MemoryLimit | None:
    limits = [n for n in (_read_int(directory / name) for name in names.limits) if n is not None]
    usage = _read_int(directory / names.usage)
    # Version 1 says "no limit" with the largest number of pages.
    if not limits or usage is None or min(limits) >= 1 << 62:
        return None
    stat = directory / "memory.stat"
    lines = stat.read_text().splitlines() if stat.is_file() else []
    cache = sum(int(value) for key, _, value in (line.partition(" ") for line in lines) if key in names.cache)
    return MemoryLimit(source, min(limits), max(0, min(limits) - max(0, usage - cache)))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def margin_bytes(limit: MemoryLimit) -> int:
    """Kept free: stacks, page tables, tokenizer, the page cache that buffered reads need."""
    return 96 * MiB + limit.limit_bytes * 3 // 100


def rest_bytes(limit: MemoryLimit, dense_bytes: int, context_bytes: int) -> int:
    """What is left for experts, below 0 if nothing is."""
    return limit.free_bytes - dense_bytes - context_bytes - margin_bytes(limit)


def budget_beside(
    info: MapInfo, limit: MemoryLimit, dense_bytes: int, context_bytes: int, device_bytes: int = 0
) -> int:
    """Bytes for experts of what is free under the limit, at most what all of them occupy; dense weights, a context and
    what a device has of this memory for experts are still to come, of so many bytes. BudgetError if less than the floor
    is left.
    """
    margin = margin_bytes(limit)
    rest = rest_bytes(limit, dense_bytes, context_bytes) - device_bytes
    if rest < info.floor_bytes:
        needs = {
            "for dense weights": dense_bytes,
            "for the context": context_bytes,
            "for the experts on a device that shares this memory (--vram-budget)": device_bytes,
            "for the fewest experts": info.floor_bytes,
            "as a margin": margin,
        }
        remedy = "allow it more memory, use a smaller context or ubatch"
        if rest + margin >= info.floor_bytes:
            remedy += ", or name a budget, such as --budget 40%, for which no margin is kept free"
        terms = ", ".join(f"{format_bytes(n, round_up=True)} {what}" for what, n in needs.items() if n)
        raise BudgetError(
            f"{info.name or info.arch} does not fit: {format_bytes(limit.free_bytes)} are free under the limit of "
            f"{format_bytes(limit.limit_bytes)} ({limit.source}), but it still needs "
            f"{format_bytes(sum(needs.values()), round_up=True)} ({terms}): {remedy}"
        )
    return min(rest, info.slots_bytes)


def cache_bytes() -> int:
    """Of the processor's last level of cache, 0 where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(Amount.parse(path.read_text()).n_bytes or 0)
    return max(sizes)
