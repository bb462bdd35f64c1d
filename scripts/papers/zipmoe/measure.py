"""Measures compressed experts in a running model, under memory limits (ZipMoE, figs. 7 and 8).

Each measurement is a process of its own that begins with a cold page cache, as in pyorch.bench. All systems take turns,
each under the same limit, including the page cache. Each decides how much memory experts get (budget auto).
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from pyorch.bench.job import ENGINE, UNMANAGED, Config, Job, Measurement, Phase, Text
from pyorch.bench.rounds import Results, Run, check_limits, run_rounds
from pyorch.bench.summary import ratio, summarize
from pyorch.errors import FormatError, PyorchError
from pyorch.files import check_target, write_text
from pyorch.llama.pools import planner_of
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.option import texts
from pyorch.settings.pools import Pools
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from pyorch.sizes import Amount, MiB
from scripts.papers.zipmoe.caching import COMPRESSED, FULL, PLAN, WITHOUT

MMAP = "llama.cpp mmap"
WITHOUT_LRU = f"{WITHOUT}, lru"
SYSTEMS = (MMAP, WITHOUT_LRU, WITHOUT, FULL, COMPRESSED, PLAN)
SEVERAL = (MMAP, WITHOUT_LRU, WITHOUT, PLAN)  # the systems that decode several sequences

_SETTINGS = {
    WITHOUT_LRU: Settings(policy="lru"), WITHOUT: Settings(), FULL: Settings(pools=Pools(1, 0, 0, 0)),
    COMPRESSED: Settings(pools=Pools(0, 1, 0, 0)), PLAN: Settings(),
}
_VERSION = 1


@dataclass(frozen=True)
class Work:
    """The work of all measurements.

    Attributes:
        model: With a compressed pack next to it.
        plain: The same model with a plain pack next to it. None: whole experts are read from the model.
        data: A text file.
        n_prompt, n_tokens: Of each sequence.
        max_seconds: For decoding.
    """

    model: str
    plain: str | None
    data: str
    n_prompt: int
    n_tokens: int
    n_threads: int
    n_rounds: int
    max_seconds: float


@dataclass(frozen=True)
class Case:
    """A case. system: of SYSTEMS. limit: of memory, a size or a share of the model's file. batch: sequences at once."""

    system: str
    limit: Amount
    batch: int = 1

    @property
    def label(self) -> str:
        several = f", {self.batch} sequences" if self.batch > 1 else ""
        return f"{self.system}, memory {self.limit}{several}"


@dataclass(frozen=True)
class Measured:
    """Medians of one case; nan: not measured.

    Attributes:
        ttft_s: From the loaded model to the logits after the first prompt, with a cold cache.
        tpot_ms: From one token of a sequence to the next.
        wait_ms: The part of tpot_ms without a matrix to compute with.
        tokens_per_second: Decoded, of all sequences.
        shares: Of the plan at the actual budget: of F, C, S and E; None without the pack.
        expected_ms: The plan's estimate of a token's wait; nan for several sequences and other systems.
    """

    system: str
    limit: str
    batch: int
    n_rounds: int
    ttft_s: float
    tpot_ms: float
    tokens_per_second: float
    hit_rate: float
    read_mib: float
    wait_ms: float
    expected_ms: float
    shares: tuple[float, ...] | None
    budget_mib: float
    peak_mib: float
    failure: str


def cases(limits: Iterable[Amount], batches: Iterable[int], batch_limit: Amount) -> list[Case]:
    """Returns the cases: latency under each limit, and throughput of each batch under one limit."""
    latency = [Case(system, limit) for limit in limits for system in SYSTEMS]
    throughput = [Case(system, batch_limit, batch) for batch in batches for system in SEVERAL]
    return list(dict.fromkeys([*latency, *throughput]))


