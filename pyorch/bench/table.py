"""The report for people, and a picture of reads while text is decoded, as figure 8 of BuddyMoE."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyorch import pictures
from pyorch.bench.job import Config, Text
from pyorch.bench.rounds import Results
from pyorch.bench.summary import Summary, TextChange, ratio, text_change
from pyorch.llama.cores import physical_cores
from pyorch.runtime import kept
from pyorch.runtime.disk import Bandwidth
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import GiB, MiB, counted, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DISTURBED = 0.1  # share of the processors used by others above which the report warns


def machine() -> dict[str, str]:
    """Returns facts of the machine that the numbers depend on."""
    try:
        total = int(re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)[1]) * 1024
        memory = format_bytes(total)
    except (OSError, TypeError):
        memory = ""
    return {
        "cpu": kept.processor() or platform.processor() or platform.machine(),
        "cores": str(physical_cores()),
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
    }


def header(
    model_map: ModelMap, n_prompt: int, n_tokens: int, n_rounds: int, n_threads: int
) -> list[tuple[str, str]]:
    """Returns labels and facts of the measured model and work."""
    info, facts = model_map.info, machine()
    layer = model_map.layers[0]
    types = "/".join(sorted({role.type for role in layer.roles}))
    return [
        ("machine", f"{facts['cpu']}, {facts['cores']} cores, {facts['memory']} memory, {facts['system']}"),
        ("model", f"{Path(model_map.path).name} ({info.arch}), {format_bytes(info.file_bytes)}: {info.n_moe_layers} "
                  f"layers of {layer.n_expert} experts, {info.n_expert_used} used, {format_bytes(layer.expert_bytes)} "
                  f"each ({types})"),
        ("work", f"prefill {n_prompt} tokens, decode {n_tokens} tokens of text, {n_threads} threads; "
                 + ("one round" if n_rounds == 1 else f"medians of {n_rounds} rounds")),
    ]


def table(summaries: Sequence[Summary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the titles of columns, and the rows."""
    columns: dict[str, Callable[[Summary], str]] = {
        "prefill tok/s": lambda summary: f"{summary.prefill_rate:.1f}",
        "decode tok/s": lambda summary: f"{summary.decode_rate:.2f}",
        "hits": lambda summary: _percent(summary.decode_hit_rate),
        "MiB/token": lambda summary: f"{summary.decode_bytes_per_token / MiB:.1f}",
        "stall ms/token": lambda summary: f"{summary.decode_stall_seconds_per_token * 1000:.1f}" + _planned(summary),
        "prefill roofline": lambda summary: _percent(summary.prefill_roofline),
        "decode roofline": lambda summary: _percent(summary.decode_roofline),
        "first token s": lambda summary: f"{summary.ttft_seconds:.2f}",
        "peak MiB": _peak,
    }
    if any(summary.config.lossy for summary in summaries):
        columns["changed slots/token"] = lambda summary: f"{summary.decode_changed_slots_per_token:.2f}"
    if any(summary.config.settings.device_ahead for summary in summaries):
        columns["forecasts right"] = lambda summary: _percent(summary.decode_device_ahead_precision)
    if any(summary.config.on_device for summary in summaries):
        columns |= {
            "device hits": lambda summary: _percent(summary.decode_device_hit_rate),
            "device computed": lambda summary: _percent(summary.decode_device_computed_share),
            "uploaded MiB/token": lambda summary: f"{summary.decode_device_bytes_per_token / MiB:.1f}",
            "device MiB": lambda summary: f"{summary.device_used_bytes / MiB:.0f}",
        }
    rows = [(summary.config.label, *(cell(summary) if summary.n_rounds else "-" for cell in columns.values()))
            for summary in summaries]
    return ("configuration", *columns), rows


