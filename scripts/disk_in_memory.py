"""A disk with a given speed: an ext4 file system in memory, slowed down. Needs root, and Linux."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyorch.errors import PyorchError
from pyorch.sizes import MiB

_GROUPS = Path("/sys/fs/cgroup/blkio")  # version 1


@dataclass(frozen=True)
class Disk:
    """A disk. path: its mount point. device: "MAJOR:MINOR"."""

    path: Path
    device: str


@contextlib.contextmanager
def disk_in_memory(n_bytes: int) -> Iterator[Disk]:
    """Mounts a file of a tmpfs as a block device with direct reads.

    A tmpfs itself would only copy, at the speed of the kernel's threads.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        memory, mounted = Path(directory) / "memory", Path(directory) / "mounted"
        for path in (memory, mounted):
            path.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={n_bytes + 16 * MiB}", "tmpfs", memory)
        stack.callback(_run, "umount", "--lazy", memory)  # the device is released a little later
        image = memory / "image"
        with image.open("wb") as file:
            file.truncate(n_bytes)
        device = _run("losetup", "--find", "--show", "--direct-io=on", image)
        stack.callback(_run, "losetup", "--detach", device)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", device)
        _run("mount", device, mounted)
        stack.callback(_run, "umount", "--lazy", mounted)
        number = os.stat(device).st_rdev
        yield Disk(mounted, f"{os.major(number)}:{os.minor(number)}")


@contextlib.contextmanager
def slowed(disk: Disk, bytes_per_second: float) -> Iterator[None]:
    """Limits the reads of this process and its children from the disk. PyorchError: the system cannot do it."""
    if not (_GROUPS / "cgroup.procs").exists():
        raise PyorchError(f"a disk is slowed down by {_GROUPS} (control groups of version 1), which this system lacks")
    before = next(line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
                  if "blkio" in line.split(":", 2)[1].split(","))
    group = _GROUPS / f"pyorch-{os.getpid()}"
    group.mkdir()
    try:
        (group / "blkio.throttle.read_bps_device").write_text(f"{disk.device} {int(bytes_per_second)}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (_GROUPS / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _run(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout.strip()
