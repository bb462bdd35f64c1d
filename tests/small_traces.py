"""Traces of the small model that nobody recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.traces.file import Trace, TraceHeader, TraceWriter


def trace_of(model_map: ModelMap, path: Path, n_tokens: int, n_inputs: int, seed: int = 0) -> Trace:
    """Random tokens: expert 0 never, the others the likelier the higher their number; inputs in a space of few
    dimensions."""
    rng = np.random.default_rng(seed)
    n_expert, k, n_embd = model_map.layers[0].n_expert, model_map.info.n_expert_used, 128
    header = TraceHeader(container.fingerprint(model_map), model_map.info.arch,
                         tuple(layer.il for layer in model_map.layers), n_expert, k, n_embd, n_inputs=n_inputs)
    n_layers = len(header.layers)
    records = np.zeros(n_tokens, header.record_dtype())
    records["position"] = np.arange(n_tokens)
    keys = rng.random((n_tokens, n_layers, n_expert)) ** (1 / np.maximum(np.r_[0, 20 : 19 + n_expert], 1e-9))
    records["experts"] = np.argsort(-keys, axis=2)[:, :, :k]
    records["probs"] = np.sort(rng.random((n_tokens, n_layers, k)), axis=2)[:, :, ::-1]
    with TraceWriter(path, header) as writer:
        rows, slots = writer.sample(n_tokens)
        few = rng.normal(size=(len(rows), n_layers, 6)) @ rng.normal(size=(6, n_embd))
        writer.write(records, rows, slots, (few + 0.1 * rng.normal(size=few.shape)).astype(np.float16))
    return Trace(path)
