"""The control groups of a process, of version 1 and 2."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class ControlGroup:
    """A control group. directory: its files. name: its path as users know it. v1: version 1."""

    directory: Path
    name: PurePosixPath
    v1: bool


def read(path: Path) -> str | None:
    """Returns the text of a file of the kernel, None if it does not exist or may not be read.

    Raises:
        OSError: This process, or the system, has too many open files: the file may exist.
    """
    try:
        return path.read_text()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def of_process(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yields the groups that may limit this process by a controller such as memory.

    These are its own group and each ancestor that is mounted. Tests pass a root with its own proc and sys.

    Raises:
        OSError: As read().
    """
    memberships, mounts = read(root / "proc/self/cgroup"), (read(root / "proc/self/mountinfo") or "").splitlines()
    for membership in (memberships or "").splitlines():
        _, controllers, path = membership.split(":", 2)
        v1 = controller in controllers.split(",")
        if not v1 and controllers:
            continue
        for mount_root, mount_point in _mounts(mounts, controller, v1):
            for group in _ancestry(PurePosixPath(path), mount_root):
                yield ControlGroup(root / str(mount_point).lstrip("/") / group, mount_point / group, v1)


def _mounts(mountinfo: list[str], controller: str, v1: bool) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yields root and mount point of each mount of the controller's hierarchy, see proc(5)."""
    for line in mountinfo:
        fields, _, after = line.partition(" - ")
        fs_type, _, options = after.split(" ", 2)
        if fs_type == ("cgroup" if v1 else "cgroup2") and (not v1 or controller in options.split(",")):
            yield PurePosixPath(fields.split()[3]), PurePosixPath(fields.split()[4])


def _ancestry(group: PurePosixPath, mount_root: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yields the group and its ancestors, relative to the mount point."""
    # In a container, the group's path may be the host's although only the group itself is mounted.
    below = group.relative_to(mount_root) if group.is_relative_to(mount_root) else PurePosixPath(".")
    if ".." in below.parts:
        below = PurePosixPath(".")
    yield below
    if below != PurePosixPath("."):
        yield from below.parents
