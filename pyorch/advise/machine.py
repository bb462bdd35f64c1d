"""The speed of this machine: how fast it reads experts, and how fast it computes a model of a given shape.

Both are measured once and stored in the user's cache directory: the disk for each file system (pyorch.runtime.disk),
computing for each shape of a model and number of threads.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyorch import files
from pyorch.advise.probe import Shape, read_shape, write_probe
from pyorch.bench import rounds
from pyorch.bench.job import ENGINE, Config, Job, Measurement
from pyorch.errors import PyorchError
from pyorch.runtime import disk, kept
from pyorch.runtime.model_map import ModelMap, Role
from pyorch.settings.settings import Settings

OnProgress = Callable[[str, int, int], None]  # (step, done, total)

DISK_SECONDS = 3.0
N_ROUNDS = 3
SIMILAR = 0.25  # one round is enough if weights are read as fast, within this share, as for another shape
N_PROMPT, N_TOKENS = 256, 64
MAX_DECODE_SECONDS = 4.0

BUSY = 0.5  # load average above which a measurement may be too low; our own work raises it too

QUIETER = 0.5  # a load below this share of the stored one repeats the measurement

START_SECONDS = 1.0  # if computing is not measured

_VERSION = 2  # of the stored format


@dataclass(frozen=True)
class Compute:
    """Seconds with all experts in memory, of a decoded token and of a token of a prompt.

    start_seconds: from the start of loading until computing can start, without reading. load: the load average of the
    minute before the measurement, 0 without one.
    """

    decode_seconds: float
    prefill_seconds: float
    start_seconds: float
    load: float = 0.0


@dataclass(frozen=True)
class Disk:
    """The disk. bytes_per_second: for experts in random order.

    how: "measured" on the model, "kept" from an earlier run, measured on a "probe" because the model's file has no
    bytes yet, or "given".
    """

    bytes_per_second: float
    how: str


class _NotComputed(PyorchError):
    """A process that computes a probe failed."""


class Machine:
    """Measures this machine for one model. again: ignore stored results.

    Raises:
        PyorchError: llama.cpp cannot compute a probe of the model, or a probe cannot be written.
    """

    def __init__(self, model_map: ModelMap, n_threads: int, on_progress: OnProgress, again: bool = False) -> None:
        self._map, self._n_threads, self._on_progress, self._again = model_map, n_threads, on_progress, again

    def disk(self) -> Disk:
        before = None if self._again else disk.kept_bandwidth(self._map)
        if before is not None:
            return Disk(before.bytes_per_second, "kept")
        self._on_progress("measuring the disk", 0, 0)
        if not files.has_holes(disk.paths_of(self._map)):
            return Disk(disk.measure_and_keep(self._map, seconds=DISK_SECONDS)[0].bytes_per_second, "measured")
        shape = read_shape(self._map)
        with _directory_for_probes(Path(self._map.path).parent) as directory:
            path = directory / "disk.gguf"
            try:
                write_probe(shape, path, shape.sizes()[1], filled=True)
            except PyorchError as error:
                raise PyorchError(f"the disk is not measured: {error}; say its speed with --read-bandwidth") from None
            with path.open("rb") as file:
                os.fsync(file.fileno())
            with ModelMap(path) as model_map:
                return Disk(disk.measure_and_keep(model_map, seconds=DISK_SECONDS)[0].bytes_per_second, "probe")

    def compute(self) -> Compute:
        shape = read_shape(self._map)
        name = _name("compute", self._n_threads, shape.metadata, shape.tensors)
        load = os.getloadavg()[0]
        # A result of a busy machine is measured again on a much quieter one.
        if not self._again and (before := _read(name)) is not None and (
                before.load <= BUSY or load > QUIETER * before.load):
            return before
        with _directory_for_probes(None) as directory:
            runs = self._first_round(shape, directory)
            known = None if self._again else kept.read(_name("rate", self._n_threads))
            n_rounds = 1
            while True:
                found = extrapolated(shape, {n: _medians(measured) for n, measured in runs.items()})
                rate = shape.token_bytes / found.decode_seconds
                is_similar = isinstance(known, float) and known > 0 and abs(rate / known - 1) < SIMILAR
                if is_similar or n_rounds == N_ROUNDS:
                    break
                for i, (n_blocks, measured) in enumerate(runs.items()):
                    self._progress(n_rounds * len(runs) + i, len(runs))
                    measured.append(self._measure(directory / f"{n_blocks}.gguf"))
                n_rounds += 1
        if n_rounds == N_ROUNDS and load <= BUSY:
            kept.keep(_name("rate", self._n_threads), rate)
        found = replace(found, load=load)
        kept.keep(name, asdict(found))
        return found

    def _first_round(self, shape: Shape, directory: Path) -> dict[int, list[Measurement]]:
        """Measures the smallest two probes that llama.cpp can compute, by their numbers of blocks.

        For most models these are the first block with experts, and a few more. Some architectures need a block with
        attention, a tensor that only a later block uses, or the number of blocks by which llama.cpp recognizes them.
        """
        least = 0
        while True:
            small, large = shape.sizes(least)
            runs: dict[int, list[Measurement]] = {}
            try:
                for i, n_blocks in enumerate(dict.fromkeys((small, large))):
                    self._progress(i, 1 + (small != large))
                    path = directory / f"{n_blocks}.gguf"
                    write_probe(shape, path, n_blocks)
                    runs[n_blocks] = [self._measure(path)]
                return runs
            except _NotComputed:
                if small == large:
                    raise
                least = small + 1

    def _progress(self, done: int, n_probes: int) -> None:
        self._on_progress("measuring how fast this machine computes", done, N_ROUNDS * n_probes)

    def repacking(self) -> float:
        """Returns the seconds of a core to repack one byte of experts; 0 if kernels compute with the model's order."""
        layer = self._map.layers[0]
        matrices = [bytearray(self._map.matrix_bytes(layer, role)) for role in range(len(layer.roles))]
        seconds = 0.0
        for role, matrix in enumerate(matrices):
            if layer.roles[role].layout != Role.layout:
                taken = []
                for _ in range(N_ROUNDS):
                    begin = time.perf_counter()
                    self._map.repack(layer.il, role, matrix)
                    taken.append(time.perf_counter() - begin)
                seconds += min(taken)
        return seconds / sum(map(len, matrices))

    def _measure(self, path: Path) -> Measurement:
        config = Config("probe", ENGINE, Settings(budget="100%", n_threads=self._n_threads), preload=True)
        job = Job(str(path), config, None, N_PROMPT, N_TOKENS, self._n_threads, MAX_DECODE_SECONDS)
        failure, measured, _ = rounds.measure_once(job)
        if measured is None:
            raise _NotComputed(f"how fast {self._map.path} is computed could not be measured on a small model of its "
                               f"shape ({failure}): say it with --compute-ms, as pyorch bench measures it")
        return measured


