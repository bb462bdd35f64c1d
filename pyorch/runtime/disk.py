"""Measures how fast the model's file can be read and with how many requests at once, and drops page caches.

The best way to read is measured once per file system, and stored in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import PyorchError
from pyorch.files import forget
from pyorch.library.bindings import call, given, lib
from pyorch.runtime import kept
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.reads import READERS, Reads
from pyorch.sizes import KiB, MiB

ENOUGH = 0.97  # of the best bandwidth of all ways to read

# With start and end, a measurement takes a second. Ways to read are ordered by the bytes in flight: more bytes delay
# the read that is needed first. Fewer bytes keep the disk busy only while no thread computes, because compute threads
# delay the one thread that starts requests by some milliseconds.
MEASURE_SECONDS = 0.8
_RING = [(4, MiB), (8, 512 * KiB), (8, MiB), (16, 512 * KiB), (16, MiB)]
_THREADS = [(1, MiB), (2, MiB), (1, 4 * MiB), (4, MiB), (2, 4 * MiB), (4, 4 * MiB)]

_ROUNDS = 3

# Only models with this many bytes of experts are worth a measurement.
_WORTH_BYTES = 256 * MiB


@dataclass(frozen=True)
class Bandwidth:
    """The result of one way to read.

    Attributes:
        bytes_per_second: Of experts in random order.
        reader: One of READERS.
        depth: Requests at once.
        request_bytes: Of one request at most.
        direct: Without the page cache.
        cores: Cores that this process kept busy.
    """

    bytes_per_second: float
    reader: str
    depth: int
    request_bytes: int
    direct: bool
    cores: float

    @property
    def reads(self) -> Reads:
        return Reads(self.reader, self.depth, self.request_bytes)


def measure(model_map: ModelMap, reads: Reads, seconds: float, direct_io: bool = True) -> Bandwidth:
    """Reads for `seconds`, as an engine would.

    Raises:
        PyorchError: This system does not have the reader.
    """
    if not direct_io or not hasattr(os, "O_DIRECT"):
        for path in paths_of(model_map):
            _forget(path)
    config = given("pyorch_config", reader=READERS.index(reads.reader), read_depth=reads.depth,
                   read_bytes=reads.request_bytes, direct_io=direct_io)
    speed = call(lib.pyorch_measure_disk, model_map.handle, config, seconds, out="pyorch_disk_speed")
    return Bandwidth(speed.bytes_per_second, READERS[speed.reader], speed.read_depth, speed.read_bytes,
                     bool(speed.direct), speed.cores)


def measure_ways(model_map: ModelMap, seconds: float, reader: str = "auto") -> list[Bandwidth]:
    """Measures several ways to read, three times each, and takes the median.

    Other programs use the disk too, and some disks are faster for a moment. seconds: for all measurements.
    """
    reader = measure(model_map, Reads(reader, 1, MiB), 1e-3).reader
    ways = [Reads(reader, depth, size) for depth, size in _ways(reader)]
    each = seconds / len(ways) / _ROUNDS
    rounds = [[measure(model_map, way, each) for way in ways] for _ in range(_ROUNDS)]
    return [sorted(runs, key=lambda one: one.bytes_per_second)[_ROUNDS // 2] for runs in zip(*rounds)]


def _ways(reader: str) -> list[tuple[int, int]]:
    return _RING if reader == "io_uring" else _THREADS


def measure_bandwidth(model_map: ModelMap, seconds: float) -> Bandwidth:
    """Returns the best of several ways to read.

    Half of the time finds it, and the other half measures it again: a disk with a quota can be faster for a moment.
    """
    best = max(measure_ways(model_map, seconds / 2), key=lambda one: one.bytes_per_second)
    return measure(model_map, best.reads, seconds / 2)


def least_that_suffices(ways: Iterable[Bandwidth]) -> Bandwidth:
    """Returns the way with the fewest bytes in flight, among those with nearly the best bandwidth."""
    ways = list(ways)
    enough = ENOUGH * max(one.bytes_per_second for one in ways)
    return min((one for one in ways if one.bytes_per_second >= enough),
               key=lambda one: (one.depth * one.request_bytes, one.depth))


def reads_for(model_map: ModelMap, reads: Reads, direct_io: bool) -> Reads:
    """Completes the user's setting with the stored measurement of the model's file system.

    Measures now, for a second, if no measurement is stored, the model is large enough, and the result can be stored.
    """
    if reads.depth or reads.request_bytes or not direct_io or model_map.info.expert_bytes < _WORTH_BYTES:
        return reads
    found = kept_bandwidth(model_map, reads.reader)
    if found is None and kept.can_keep():
        found = measure_and_keep(model_map, reads.reader)[0]
    # The reader stays "auto", because this process may be forbidden to use the measured one.
    return Reads(reads.reader, found.depth, found.request_bytes) if found is not None else reads


def kept_bandwidth(model_map: ModelMap, reader: str = "auto") -> Bandwidth | None:
    """Returns the stored measurement, if it exists and is valid."""
    with contextlib.suppress(OSError, TypeError, PyorchError):
        found = Bandwidth(**(kept.read(_name(model_map, reader)) or {}))
        way = found.depth, found.request_bytes
        if ([*map(type, way)] == [int, int] and way in _ways(found.reader)
                and 0 < found.bytes_per_second < math.inf):
            return found
    return None


def measure_and_keep(
    model_map: ModelMap, reader: str = "auto", seconds: float = MEASURE_SECONDS
) -> tuple[Bandwidth, list[Bandwidth]]:
    """Returns the sufficient way to read, which is stored if possible, and all measurements."""
    ways = measure_ways(model_map, seconds, reader)
    chosen = least_that_suffices(ways)
    kept.keep(_name(model_map, reader), asdict(chosen))
    return chosen, ways


def paths_of(model_map: ModelMap) -> list[str]:
    """Returns the files that store the experts."""
    if model_map.info.slim and model_map.pack is not None:
        return [os.fspath(model_map.pack)]
    return sorted({model_map.expert_range(layer.il, 0, role).path for layer in model_map.layers
                   for role in range(len(layer.roles))})


def _name(model_map: ModelMap, reader: str) -> str:
    """Returns the name of a measurement. It has the file system's identity and device."""
    path = paths_of(model_map)[0]
    return f"disk-{os.statvfs(path).f_fsid:x}-{os.stat(path).st_dev:x}-{reader}"


def _forget(path: str) -> None:
    with open(path, "rb") as file:
        forget(file.fileno())


def drop_page_cache(paths: Sequence[str]) -> None:
    """Drops the page cache of the system if allowed, otherwise of these files, so that the next run is a cold one."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        for path in paths:
            _forget(path)
