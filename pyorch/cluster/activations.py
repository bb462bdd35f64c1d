"""Counts how often each server's users activate experts, in traces or in a running cluster; the counts are a JSON file.

For each server, and each layer with routed experts that a decode uses, the file has a count for each expert: how often
it was selected for a token of this server's requests, on any server (docs/reference/cluster.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import json_file
from pyorch.traces.file import Trace
from pyorch.traces.routing_statistics import activation_counts

KIND = "pyorch count of activations"
VERSION = 1

MAX_COUNT = 2.0**53  # float64 represents all whole numbers up to this

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class Activations:
    """Counts of activations.

    Attributes:
        servers: The names of the servers.
        layers: The block numbers (il).
        counts: float64[n_servers, n_layers, n_expert].
    """

    servers: tuple[str, ...]
    layers: tuple[int, ...]
    counts: np.ndarray

    def of(self, servers: Sequence[str]) -> np.ndarray:
        """Returns the counts of servers in this order, zeros for servers without counts."""
        rows = [self.counts[self.servers.index(name)] if name in self.servers else np.zeros(self.counts.shape[1:])
                for name in servers]
        return np.stack(rows)

    def __add__(self, other: Activations) -> Activations:
        """Adds counts of the same servers and layers."""
        return Activations(self.servers, self.layers, self.counts + other.counts)

    def shares(self) -> Activations:
        """Returns each layer's counts as shares, so that servers weigh alike despite different numbers of tokens."""
        sums = self.counts.sum(axis=2, keepdims=True)
        shares = np.divide(self.counts, sums, out=np.zeros_like(self.counts), where=sums > 0)
        return Activations(self.servers, self.layers, shares)


def count_traces(
    traces: Mapping[str, Sequence[Trace]], model_map: ModelMap, part: tuple[float, float] = (0.0, 1.0),
) -> Activations:
    """Counts the activations in each server's traces.

    Args:
        traces: The traces of each server, by name.
        model_map: The model.
        part: The part of each trace to count, such as (0, 0.5) for its first half.

    Raises:
        FormatError: A trace is damaged, belongs to another model, or lacks a layer.
        PyorchError: A trace has no tokens in this part.
    """
    layers = tuple(layer.il for layer in model_map.decoded_layers)
    n_experts = np.array([layer.n_expert for layer in model_map.decoded_layers])
    counts = np.zeros((len(traces), len(layers), n_experts.max(initial=1)))
    for i, server in enumerate(traces.values()):
        for trace in server:
            trace.check(model_map, decoded=True)
            if len(trace) < 2:
                raise PyorchError(f"{trace.path} holds too few tokens: {len(trace)}")
            counts[i] += _counted(trace, layers, n_experts, part)
    return Activations(tuple(traces), layers, counts)


def _counted(trace: Trace, layers: tuple[int, ...], n_experts: np.ndarray, part: tuple[float, float]) -> np.ndarray:
    columns = [trace.layer_index(il) for il in layers]
    counts = np.zeros((len(layers), int(n_experts.max(initial=1))))
    begin, end = (round(len(trace) * share) for share in part)
    rows = max(1, _CHUNK_BYTES // trace.records.dtype.itemsize)
    for start in range(begin, end, rows):
        experts = trace.records["experts"][start : min(start + rows, end)]
        for row, column, il, n_expert in zip(counts, columns, layers, n_experts):
            highest = experts[:, column].max()
            if highest >= n_expert:
                raise FormatError(f"{trace.path} is damaged: it names expert {highest} of {n_expert} in layer {il}")
            row += activation_counts(experts[:, column], len(row))
    return counts


def write_counts(path: str | os.PathLike[str], activations: Activations, model_map: ModelMap) -> None:
    """Writes the file atomically.

    Raises:
        PyorchError: It cannot be written.
    """
    fields = {"layers": list(activations.layers), "servers": [
        {"name": name, "counts": counts.tolist()} for name, counts in zip(activations.servers, activations.counts)
    ]}
    json_file.write(path, KIND, VERSION, model_map, fields)


def read_counts(path: str | os.PathLike[str], model_map: ModelMap) -> Activations:
    """Reads the file.

    Raises:
        FormatError: It is missing, damaged, no file of counts, or of another version or model.
    """
    value = json_file.read(path, KIND, VERSION, model_map, command="place --save-counts")
    layers = model_map.decoded_layers
    n_experts = np.array([layer.n_expert for layer in layers])
    try:
        names = tuple(server["name"] for server in value["servers"])
        counts = np.zeros((len(names), len(layers), n_experts.max(initial=1)))
        if value["layers"] != [layer.il for layer in layers] or not names or len(set(names)) < len(names):
            raise ValueError
        for rows, server in zip(counts, value["servers"]):
            for row, numbers, n_expert in zip(rows, server["counts"], n_experts, strict=True):
                if len(numbers) != n_expert or not all(type(n) in (int, float) for n in numbers):
                    raise ValueError
                row[:n_expert] = numbers
        if not all(isinstance(name, str) for name in names) or not ((counts >= 0) & (counts <= MAX_COUNT)).all():
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise FormatError(f"{Path(path)} is damaged: it holds no counts for each expert of each layer") from None
    return Activations(names, tuple(layer.il for layer in layers), counts)
