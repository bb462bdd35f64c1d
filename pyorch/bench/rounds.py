"""Runs configurations in alternation: every round measures each of them once, in its own process.

The numbers drift with other work on the machine. So a run is compared with runs of its own round, and with the disk's
bandwidth measured just before and after it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyorch import _libs
from pyorch.bench.job import UNMANAGED, Config, Job, Measurement
from pyorch.bench.surroundings import busy_processes, memory_group
from pyorch.errors import PyorchError
from pyorch.processes import started
from pyorch.runtime import disk
from pyorch.sidecars import packs
from pyorch.signals import terminable
from pyorch.sizes import GiB

OnProgress = Callable[[str, int, int], None]  # (measurement, done, total)

BANDWIDTH_SECONDS = 1.5  # of each measurement of the disk


@dataclass(frozen=True)
class Run:
    """One configuration in one round.

    Attributes:
        failure: Why there is no measurement; "" if there is one.
        peak_group_bytes: Peak memory with page cache, None without a memory limit.
        bandwidth: Of the disk, bytes a second.
        busy_elsewhere: Share of the processors that other processes used, nan if unknown.
    """

    config: Config
    round: int
    failure: str
    measurement: Measurement | None
    peak_group_bytes: int | None
    bandwidth: float
    busy_elsewhere: float


@dataclass(frozen=True)
class Results:
    runs: tuple[Run, ...]
    bandwidths: tuple[disk.Bandwidth, ...]

    def of(self, config: Config) -> list[Run]:
        return [run for run in self.runs if run.config == config]


def run_rounds(
    job_for: Callable[[Config], Job], configs: Sequence[Config], n_rounds: int, on_progress: OnProgress,
    say: Callable[[str], None], done: Sequence[Run] = (), keep: Callable[[Run], None] = lambda run: None,
) -> Results:
    """Measures every configuration n_rounds times.

    If a configuration fails, its run says why.

    Args:
        job_for: Makes the job of a configuration.
        configs: The configurations; the first one is the reference.
        n_rounds: The number of rounds.
        on_progress: Receives progress.
        say: Receives the result of each measurement as a line.
        done: Earlier runs, which are not measured again.
        keep: Receives each new run.

    Raises:
        PyorchError: The first configuration fails, although nothing limits it.
    """
    paths = model_files({job_for(config).model for config in configs})
    runs = list(done)
    bandwidths: list[disk.Bandwidth] = []
    with packs.open_model(job_for(configs[0]).model) as model_map:
        for i in range(n_rounds):
            # In alternating directions, so that drift favours no configuration.
            for config in configs if i % 2 == 0 else reversed(configs):
                if any(run.config == config and run.round == i for run in done):
                    continue
                if not bandwidths:
                    bandwidths.append(disk.measure_bandwidth(model_map, BANDWIDTH_SECONDS))
                on_progress(f"round {i + 1} of {n_rounds}: {config.label}", len(runs), n_rounds * len(configs))
                disk.drop_page_cache(paths)
                with _Processors() as processors:
                    failure, measurement, peak_group_bytes = measure_once(job_for(config))
                bandwidths.append(disk.measure_bandwidth(model_map, BANDWIDTH_SECONDS))
                bandwidth = max(bandwidth.bytes_per_second for bandwidth in bandwidths[-2:])
                runs.append(Run(config, i, failure, measurement, peak_group_bytes, bandwidth,
                                processors.busy_elsewhere))
                if failure and len(runs) == 1 and not config.limit_bytes:
                    raise PyorchError(failure)
                say(f"round {i + 1} of {n_rounds}: {config.label}: {_outcome(runs[-1])}")
                keep(runs[-1])
    return Results(tuple(runs), tuple(bandwidths))


def model_files(models: Iterable[str]) -> list[str]:
    """Returns the files from which experts are read."""
    paths: set[str] = set()
    for model in models:
        with packs.open_model(model) as model_map:
            paths.update(disk.paths_of(model_map))
            paths.update(str(pack) for kind, pack in model_map.sidecars().items() if kind == packs.KIND)
    return sorted(paths)


def _outcome(run: Run) -> str:
    measured = run.measurement
    return run.failure or (
        f"prefill {measured.prefill.rate:.1f} tok/s, decode {measured.decode.rate:.2f} tok/s, "
        f"disk {run.bandwidth / GiB:.2f} GiB/s, {run.busy_elsewhere:.0%} of the processors busy elsewhere"
    )


def measure_once(job: Job) -> tuple[str, Measurement | None, int | None]:
    """Measures in a new process. Returns why it failed, or the measurement; and the peak of its group."""
    with (memory_group(job.config.limit_bytes) as group, terminable(), busy_processes(job.config.n_busy),
          tempfile.TemporaryFile() as log):
        process, connection = started(
            [sys.executable, "-m", "pyorch.bench.child"], stdout=log, stderr=log, env=environment(job.config),
            preexec_fn=group.join if group is not None else None)
        measurement = None
        # The second one ends the process, also after an exception; the first one waits for that.
        with process, connection, contextlib.suppress(EOFError, OSError):
            connection.send(job)
            measurement = connection.recv()
        killed = group is not None and group.n_killed() > 0
        peak = group.peak_bytes() if group is not None else None
        log.seek(0)
        said = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if measurement is not None:
        return "", measurement, peak
    if killed:
        return "killed for memory", None, peak
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}", None, peak
    return (said[-1].partition(": ")[2] or said[-1]) if said else f"exit status {process.returncode}", None, peak


def environment(config: Config) -> dict[str, str]:
    """Returns the environment of a measured process. The user and libgomp decide how stock llama.cpp's threads wait."""
    theirs = {"GOMP_SPINCOUNT": _libs.LIBGOMP_SPIN_COUNT} if config.mode == UNMANAGED and _libs.chose_spin_count else {}
    return {**os.environ, **theirs}


class _Processors:
    """Measures which processes use the processors inside a `with` block: children of this one, or others."""

    busy_elsewhere = float("nan")

    def __enter__(self) -> _Processors:
        self._before = time.monotonic(), _busy_seconds(), _children_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        now = time.monotonic(), _busy_seconds(), _children_seconds()
        wall, busy, children = (after - before for after, before in zip(now, self._before))
        self.busy_elsewhere = max(0.0, busy - children) / (wall * (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """Returns the processor time of the whole machine, stolen time included."""
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split(None, 9)[1:9]
        )
    except (OSError, ValueError):
        return float("nan")
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_limits(configs: Sequence[Config]) -> None:
    """Checks, before measuring, that the memory limits of all configurations can be set.

    Raises:
        PyorchError: One cannot.
    """
    for limit_bytes in {config.limit_bytes for config in configs if config.limit_bytes}:
        with memory_group(limit_bytes) as group:
            if group.n_killed():
                raise PyorchError(f"{group.directory} is in use by another benchmark")