def footer(
    results: Results, resident: Summary | None, summaries: Sequence[Summary], cached: bool = False
) -> list[tuple[str, str]]:
    """Returns labels and facts that the numbers depend on. cached: the model fits into the processor's cache."""
    rows = [("failed", f"{summary.config.label}: {summary.failure}") for summary in summaries if summary.failure]
    rows.append(("disk", speed(results.bandwidths)))
    if resident is not None and resident.n_rounds:
        rows.append((
            "compute", f"decode {1000 / resident.decode_rate:.1f} ms/token, prefill "
                       f"{1000 / resident.prefill_rate:.1f} ms/token, {resident.config.label}"
        ))
    waited = [f"{summary.config.label}: {1000 * summary.decode_stall_seconds_per_miss:.2f} ms" for summary in summaries
              if summary.decode_stall_seconds_per_miss == summary.decode_stall_seconds_per_miss]
    if waited:
        rows.append(("miss", "decoding waited for an expert that was not there: " + "; ".join(waited)))
    busy = [run.busy_elsewhere for run in results.runs if run.busy_elsewhere == run.busy_elsewhere]
    if busy and max(busy) > _DISTURBED:
        rows.append((
            "noise", f"other processes used up to {max(busy):.0%} of the processors meanwhile: these numbers say little"
        ))
    if any(summary.config.on_device for summary in summaries):
        rows.append(("device", "device hits, and what it computed, are shares of all uses of experts; hits are those "
                               "of host memory, of what the device lacks"))
    rows.append(("roofline",
                 "not shown: the model fits into the processor's cache, and the disk plays no part" if cached else
                 "max(compute time, missed bytes / peak disk bandwidth) / measured time"))
    return rows


def speed(bandwidths: Sequence[Bandwidth]) -> str:
    """Returns the speed of a disk that was measured several times during a benchmark."""
    rates = sorted(bandwidth.bytes_per_second for bandwidth in bandwidths)
    best = max(bandwidths, key=lambda bandwidth: bandwidth.bytes_per_second)
    how = "direct" if best.direct else "buffered"
    return (f"peak {rates[len(rates) // 2] / GiB:.2f} GiB/s, from {rates[0] / GiB:.2f} to {rates[-1] / GiB:.2f} during "
            f"the benchmark (best with {best.reader}, {counted(best.depth, 'request')} of "
            f"{format_bytes(best.request_bytes)} at once, {how})")


def ratio_lines(results: Results, pairs: Sequence[tuple[Config, Config]]) -> list[str]:
    """Returns the gain of substitution, or the cost of busy processes. pairs: they differ in one thing."""
    return [
        f"{one.label}: decode {ratio(results, one, other, lambda run: run.decode.rate):.2f}x {other.label}"
        + (_of_text(text_change(results, one, other)) if one.lossy else "")
        for one, other in pairs
    ]


def _of_text(change: TextChange | None) -> str:
    if change is None:
        return ""
    return (f"; same most probable token {change.agreement:.1%}, text costs {-change.log_likelihood:.3f} nats a token, "
            f"lossless {-change.base_log_likelihood:.3f}")


def _peak(summary: Summary) -> str:
    """Returns the peak of the group, page cache included, if there is a limit; otherwise of the process."""
    of_group = summary.peak_group_bytes
    return f"{(of_group if of_group == of_group else summary.peak_memory_bytes) / MiB:.0f}"


def _planned(summary: Summary) -> str:
    planned = summary.planned_stall_seconds_per_token
    return f" ({planned * 1000:.1f} planned)" if planned == planned else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == share else "-"


_BINS = 24


def draw(results: Results, pairs: Sequence[tuple[Config, Config]], path: Path) -> None:
    """Writes the picture of the last round.

    Raises:
        PyorchError: matplotlib is missing, or the file cannot be written.
    """
    pictures.save_as(partial(_bandwidths, results=results, pairs=pairs), path, pictures.PRINT_DPI)


def _bandwidths(figure_class: type[Figure], results: Results, pairs: Sequence[tuple[Config, Config]]) -> Figure:
    bases = list(dict.fromkeys(base for _, base in pairs))
    figure = figure_class(figsize=(9, 3 * len(bases)), layout="constrained")
    for axis, base in zip(figure.subplots(len(bases), 1, squeeze=False)[:, 0], bases):
        for config in (base, *(one for one, other in pairs if other == base)):
            texts = [run.measurement.text for run in results.of(config) if run.measurement is not None]
            if not texts or len(texts[-1].seconds) < 2:
                continue
            seconds, rates = bandwidth(texts[-1])
            axis.step(seconds, rates / MiB, where="mid", label=config.label)
        axis.set_ylabel("MiB read a second")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    axis.set_xlabel("seconds")
    return figure


def bandwidth(text: Text, n_bins: int = _BINS) -> tuple[np.ndarray, np.ndarray]:
    """Divides the time of decoding into equal pieces. Returns their middles in seconds, and bytes read a second."""
    edges = np.linspace(0, text.seconds[-1], n_bins + 1)
    read = np.interp(edges, text.seconds, text.bytes_read)
    return (edges[1:] + edges[:-1]) / 2, np.diff(read) / np.diff(edges)
