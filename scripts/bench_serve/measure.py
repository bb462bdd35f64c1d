"""Serves a model in several ways, sends the same requests to each, and reports their waits.

Each way, with each number of slots, is a server of its own, which ends before the next one starts.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyorch.bench import rounds
from pyorch.bench.job import ENGINE, UNMANAGED, Config
from pyorch.bench.surroundings import memory_group
from pyorch.errors import PyorchError
from pyorch.runtime import disk
from pyorch.settings.budget import RESIDENT
from pyorch.settings.option import options
from pyorch.settings.settings import Settings
from pyorch.signals import terminable
from scripts.bench_serve import client
from scripts.bench_serve.client import Answer
from scripts.bench_serve.load import Arrival, prompts_of
from scripts.bench_serve.process import serving

PERCENTILES = (50, 95, 99)
SUITS = 0.95  # share of the best throughput that suffices to prefer fewer slots

OnProgress = Callable[[str, int, int], None]  # step, done, total


@dataclass(frozen=True)
class Served:
    """A way to serve. slots: requests computed at once (-np)."""

    config: Config
    slots: int

    @property
    def label(self) -> str:
        return f"{self.config.label}, -np {self.slots}"


@dataclass(frozen=True)
class Load:
    """The requests, the same for each server. max_seconds: then the remaining ones are cancelled."""

    model: str
    text: bytes
    arrivals: tuple[Arrival, ...]
    max_seconds: float
    n_threads: int | None = None


@dataclass(frozen=True)
class Run:
    """One run of a server. failure: why no request was answered. hits, misses, bytes_read: of experts; 0: no engine."""

    served: Served
    round: int
    failure: str
    answers: tuple[Answer, ...]
    start_seconds: float
    hits: int
    misses: int
    bytes_read: int
    peak_group_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """The results of a server over all rounds.

    Attributes:
        ttft, tpot: Seconds, at PERCENTILES, over all answered requests.
        failure: The first reason why a round, or otherwise a request, was not answered.
        throughput: Generated tokens in a second, until the last one arrived, in the median round. nan: not measured.
    """

    served: Served
    n_requests: int
    n_answered: int
    failure: str
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    throughput: float
    hit_rate: float
    bytes_per_token: float
    peak_group_bytes: float


def run_rounds(
    load: Load, ways: Sequence[Served], n_rounds: int, on_progress: OnProgress, say: Callable[[str], None]
) -> list[Run]:
    """Measures each way n_rounds times, forward and backward, so that a drift favours none.

    Raises:
        PyorchError: A prompt is longer than the text. A token has at least one byte, so this is known before a server
            runs.
    """
    longest = max(arrival.n_prompt for arrival in load.arrivals)
    if longest > len(load.text):
        raise PyorchError(f"the text has {len(load.text)} bytes, and a prompt {longest} tokens: give a longer one with "
                          "--data")
    runs: list[Run] = []
    paths = rounds.model_files([load.model])
    for i in range(n_rounds):
        for served in ways if i % 2 == 0 else reversed(ways):
            where = f"round {i + 1} of {n_rounds}: {served.label}"
            n, done = len(load.arrivals), len(runs) * len(load.arrivals)

            def answered(k: int, where: str = where, done: int = done) -> None:
                on_progress(where, done + k, n_rounds * len(ways) * n)

            answered(0)
            disk.drop_page_cache(paths)
            with terminable():
                runs.append(_run(load, served, i, answered))
            say(f"{where}: {_outcome(summarize(runs[-1:], served))}")
    return runs


def _run(load: Load, served: Served, i: int, on_answer: Callable[[int], None]) -> Run:
    with memory_group(served.config.limit_bytes) as group, tempfile.TemporaryDirectory() as directory:
        failure, answers, seconds, stats = "", [], float("nan"), {}
        try:
            with serving(_arguments(load, served), rounds.environment(served.config), group, Path(directory)) as server:
                seconds = server.wait_until_ready()
                prompts = prompts_of(server.tokenize(load.text), load.arrivals)
                answers = client.run(server.port, load.arrivals, prompts, load.max_seconds, on_answer)
                stats = server.stop()
        except PyorchError as error:
            failure = str(error)
        if group is not None and group.n_killed():
            failure = "killed for memory"
        failure = failure or ("" if any(not answer.failure for answer in answers) else answers[0].failure)
        return Run(served, i, failure, tuple(answers), seconds, stats.get("hits", 0), stats.get("misses", 0),
                   stats.get("bytes_read", 0), group.peak_bytes() if group is not None else None)


def _arguments(load: Load, served: Served) -> Iterator[str]:
    """Yields the arguments of `pyorch serve`."""
    config = served.config
    longest = max(arrival.n_prompt + arrival.n_tokens for arrival in load.arrivals)
    settings = config.settings if config.mode == ENGINE else Settings(budget=RESIDENT)
    settings = replace(settings, warm=False)  # each server begins like the first one
    yield load.model
    for name, option in options(Settings).items():
        value = getattr(settings, name)
        if value == option.default:
            continue
        flag = option.flag or "--" + name.replace("_", "-")
        yield from (flag,) if option.metavar is None else (flag, str(value))
    # For each request llama-server reserves a little more than it computes, and a round number.
    yield from ("--ctx", str(served.slots * math.ceil((longest + 8) / 256) * 256))
    if load.n_threads:
        yield from ("--threads", str(load.n_threads))
    yield from ("--", "-np", str(served.slots))
    if config.mode == UNMANAGED:
        yield from ("--load-mode", "mmap")
    if not config.repack:
        yield "--no-repack"


def summarize(runs: Iterable[Run], served: Served) -> Summary:
    runs = [run for run in runs if run.served == served]
    answers = [answer for run in runs for answer in run.answers]
    answered = [answer for answer in answers if not answer.failure]
    rates = [rate for run in runs if (rate := _throughput(run)) == rate]
    uses = sum(run.hits + run.misses for run in runs)
    tokens = sum(answer.n_tokens for answer in answered)
    peaks = [run.peak_group_bytes for run in runs if run.peak_group_bytes is not None]
    failures = [run.failure for run in runs] + [answer.failure for answer in answers]
    nan = float("nan")
    return Summary(
        served, len(answers), len(answered), next(filter(None, failures), ""),
        tuple(percentile([answer.ttft_seconds for answer in answered], p) for p in PERCENTILES),
        tuple(percentile([answer.tpot_seconds for answer in answered], p) for p in PERCENTILES),
        statistics.median(rates) if rates else nan, sum(run.hits for run in runs) / uses if uses else nan,
        sum(run.bytes_read for run in runs) / tokens if uses and tokens else nan, max(peaks) if peaks else nan,
    )


def _throughput(run: Run) -> float:
    answered = [answer for answer in run.answers if not answer.failure]
    if not answered:
        return float("nan")
    return sum(answer.n_tokens for answer in answered) / max(answer.end_seconds for answer in answered)


def percentile(values: Iterable[float], p: float) -> float:
    """Interpolates between the two nearest values; nan without values. Ignores nans."""
    ordered = sorted(value for value in values if value == value)
    if not ordered:
        return float("nan")
    at = (len(ordered) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def suitable(summaries: Sequence[Summary]) -> Summary | None:
    """Returns the fewest slots of one way that give SUITS of the best throughput.

    Only runs with the most answered requests count. None: nothing was answered.
    """
    most = max(summary.n_answered for summary in summaries)
    complete = [summary for summary in summaries if summary.n_answered == most and summary.throughput > 0]
    if not complete:
        return None
    best = max(summary.throughput for summary in complete)
    enough = [summary for summary in complete if summary.throughput >= SUITS * best]
    return min(enough, key=lambda summary: summary.served.slots)


def _outcome(summary: Summary) -> str:
    if not summary.n_answered:
        return summary.failure
    lost = f": {summary.failure}" if summary.failure else ""
    return (f"{summary.throughput:.2f} tok/s, first token after {summary.ttft[0]:.2f} s, "
            f"{summary.n_answered} of {summary.n_requests} answered{lost}")
