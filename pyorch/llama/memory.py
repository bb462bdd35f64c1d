"""The limit on this process's memory, and its use.

The limit is the tightest of the process's control groups (version 1 and 2, all ancestors) and of physical memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from pyorch.llama import control_groups
from pyorch.llama.control_groups import read
from pyorch.llama.division import MemoryLimit
from pyorch.sizes import Amount, KiB


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Returns the limit that leaves the fewest bytes free. Tests pass a root with its own proc and sys."""
    return MemoryLimits(root).tightest()


class MemoryLimits:
    """The limits on this process, found once and read often: finding them takes longer than reading them."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Raises OSError: this process, or the system, has too many open files."""
        self._root = root
        self._groups = self._find()

    def _find(self) -> list[control_groups.ControlGroup]:
        """Returns the groups that have a limit."""
        return [group for group in control_groups.of_process("memory", self._root) if _read_group(group) is not None]

    def tightest(self) -> MemoryLimit:
        """Returns the limit that leaves the fewest bytes free now.

        Raises:
            OSError: This process, or the system, has too many open files.
        """
        limits = list(map(_read_group, self._groups))
        if None in limits:  # the process was moved, and its group removed
            self._groups = self._find()
            limits = list(map(_read_group, self._groups))
        known = [limit for limit in limits if limit is not None]
        return min([*known, _physical_memory(self._root)], key=lambda limit: limit.free_bytes)

    def stalled_seconds(self) -> float | None:
        """Returns the time in which some program waited for memory, since the system's start.

        The kernel's pressure stall information counts it, for the innermost group of version 2, or for the machine.
        None: the kernel does not report it.
        """
        files = [group.directory / "memory.pressure" for group in self._groups if not group.v1]
        for path in (*files, self._root / "proc/pressure/memory"):
            with contextlib.suppress(OSError):
                found = re.search(r"^some .*total=(\d+)", path.read_text(), re.MULTILINE)
                if found is not None:
                    return int(found[1]) / 1e6
        return None


def is_known(root: Path = Path("/")) -> bool:
    """Returns whether the system reports its free memory. Otherwise half of its memory counts as free."""
    return (root / "proc/meminfo").is_file()


def peak_bytes() -> int:
    """Returns the peak of this process's resident bytes since its program began.

    getrusage would be wrong on Linux: a forked process that starts a program inherits its parent's maximum.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KiB)
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * KiB


@dataclass(frozen=True)
class Resident:
    """The resident bytes of this process: memory of its own, mapped files, and memory shared with other processes."""

    own: int
    files: int
    shared: int

    @property
    def total(self) -> int:
        return self.own + self.files + self.shared

    @classmethod
    def now(cls) -> Resident:
        """Reads them. 0 if the system does not report them.

        Raises:
            OSError: This process, or the system, has too many open files.
        """
        status = read(Path("/proc/self/status")) or ""  # "": not Linux
        kinds = dict(re.findall(r"^Rss(Anon|File|Shmem):\s+(\d+) kB$", status, re.MULTILINE))
        return cls(*(int(kinds.get(kind, 0)) * KiB for kind in ("Anon", "File", "Shmem")))


def _physical_memory(root: Path) -> MemoryLimit:
    text = read(root / "proc/meminfo")
    if text is None:  # not Linux: the used memory is unknown
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MemoryLimit("physical memory", total, total // 2)
    total, available = (int(n) * KiB for n in re.findall(r"^Mem(?:Total|Available):\s+(\d+) kB$", text, re.MULTILINE))
    return MemoryLimit("physical memory", total, available)


@dataclass(frozen=True)
class _Hierarchy:
    """Names of the files of a cgroup version. Page cache counts as usage, but the kernel frees it under pressure."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1 = _Hierarchy(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Hierarchy(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def _read_group(group: control_groups.ControlGroup) -> MemoryLimit | None:
    directory, names = group.directory, _V1 if group.v1 else _V2
    limits = [n for n in (_read_int(directory / name) for name in names.limits) if n is not None]
    usage = _read_int(directory / names.usage)
    # Version 1 reports "no limit" as the largest number of pages.
    if not limits or usage is None or min(limits) >= 1 << 62:
        return None
    lines = (read(directory / "memory.stat") or "").splitlines()
    cache = sum(int(value) for key, _, value in (line.partition(" ") for line in lines) if key in names.cache)
    return MemoryLimit(f"cgroup {group.name}", min(limits), max(0, min(limits) - max(0, usage - cache)))


def _read_int(path: Path) -> int | None:
    with contextlib.suppress(ValueError):  # "max"
        return int(read(path) or "")
    return None


def cache_bytes() -> int:
    """Returns the bytes of the processor's last level of cache, 0 if the system does not report them."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(Amount.parse(path.read_text()).n_bytes or 0)
    return max(sizes)
