"""The result of the runs: medians over rounds, and the reached share of the roofline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from pyorch.bench.job import Config, Measurement, Phase
from pyorch.bench.rounds import Results, Run


def _median_of(value: Callable[[Measurement], float]) -> Any:
    """Returns a field that holds the median of a value over the rounds."""
    return field(default=math.nan, metadata={"value": value})


@dataclass(frozen=True)
class Summary:
    """Medians of one configuration. Rates in tokens/s, sizes in bytes, nan without a measurement.

    A roofline is a lower bound of the time: max(time to compute with all experts resident, time to read missed bytes at
    the disk's peak bandwidth). The share is roofline / measured, for runs and references of the same round.
    """

    config: Config
    n_rounds: int
    failure: str
    prefill_rate: float = _median_of(lambda run: run.prefill.rate)
    decode_rate: float = _median_of(lambda run: run.decode.rate)
    prefill_hit_rate: float = _median_of(lambda run: run.prefill.hit_rate)
    decode_hit_rate: float = _median_of(lambda run: run.decode.hit_rate)
    prefill_bytes_per_token: float = _median_of(lambda run: run.prefill.bytes_read / run.prefill.n_tokens)
    decode_bytes_per_token: float = _median_of(lambda run: run.decode.bytes_read / run.decode.n_tokens)
    prefill_stall_seconds: float = _median_of(lambda run: run.prefill.stall_seconds)
    decode_stall_seconds_per_token: float = _median_of(lambda run: run.decode.stall_seconds / run.decode.n_tokens)
    decode_stall_seconds_per_miss: float = _median_of(
        lambda run: run.decode.stall_seconds / run.decode.misses if run.decode.misses else math.nan)
    decode_processor_seconds_per_token: float = _median_of(
        lambda run: run.decode.processor_seconds / run.decode.n_tokens)
    planned_stall_seconds_per_token: float = _median_of(lambda run: run.planned_stall_seconds)
    decode_changed_slots_per_token: float = _median_of(lambda run: run.decode.changed_slots / run.decode.n_tokens)
    decode_device_hit_rate: float = _median_of(lambda run: run.decode.device_hit_rate)
    decode_device_computed_share: float = _median_of(lambda run: run.decode.device_computed_share)
    decode_device_bytes_per_token: float = _median_of(lambda run: run.decode.device_bytes / run.decode.n_tokens)
    decode_device_ahead_precision: float = _median_of(lambda run: run.decode.device_ahead_precision)
    device_used_bytes: float = _median_of(lambda run: run.device_used_bytes)
    ttft_seconds: float = _median_of(lambda run: run.ttft_seconds)
    peak_memory_bytes: float = _median_of(lambda run: run.peak_memory_bytes)
    memory_bytes: float = _median_of(lambda run: run.memory_bytes)
    budget_bytes: float = _median_of(lambda run: run.budget_bytes)
    peak_group_bytes: float = math.nan
    prefill_roofline: float = math.nan
    decode_roofline: float = math.nan


def summarize(results: Results, config: Config, reference: Config | None) -> Summary:
    """Summarizes a configuration. reference: the configuration with all experts resident, or None."""
    runs = results.of(config)
    good = [run for run in runs if run.measurement is not None]
    medians = {one.name: _median(one.metadata["value"](run.measurement) for run in good)
               for one in fields(Summary) if one.metadata}
    return Summary(
        config, len(good), next((run.failure for run in runs if run.failure), ""), **medians,
        peak_group_bytes=_median(run.peak_group_bytes for run in good if run.peak_group_bytes is not None),
        prefill_roofline=_roofline(results, good, reference, lambda measured: measured.prefill),
        decode_roofline=_roofline(results, good, reference, lambda measured: measured.decode),
    )


def ratio(results: Results, config: Config, base: Config, value: Callable[[Measurement], float]) -> float:
    """Returns the median over rounds of a value of config, divided by that of base in the same round."""
    return _median(ratios(results, config, base, value))


def ratios(results: Results, config: Config, base: Config, value: Callable[[Measurement], float]) -> list[float]:
    """Returns these ratios of all rounds that measured both."""
    of_base = {run.round: run.measurement for run in results.of(base)}
    pairs = [(run.measurement, of_base.get(run.round)) for run in results.of(config)]
    return [value(one) / value(other) for one, other in pairs if one is not None and other is not None]


@dataclass(frozen=True)
class TextChange:
    """How a configuration's predictions of the decoded text differ from another one's.

    agreement: the share of tokens after which both predict the same most probable token. log_likelihood: of the text,
    in nats per token; base_log_likelihood: the other one's. Medians over rounds.
    """

    agreement: float
    log_likelihood: float
    base_log_likelihood: float


def text_change(results: Results, config: Config, base: Config) -> TextChange | None:
    """Returns the comparison, or None if no round measured both."""
    of_base = {run.round: run.measurement for run in results.of(base)}
    pairs = [(run.measurement.text, of_base[run.round].text) for run in results.of(config)
             if run.measurement is not None and of_base.get(run.round) is not None]
    pairs = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not pairs:
        return None
    # One of them may have run out of time earlier.
    same = [[a == b for a, b in zip(one.most_probable, other.most_probable)] for one, other in pairs]
    return TextChange(
        _median(sum(each) / len(each) for each in same),
        _median(one.log_likelihood for one, _ in pairs),
        _median(other.log_likelihood for _, other in pairs),
    )


def _roofline(
    results: Results, runs: list[Run], reference: Config | None, phase: Callable[[Measurement], Phase]
) -> float:
    if reference is None:
        return math.nan
    resident = {run.round: run.measurement for run in results.of(reference)}
    fractions = []
    for run in runs:
        if resident.get(run.round) is None:
            continue
        measured = phase(run.measurement)
        reading = measured.useful_bytes / measured.n_tokens / run.bandwidth
        computing = phase(resident[run.round]).seconds_per_token
        fractions.append(max(reading, computing) / measured.seconds_per_token)
    return _median(fractions)


def _median(values: Iterable[float]) -> float:
    values = [value for value in values if value == value]
    return statistics.median(values) if values else math.nan
