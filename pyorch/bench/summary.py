"""What the runs say: medians over rounds, and the fraction of the roofline that was reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyorch.bench.job import Config, Measurement, Phase
from pyorch.bench.rounds import Results, Run


@dataclass(frozen=True)
class Summary:
    """Medians of one configuration. Rates in tokens/s, sizes in bytes, nan where nothing was measured.

    A roofline is the time that cannot be beaten: max(time to compute with all experts resident, time to
    read what was missed at the disk's peak bandwidth). The fraction is roofline / measured, of runs
    and references of the same round.
    """

    config: Config
    n_rounds: int
    failure: str
    prefill_rate: float
    decode_rate: float
    prefill_hit_rate: float
    decode_hit_rate: float
    prefill_bytes_per_token: float
    decode_bytes_per_token: float
    prefill_stall_seconds: float
    decode_stall_seconds_per_token: float
    decode_changed_slots_per_token: float
    ttft_seconds: float
    peak_memory_bytes: float
    peak_group_bytes: float
    budget_bytes: float
    prefill_roofline: float
    decode_roofline: float


def summarize(results: Results, config: Config, reference: Config | None) -> Summary:
    """reference: the configuration with all experts resident, None without one."""
    runs = results.of(config)
    good = [run for run in runs if run.measurement is not None]

    def median(value: Callable[[Measurement], float]) -> float:
        return _median(value(run.measurement) for run in good)

    return Summary(
        config=config,
        n_rounds=len(good),
        failure=next((run.failure for run in runs if run.failure), ""),
        prefill_rate=median(lambda it: it.prefill.rate),
        decode_rate=median(lambda it: it.decode.rate),
        prefill_hit_rate=median(lambda it: it.prefill.hit_rate),
        decode_hit_rate=median(lambda it: it.decode.hit_rate),
        prefill_bytes_per_token=median(lambda it: it.prefill.bytes_read / it.prefill.n_tokens),
        decode_bytes_per_token=median(lambda it: it.decode.bytes_read / it.decode.n_tokens),
        prefill_stall_seconds=median(lambda it: it.prefill.stall_seconds),
        decode_stall_seconds_per_token=median(lambda it: it.decode.stall_seconds / it.decode.n_tokens),
        decode_changed_slots_per_token=median(lambda it: it.decode.changed_slots / it.decode.n_tokens),
        ttft_seconds=median(lambda it: it.ttft_seconds),
        peak_memory_bytes=median(lambda it: it.peak_memory_bytes),
        peak_group_bytes=_median(run.peak_group_bytes for run in good if run.peak_group_bytes is not None),
        budget_bytes=median(lambda it: it.budget_bytes),
        prefill_roofline=_roofline(results, good, reference, lambda it: it.prefill),
        decode_roofline=_roofline(results, good, reference, lambda it: it.decode),
    )


def ratio(results: Results, config: Config, base: Config, value: Callable[[Measurement], float]) -> float:
    """Median over rounds of a value of config, divided by that of base in the same round."""
    of_base = {run.round: run.measurement for run in results.of(base)}
    pairs = [(run.measurement, of_base.get(run.round)) for run in results.of(config)]
    return _median(value(it) / value(other) for it, other in pairs if it is not None and other is not None)


def _roofline(results: Results, runs: list[Run], reference: Config | None, phase: Callable[[Measurement], Phase]) -> float:
    if reference is None:
        return float("nan")
    resident = {run.round: run.measurement for run in results.of(reference)}
    fractions = []
    for run in runs:
        if resident.get(run.round) is None:
            continue
        it = phase(run.measurement)
        reading = it.useful_bytes / it.n_tokens / run.bandwidth
        computing = phase(resident[run.round]).seconds_per_token
        fractions.append(max(reading, computing) / it.seconds_per_token)
    return _median(fractions)


def _median(values: Iterable[float]) -> float:
    values = [value for value in values if value == value]
    return statistics.median(values) if values else float("nan")
