"""Mirrors: copies of the model on other disks, from which experts are read too.

At the first use, every byte of a copy is compared with the original. The result is stored in the user's cache directory
and holds as long as neither file changes. Each engine compares samples (native/src/loading/source.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pyorch.errors import FormatError
from pyorch.files import forget
from pyorch.runtime import kept
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import MiB

_CHUNK = 8 * MiB

# Gets a text about the comparison, the compared bytes, and all bytes.
OnCompared = Callable[[str, int, int], None]


def add_mirrors(model_map: ModelMap, mirrors: Sequence[Path], on_compared: OnCompared) -> None:
    """Makes engines of the map read from mirrors too, each a file or a folder on a disk of its own.

    Raises:
        FormatError: A mirror is missing, differs from the model, is the model itself, or was named before.
    """
    taken: dict[int, list[Path]] = {}
    shards = [Path(os.fsdecode(path)) for path in model_map.shards]
    # With a pack, the model is read only for damaged experts of the pack.
    files = {len(shards): model_map.pack} if model_map.pack is not None else dict(enumerate(shards))
    for disk, mirror in enumerate(mirrors, 1):
        for file, copy in _copies(files, mirror).items():
            if os.path.samefile(files[file], copy):
                raise FormatError(f"{copy} is the file that experts are read from, and no copy of it")
            if any(os.path.samefile(other, copy) for other in taken.setdefault(file, [])):
                raise FormatError(f"{copy} was named before: each mirror is a copy of its own")
            taken[file].append(copy)
            _compare(files[file], copy, on_compared)
            model_map.add_copy(file, disk, copy)


def _copies(files: dict[int, Path], mirror: Path) -> dict[int, Path]:
    """Returns the copies in a mirror, by the index of their original."""
    names = ", ".join(path.name for path in files.values())
    if mirror.is_dir():
        found = {file: mirror / path.name for file, path in files.items() if (mirror / path.name).is_file()}
        if not found:
            raise FormatError(f"{mirror} has no copy of what experts are read from: {names}")
        return found
    if not mirror.is_file():
        raise FormatError(f"{mirror} is to be a copy of {names}, and there is no such file")
    size = mirror.stat().st_size
    alike = {file: mirror for file, path in files.items() if path.stat().st_size == size}
    if not alike:
        sizes = ", ".join(f"{path} of {path.stat().st_size}" for path in files.values())
        raise FormatError(f"{mirror} has {size} bytes, and is no copy of what experts are read from: {sizes}")
    named = {file: mirror for file in alike if files[file].name == mirror.name} or alike
    return dict([next(iter(named.items()))])


def _identity(path: Path) -> tuple[int, ...]:
    now = path.stat()
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _compare(original: Path, copy: Path, on_compared: OnCompared) -> None:
    both = _identity(original), _identity(copy)
    name = kept.name_of("copy", both)
    if kept.read(name) is True:
        return
    total, done = both[0][2], 0
    if both[1][2] != total:
        raise FormatError(f"{copy} has {both[1][2]} bytes, and is no copy of {original}, which has {total}")
    try:
        with open(original, "rb") as one, open(copy, "rb") as other:
            for file in (one, other):  # compares the content of the disk, not of the page cache
                os.fsync(file.fileno())
                forget(file.fileno())
            while done < total:
                size = min(_CHUNK, total - done)
                if one.read(size) != other.read(size):
                    raise FormatError(f"{copy} is no copy of {original}: their bytes differ, within {size} bytes from "
                                      f"{done}")
                done += size
                for file in (one, other):  # keeps the page cache free
                    forget(file.fileno(), 0, done)
                on_compared(f"comparing {copy} with {original}, this once", done, total)
    except OSError as error:
        raise FormatError(f"{copy} cannot be compared with {original}: {error.strerror}") from None
    if (_identity(original), _identity(copy)) != both:
        raise FormatError(f"{copy} or {original} was changed while they were compared")
    kept.keep(name, True)
