"""GET /metrics: llama-server's own metrics and those of the experts, in one answer for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from pyorch.llama.managed import ManagedModel
from pyorch.runtime.engine import Engine
from pyorch.runtime.statistics import Stats, SubstitutionStats
from pyorch.serve.routes import Answer, Request, refusal

# Name, help, field of Stats or SubstitutionStats, factor; counters of the engine and of each layer.
_COUNTERS = (
    ("expert_hits", "Uses of experts that found them in memory.", "hits", 1),
    ("expert_misses", "Uses of experts that had to wait for a read, or for the rest of one.", "misses", 1),
    ("expert_loads", "Experts read.", "loads", 1),
    ("expert_evictions", "Experts that had to go for others.", "evictions", 1),
    ("read_bytes", "Bytes of experts read.", "bytes_read", 1),
    ("stall_seconds", "Time in which a compute thread slept for an expert.", "stall_ns", 1e-9),
    ("prefetch_loads", "Experts read ahead.", "prefetch_loads", 1),
    ("prefetch_useful", "Experts that were read ahead and then used.", "prefetch_hits", 1),
    ("prefetch_late", "Of the useful ones, those that had not wholly arrived.", "prefetch_late", 1),
    ("prefetch_wasted", "Experts read ahead on a guess that did not come true.", "prefetch_wasted", 1),
    ("substituted_slots", "Expert slots that another expert stood in for (lossy).", "substituted", 1),
    ("dropped_slots", "Expert slots that were left out (lossy).", "dropped", 1),
    ("ghost_slots", "Expert slots that ghosts computed (lossy).", "ghosts", 1),
    ("on_their_way_slots", "Lossy expert slots whose experts were being read meanwhile.", "on_their_way", 1),
)
# Of experts on a device, where there is one.
_DEVICE_COUNTERS = (
    ("device_hits", "Uses of experts that found them in the memory of the device.", "device_hits", 1),
    ("device_misses", "Uses of all other experts.", "device_misses", 1),
    ("device_computed", "Uses of experts that the device computed.", "device_computed", 1),
    ("device_loads", "Experts that came into slots of the device.", "device_loads", 1),
    ("device_evictions", "Experts of the device that had to go for others.", "device_evictions", 1),
    ("device_bytes", "Bytes of experts uploaded to the device.", "device_bytes", 1),
    ("device_ahead", "Experts that forecasts ordered to the device before their layer.", "device_ahead", 1),
    ("device_ahead_hits", "Of these, those that their layer used.", "device_ahead_hits", 1),
    ("device_ahead_late", "Of these, those that had not come when it began.", "device_ahead_late", 1),
)
_DEVICE_GAUGES = (("device_experts", "Experts in slots of the device.", "device_experts"),)
_GAUGES = (
    ("resident_experts", "Experts in memory.", "resident_experts"),
    ("resident_bytes", "Bytes of the experts in memory.", "resident_bytes"),
)
# Of the whole engine only.
_ENGINE_COUNTERS = (
    ("decode_failures", "Computations that failed.", "failures", 1),
    ("layer_passes", "Layers computed.", "layer_passes", 1),
)
_ENGINE_GAUGES = (
    ("budget_bytes", "Memory that experts may occupy.", "budget_bytes"),
    ("used_bytes", "Memory that experts occupy.", "used_bytes"),
    ("peak_bytes", "The most memory that experts ever occupied.", "peak_bytes"),
)

# The same, where there is a device.
_DEVICE_ENGINE_COUNTERS = (("device_upload_seconds", "Time that uploads took, summed over threads.",
                            "device_upload_ns", 1e-9),)
_DEVICE_ENGINE_GAUGES = (
    ("device_budget_bytes", "Memory of the device that experts may occupy.", "device_budget_bytes"),
    ("device_used_bytes", "Memory of the device that experts occupy.", "device_used_bytes"),
)

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engine = self._engine
        snapshot = engine.snapshot()
        layers = [(str(il), (stats, engine.substitution_stats(il)))
                  for il, stats in zip(engine.n_expert, snapshot.layers)]
        whole = snapshot.stats, engine.substitution_stats()
        on_device = snapshot.stats.device_budget_bytes > 0
        kinds = [(CounterMetricFamily, *counter) for counter in _COUNTERS + (_DEVICE_COUNTERS if on_device else ())]
        kinds += [(GaugeMetricFamily, *gauge, 1) for gauge in _GAUGES + (_DEVICE_GAUGES if on_device else ())]
        for family, name, text, source, factor in kinds:
            yield family(f"pyorch_{name}", text, value=_value(whole, source) * factor)
            by_layer = family(f"pyorch_layer_{name}", f"{text} By layer.", labels=["layer"])
            for il, counts in layers:
                by_layer.add_metric([il], _value(counts, source) * factor)
            yield by_layer
        for name, text, source, factor in _ENGINE_COUNTERS + (_DEVICE_ENGINE_COUNTERS if on_device else ()):
            yield CounterMetricFamily(f"pyorch_{name}", text, value=_value(whole, source) * factor)
        for name, text, source in _ENGINE_GAUGES + (_DEVICE_ENGINE_GAUGES if on_device else ()):
            yield GaugeMetricFamily(f"pyorch_{name}", text, value=_value(whole, source))


def _value(counts: tuple[Stats, SubstitutionStats], source: str) -> float:
    return next(getattr(part, source) for part in counts if hasattr(part, source))


class Metrics:
    """llama-server's answer, and behind it what the engine counts; of a dense model llama-server's only."""

    def __init__(self, managed: ManagedModel) -> None:
        self._managed = managed

    def get(self, request: Request) -> Answer:
        if request.own_status != 200:
            return Answer(request.own or refusal(503, "no metrics").body, status=request.own_status)
        return Answer(request.own.rstrip("\n") + "\n" + self._text(), TYPE)

    def _text(self) -> str:
        if self._managed.engine is None:
            return ""
        # Takes a tenth of a second, which a server that nobody asks for metrics does not need to spend.
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._managed.engine))
        return generate_latest(registry).decode()
