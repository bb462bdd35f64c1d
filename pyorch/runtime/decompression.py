"""Measures how fast compressed experts are recovered: an engine reads some and counts."""

from __future__ import annotations

import os
from time import perf_counter

from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap


def decode_threads() -> int:
    """Returns the engine's threads that decode, in addition to compute threads (default_threads() in loading)."""
    return min(max((os.cpu_count() or 1) // 2, 1), 4)


def recovery_threads(n_computing: int) -> int:
    """Returns the threads that decode while a layer waits (L of ZipMoE): compute threads and the engine's own.

    At most the number of processors, because further threads would wait for one.
    """
    return min(n_processors(), n_computing + decode_threads())


def n_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_recovery(model_map: ModelMap, seconds: float) -> float | None:
    """Measures the bytes of matrices that one thread recovers in a second.

    Reads and decodes experts for `seconds`, a token's experts of a layer at a time; longer if the first layers are not
    compressed. The engine's threads decode, and this one while it waits: they share memory, which slows each down.

    Returns:
        None if nothing is compressed, or everything is damaged.
    """
    if not model_map.layers:
        return None
    n_used = model_map.info.n_expert_used
    end = perf_counter() + seconds
    with Engine(model_map, model_map.info.floor_bytes) as engine:
        first = 0
        while True:
            for layer in model_map.layers:
                experts = [(first + i) % layer.n_expert for i in range(min(n_used, layer.n_expert))]
                engine.prefetch(layer.il, experts)
                engine.wait_idle()
                engine.evict(layer.il, experts)
                stats = engine.stats()
                if stats.decoded_bytes and perf_counter() > end:
                    return 1e9 * stats.decoded_bytes / max(1, stats.decode_ns)
            if not stats.decoded_bytes:
                return None
            first += n_used
