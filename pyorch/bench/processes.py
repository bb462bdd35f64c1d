"""What stands around a measured process: a memory limit (control groups of version 1 and 2), and busy processes."""

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

_GROUP = "pyorch-bench-"  # then the number of the process that measures
V1_ROOT, V2_ROOT = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

# Ctrl-C is for the benchmark, which ends them. They end by themselves, too, when it is gone, however it ended.
_PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """n processes that compute without a pause, until the block is left."""
    command = [sys.executable, "-S", "-E", "-c", _PROGRAM, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@dataclass(frozen=True)
class MemoryGroup:
    """A group that exists. Its memory includes the page cache that its processes fill."""

    directory: Path
    v1: bool

    def join(self) -> None:
        """Moves the calling process into the group."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """The most that was ever charged; None where the kernel does not say."""
        try:
            return int((self.directory / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")).read_text())
        except (OSError, ValueError):
            return None

    def n_killed(self) -> int:
        """Processes that the kernel killed because of the limit."""
        text = (self.directory / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup | None]:
    """A new group with this limit, removed at the end; None for 0, which is no limit.

    Raises PyorchError where none can be made.
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
    """Removes the groups of benchmarks that were killed. A group with processes stays."""
    for directory in parent.glob(f"{_GROUP}*"):
        pid = directory.name.removeprefix(_GROUP)
        if pid.isdecimal() and not os.path.isdir(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                directory.rmdir()


def _parents() -> Iterator[tuple[Path, bool]]:
    """Where a group may be made, and whether it is of version 1: beside the root first, then below our own."""
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
        # A group with processes of its own cannot have groups with limits below it: beside it, then.
        yield (V2_ROOT / own.get("", "")).parent, False


def _forbid_swap(group: MemoryGroup, limit_bytes: int) -> None:
    name, value = ("memory.memsw.limit_in_bytes", limit_bytes) if group.v1 else ("memory.swap.max", 0)
    with contextlib.suppress(OSError):  # the kernel may be built without
        (group.directory / name).write_text(str(value))


def _remove(group: MemoryGroup) -> None:
    if group.v1:
        with contextlib.suppress(OSError):
            (group.directory / "memory.force_empty").write_text("0")
    # A process that has just ended may be listed for a moment.
    for _ in range(50):
        try:
            group.directory.rmdir()
            return
        except OSError:
            time.sleep(0.02)