class Measurements:
    """The measurements of some cases.

    Args:
        record: A file that stores results, so that an interrupted evaluation can resume. None: nothing is stored.

    Raises:
        FormatError: The file is no such record.
        PyorchError: The file was made of other work.
    """

    def __init__(self, work: Work, model_map: ModelMap, asked: Sequence[Case], record: Path | None = None) -> None:
        self.work, self.map, self.cases = work, model_map, tuple(asked)
        self._configs = {case: self._config(case) for case in asked}
        self._cases = {config.label: case for case, config in self._configs.items()}
        self._record = record.absolute() if record is not None else None
        self._kept: list[Run] = []
        self.results = Results((), ())
        if self._record is not None:
            check_target(self._record)
            if self._record.exists():
                self._read(self._record)
        check_limits(list(self._configs.values()))

    def run(self, on_progress: Callable[[str, int, int], None], say: Callable[[str], None]) -> None:
        """Measures the missing cases. PyorchError: nothing could be measured."""
        known = [run for run in self._kept if run.config.label in self._cases and run.round < self.work.n_rounds]
        self.results = run_rounds(self._job, list(self._configs.values()), self.work.n_rounds, on_progress, say, known,
                                  self._keep)
        if not any(run.measurement for run in self.results.runs):
            raise PyorchError(self.results.runs[0].failure)

    def rows(self) -> list[Measured]:
        """Returns one row per case."""
        with ModelMap(self.map.path) as packed:
            packs.attach(packed)
            planner = planner_of(packed, Settings())
        rows = []
        for case in self.cases:
            config = self._configs[case]
            summary = summarize(self.results, config, None)
            steps = summary.decode_rate / case.batch  # a second
            shares, expected = None, float("nan")
            if case.system == PLAN and planner is not None and summary.n_rounds:
                division = planner.best(int(summary.budget_bytes))
                shares = division.shares if division.compressed else None
                expected = 1000 * summary.planned_stall_seconds_per_token if case.batch == 1 else expected
            rows.append(Measured(
                case.system, str(case.limit), case.batch, summary.n_rounds, self._ttft(config), 1000 / steps,
                summary.decode_rate, summary.decode_hit_rate, summary.decode_bytes_per_token / MiB,
                1000 * summary.decode_stall_seconds_per_token * case.batch, expected, shares,
                summary.budget_bytes / MiB, summary.peak_group_bytes / MiB, summary.failure,
            ))
        return rows

    def decode_ratio(self, one: Case, other: Case) -> float:
        """Returns the ratio of decode speeds, the median of rounds; nan if not measured."""
        if one not in self._configs or other not in self._configs:
            return float("nan")
        return ratio(self.results, self._configs[one], self._configs[other], lambda measured: measured.decode.rate)

    def _ttft(self, config: Config) -> float:
        of_runs = [run.measurement.ttft_seconds - run.measurement.load_seconds for run in self.results.of(config)
                   if run.measurement is not None]
        return statistics.median(of_runs) if of_runs else float("nan")

    def _config(self, case: Case) -> Config:
        limit_bytes = case.limit.of(self.map.info.file_bytes)
        if case.system == MMAP:
            return Config(case.label, UNMANAGED, limit_bytes=limit_bytes, repack=False)
        settings = _SETTINGS[case.system]
        if case.system in (WITHOUT, WITHOUT_LRU) and self.work.plain is None:
            settings = replace(settings, packed=False)
        return Config(case.label, ENGINE, settings, limit_bytes)

    def _job(self, config: Config) -> Job:
        case, work = self._cases[config.label], self.work
        model = work.plain if case.system in (WITHOUT, WITHOUT_LRU) and work.plain is not None else work.model
        return Job(model, config, work.data, work.n_prompt, work.n_tokens, work.n_threads, work.max_seconds, case.batch)

    def _keep(self, run: Run) -> None:
        self._kept.append(run)
        if self._record is not None:
            runs = [{**{name: value for name, value in vars(run).items() if name not in ("config", "measurement")},
                     "config": to_json(run.config),
                     "measurement": None if run.measurement is None else to_json(run.measurement)}
                    for run in self._kept]
            write_text(self._record, json.dumps({"version": _VERSION, "work": self._conditions(), "runs": runs}) + "\n")

    def _conditions(self) -> dict[str, object]:
        """Returns the conditions of every run."""
        text = hashlib.sha256(Path(self.work.data).read_bytes()).hexdigest()
        return {name: value for name, value in asdict(self.work).items() if name != "n_rounds"} | {"data": text}

    def _read(self, path: Path) -> None:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            version, conditions = value["version"], dict(value["work"])
            self._kept = [
                Run(**{**run, "config": from_json(Config, run["config"]),
                       "measurement": run["measurement"] and from_json(Measurement, run["measurement"])})
                for run in value["runs"]
            ]
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FormatError(f"{path} is no record of this evaluation: name another file with --resume") from None
        if version != _VERSION:
            raise FormatError(f"{path} has version {version}, this pyorch writes {_VERSION}: name another file")
        for name, wanted in self._conditions().items():
            if conditions.get(name) != wanted:
                raise PyorchError(f"{path} was made with another {name}: name another file with --resume, or remove it")


def from_json(cls: type, value: dict[str, Any]) -> Any:
    """A dataclass of pyorch.bench.job from what to_json() made of it."""
    nested = {"prefill": Phase, "decode": Phase, "settings": Settings, "text": Text}
    return cls(**{
        key: from_json(nested[key], item) if key in nested and item is not None else item for key, item in value.items()
    })


def to_json(value: Any) -> dict[str, Any]:
    """Numbers, text and dictionaries of them; of settings what differs from the defaults."""
    if isinstance(value, Settings):
        return texts(value)
    return {name: to_json(item) if is_dataclass(item) else item for name, item in vars(value).items()}
