"""How fast the model's file can be read, and how to forget that it was."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pyorch.sizes import MiB
from pyorch.runtime.model_map import ByteRange, ModelMap

_ALIGNMENT = 4096
_SETTINGS = [(n_threads, size) for n_threads in (1, 2, 4) for size in (1 * MiB, 4 * MiB)]


@dataclass(frozen=True)
class Bandwidth:
    """The best of several ways to read. direct: around the page cache."""

    bytes_per_second: float
    n_threads: int
    request_bytes: int
    direct: bool


def expert_ranges(model_map: ModelMap) -> list[ByteRange]:
    """Where all matrices of all experts lie, in random order."""
    ranges = [
        model_map.expert_range(layer.il, expert, role)
        for layer in model_map.layers
        for expert in range(layer.n_expert)
        for role in range(len(layer.roles))
    ]
    random.Random(0).shuffle(ranges)
    return ranges


def measure_bandwidth(ranges: Sequence[ByteRange], seconds: float) -> Bandwidth:
    """Reads from the offsets of experts on, in requests of 1 and 4 MiB, with 1, 2 and 4 threads.

    seconds: for all of it.
    """
    best = None
    for n_threads, size in _SETTINGS:
        rate, direct = _read_for(ranges, n_threads, size, seconds / len(_SETTINGS))
        if best is None or rate > best.bytes_per_second:
            best = Bandwidth(rate, n_threads, size, direct)
    return best


def _read_for(ranges: Sequence[ByteRange], n_threads: int, size: int, seconds: float) -> tuple[float, bool]:
    """Bytes per second of all threads together, and whether the reads were direct."""
    paths = sorted({where.path for where in ranges})
    opened = {path: _open(path) for path in paths}
    direct = all(is_direct for _, is_direct in opened.values())
    files = {path: (fd, os.fstat(fd).st_size) for path, (fd, _) in opened.items()}
    deadline = time.perf_counter() + seconds

    def reader(first: int) -> tuple[int, float]:
        buffer, n, i = mmap.mmap(-1, size), 0, first
        while True:
            where = ranges[i % len(ranges)]
            fd, file_bytes = files[where.path]
            end = max(0, file_bytes - size)
            n += os.preadv(fd, [buffer], min(where.offset, end) // _ALIGNMENT * _ALIGNMENT)
            i += n_threads
            if time.perf_counter() >= deadline:
                return n, time.perf_counter()

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(n_threads) as pool:
            results = list(pool.map(reader, range(n_threads)))
    finally:
        for fd, _ in opened.values():
            os.close(fd)
    return sum(n for n, _ in results) / (max(end for _, end in results) - begin), direct


def _open(path: str) -> tuple[int, bool]:
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # not on every file system
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    fd = os.open(path, os.O_RDONLY)
    forget(fd)
    return fd, False


def forget(fd: int) -> None:
    """Asks the kernel to drop a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def drop_page_cache(paths: Sequence[str]) -> None:
    """Makes the next run a cold one: drops all of the page cache where that is allowed, else these files."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            forget(fd)
            os.close(fd)
