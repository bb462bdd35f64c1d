"""GET /metrics: llama-server's metrics and the metrics of the experts, in one answer for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyorch.library.bindings import numbers
from pyorch.llama.managed import ManagedModel
from pyorch.runtime.statistics import Stats, SubstitutionStats, is_of_layers
from pyorch.serve.library import lib
from pyorch.serve.routes import Answer, Request, refusal

# Metrics with other names than in pyorch.h.
_NAMES = {
    "hits": "expert_hits", "misses": "expert_misses", "loads": "expert_loads", "evictions": "expert_evictions",
    "bytes_read": "read_bytes", "prefetch_hits": "prefetch_useful", "failures": "decode_failures",
    "tokens": "routed_tokens", "decode_ns": "decoding_ns", "substituted": "substituted_slots",
    "dropped": "dropped_slots", "ghosts": "ghost_slots", "on_their_way": "on_their_way_slots",
}
_LOSSY = ("substituted", "dropped", "ghosts", "on_their_way")  # the metrics in pyorch_substitution_counts


@dataclass(frozen=True)
class _Metric:
    """A metric of the engine.

    Attributes:
        name: The name without a prefix.
        text: The help text.
        source: The field of Stats or SubstitutionStats.
        factor: Converts the field to the unit of the metric.
        is_gauge: Whether it is a gauge; otherwise a counter.
        of_layers: Whether each layer has a value.
    """

    name: str
    text: str
    source: str
    factor: float
    is_gauge: bool
    of_layers: bool


def declared(on_device: bool) -> Iterator[_Metric]:
    found = [number for number in numbers("pyorch_stats") if on_device or not number.name.startswith("device_")]
    found += [number._replace(text=f"lossy: {number.text}")
              for number in numbers("pyorch_substitution_counts") if number.name in _LOSSY]
    for source, part, text in found:
        name = _NAMES.get(source, source)
        in_seconds = name.endswith("_ns")
        yield _Metric(f"{name.removesuffix('_ns')}_seconds" if in_seconds else name, f"{text[0].upper()}{text[1:]}.",
                      source, 1e-9 if in_seconds else 1, part.startswith("gauges"), is_of_layers(part))


TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Metrics of the queue, which every server has: name and help text.
QUEUE = (("requests_waiting", "Requests that wait for a slot, or for their model."),
         ("requests_waiting_seconds", "Seconds that the oldest of them has waited, 0 without one."))


def queue_text(n_waiting: int, seconds: float) -> str:
    """Returns the metrics of the queue."""
    return "".join(f"# HELP pyorch_{name} {text}\n# TYPE pyorch_{name} gauge\npyorch_{name} {value}\n"
                   for (name, text), value in zip(QUEUE, (n_waiting, round(seconds, 3))))


def _own(text: str, name: str) -> str:
    """Returns the value of a metric of llama-server."""
    found = re.search(rf"^llamacpp:{name} (\S+)$", text, re.MULTILINE)
    return found[1] if found else "0"


class Metrics:
    """llama-server's metrics, then the queue's, then the engine's counters; a dense model has no engine."""

    def __init__(self, managed: ManagedModel) -> None:
        self._managed = managed

    def get(self, request: Request) -> Answer:
        if request.own_status != 200:
            return Answer(request.own or refusal(503, "no metrics").body, status=request.own_status)
        # The import takes 100 ms, which a server without requests for metrics saves.
        from prometheus_client import generate_latest

        n_waiting = int(float(_own(request.own, "requests_deferred")))
        queue = queue_text(n_waiting, lib.pyorch_server_get_waited(n_waiting))
        return Answer(request.own.rstrip("\n") + "\n" + queue + generate_latest(self).decode(), TYPE)

    def collect(self) -> Iterator:
        """Yields the engine's metrics for Prometheus."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engine = self._managed.engine
        if engine is None:
            return
        snapshot = engine.snapshot()
        layers = [(str(il), (stats, engine.substitution_stats(il)))
                  for il, stats in zip(engine.n_expert, snapshot.layers)]
        whole = snapshot.stats, engine.substitution_stats()
        for metric in declared(snapshot.stats.device_budget_bytes > 0):
            family = GaugeMetricFamily if metric.is_gauge else CounterMetricFamily
            yield family(f"pyorch_{metric.name}", metric.text, value=_value(whole, metric.source) * metric.factor)
            if metric.of_layers:
                by_layer = family(f"pyorch_layer_{metric.name}", f"{metric.text} By layer.", labels=["layer"])
                for il, counts in layers:
                    by_layer.add_metric([il], _value(counts, metric.source) * metric.factor)
                yield by_layer


def _value(counts: tuple[Stats, SubstitutionStats], source: str) -> float:
    return next(getattr(part, source) for part in counts if hasattr(part, source))


def of_models(answers: Iterable[tuple[str, str, bool]]) -> str:
    """Merges the metrics of several servers, with the model as a label.

    Args:
        answers: For each model its name, its metrics, and whether it is loaded.
    """
    heads: dict[str, dict[str, None]] = {}  # by metric: its HELP and TYPE lines, once each
    samples: dict[str, list[str]] = {}
    loaded = []
    for model, text, is_loaded in answers:
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label = f'model="{escaped}"'
        loaded.append(f"pyorch_model_loaded{{{label}}} {int(is_loaded)}")
        name = ""
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                heads.setdefault(name, {})[line] = None
            elif line:
                samples.setdefault(name, []).append(_labelled(line, label))
    lines = [line for name, of_metric in samples.items() for line in (*heads.get(name, ()), *of_metric)]
    lines += ["# HELP pyorch_model_loaded Whether the model is loaded.", "# TYPE pyorch_model_loaded gauge", *loaded]
    return "\n".join(lines) + "\n"


def _labelled(sample: str, label: str) -> str:
    return re.sub(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{?)", lambda match: f"{match[1]}{{{label}" + (
        "," if match[2] else "}"), sample, count=1)
