"""The surroundings of a measured process: a memory limit (control groups 1 and 2), and busy processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyorch.errors import PyorchError

_GROUP = "pyorch-bench-"  # followed by the number of the measuring process
V1_ROOT, V2_ROOT = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

# The benchmark handles Ctrl-C and ends them. They also end by themselves when the benchmark is gone.
_PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """Runs n processes that compute without a pause, until the block ends."""
    command = [sys.executable, "-S", "-E", "-c", _PROGRAM, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@dataclass(frozen=True)
class MemoryGroup:
    """An existing control group. Its memory includes the page cache that its processes fill."""

    directory: Path
    v1: bool

    def join(self) -> None:
        """Moves the calling process into the group."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """Returns the highest memory use; None if the kernel does not report it."""
        try:
            return int((self.directory / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")).read_text())
        except (OSError, ValueError):
            return None

    def n_killed(self) -> int:
        """Returns the number of processes that the kernel killed because of the limit."""
        text = (self.directory / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup | None]:
    """Yields a new group with this limit, removed at the end; None for 0 (no limit).

    Raises:
        PyorchError: No group can be made.
    """
    if not limit_bytes:
        yield None
        return
    group = _create(limit_bytes)
    try:
        yield group
    finally:
        _remove(group)


def _create(limit_bytes: int) -> MemoryGroup:
    for parent, v1 in _parents():
        _remove_abandoned(parent)
        directory = parent / f"{_GROUP}{os.getpid()}"
        try:
            directory.mkdir(exist_ok=True)
        except OSError:
            continue
        group = MemoryGroup(directory, v1)
        try:
            (directory / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_bytes))
            _forbid_swap(group, limit_bytes)
            (directory / "cgroup.procs").read_text()
            return group
        except OSError:
            _remove(group)
    raise PyorchError(
        "a memory limit needs a control group, and neither version 1 nor version 2 of the memory controller is "
        "writable here: run as root, or without --memory-limit"
    )


def _remove_abandoned(parent: Path) -> None:
    """Removes the groups of killed benchmarks. A group with processes stays."""
    for directory in parent.glob(f"{_GROUP}*"):
        pid = directory.name.removeprefix(_GROUP)
        if pid.isdecimal() and not os.path.isdir(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                directory.rmdir()


def _parents() -> Iterator[tuple[Path, bool]]:
    """Yields folders in which a group may be made, and whether each is version 1: near the root, then below our own."""
    own = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own[controllers] = path.lstrip("/")
    for controllers, path in own.items():
        if "memory" in controllers.split(","):
            yield V1_ROOT, True
            yield V1_ROOT / path, True
    if (V2_ROOT / "cgroup.controllers").is_file():
        yield V2_ROOT, False
        # A group with processes cannot have groups with limits below it, so a sibling is made.
        yield (V2_ROOT / own.get("", "")).parent, False


def _forbid_swap(group: MemoryGroup, limit_bytes: int) -> None:
    name, value = ("memory.memsw.limit_in_bytes", limit_bytes) if group.v1 else ("memory.swap.max", 0)
    with contextlib.suppress(OSError):  # the kernel may lack this file
        (group.directory / name).write_text(str(value))


def _remove(group: MemoryGroup) -> None:
    if group.v1:
        with contextlib.suppress(OSError):
            (group.directory / "memory.force_empty").write_text("0")
    # An ended process may still be listed for a moment.
    for _ in range(50):
        try:
            group.directory.rmdir()
            return
        except OSError:
            time.sleep(0.02)