def _medians(measured: list[Measurement]) -> tuple[float, float, float]:
    """Returns seconds of a decoded token, of a token of a prompt, and of the start."""
    return (
        statistics.median(one.decode.seconds_per_token for one in measured),
        statistics.median(one.prefill.seconds_per_token for one in measured),
        statistics.median(one.load_seconds for one in measured),
    )


def extrapolated(shape: Shape, of_blocks: dict[int, tuple[float, float, float]]) -> Compute:
    """Extrapolates to all blocks, by the time of additional blocks and by the weights that a token reads in them."""
    small, large = min(of_blocks), max(of_blocks)
    first, second = sum(shape.active_bytes[:small]), sum(shape.active_bytes[:large])
    whole = sum(shape.active_bytes[: shape.moe_blocks[-1] + 1])
    if large == small:
        decode, prefill, start = of_blocks[small]
    else:
        more = (whole - first) / (second - first)
        decode, prefill, start = (
            max(a + more * (b - a), b) for a, b in zip(of_blocks[small], of_blocks[large])
        )
        start = of_blocks[small][2]  # a start does not load experts, as probes do
    return Compute(decode, prefill, start)


@contextlib.contextmanager
def _directory_for_probes(beside: Path | None):
    """Yields a directory for probes, in `beside`, or among temporary files if that is not given or not writable."""
    where = beside if beside is not None and os.access(beside, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    with files.staging(where / "pyorch-probe") as directory:
        yield directory


def _name(kind: str, n_threads: int, *of_shape: object) -> str:
    """Returns the name under which results of this processor for a shape are stored."""
    return kept.name_of(kind, (_VERSION, n_threads, kept.processor(), *of_shape))


def _read(name: str) -> Compute | None:
    with contextlib.suppress(TypeError):
        found = Compute(**kept.read(name))
        if min(found.decode_seconds, found.prefill_seconds, found.start_seconds) > 0:
            return found
    return None
