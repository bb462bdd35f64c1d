"""Expert maps of what a trace has recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.history import CAPACITY, DISTANCE, N_REQUESTS, ExpertMaps, token_embeddings
from pyorch.traces.file import Trace

OnProgress = Callable[[str, int, int], None]  # "searching", tokens done, total

_RECORDS_AT_ONCE = 1 << 10


def maps_from_trace(
    trace: Trace, model_map: ModelMap, capacity: int = CAPACITY, distance: int = DISTANCE,
    n_requests: int = N_REQUESTS, on_progress: OnProgress | None = None,
) -> ExpertMaps:
    """Expert maps of the trace's tokens, in their order, and of its requests.

    Raises FormatError for a trace of another model, PyorchError for one without whole distributions or tokens.
    """
    maps = ExpertMaps.for_model(model_map, capacity, distance, n_requests)
    trace.check(model_map)
    if trace.header.router != "full":
        raise PyorchError(f"{trace.path} has the selected experts only: record the distributions of the routers "
                          "with --router full")
    if trace.records["experts"].max() >= trace.header.n_expert:
        raise FormatError(f"{trace.path} is damaged: it has an expert {trace.records['experts'].max()}, and the "
                          f"model has {trace.header.n_expert} a layer")
    for start in range(0, len(trace), _RECORDS_AT_ONCE):
        records = trace.records[start : start + _RECORDS_AT_ONCE]
        for map, embedding in zip(records["router"], token_embeddings(model_map, records["token"])):
            maps.add(map, embedding)
        if on_progress is not None:
            on_progress("searching", start + len(records), len(trace))
    for counts in _request_counts(trace):
        maps.add_request(counts)
    return maps


def _request_counts(trace: Trace) -> Iterator[np.ndarray]:
    """float32[n_layers, n_expert] of each request: how often it used each expert."""
    header = trace.header
    n_layers, n_expert = len(header.layers), header.n_expert
    order = np.argsort(trace.records["request"], kind="stable")
    ends = np.flatnonzero(np.diff(trace.records["request"][order])) + 1
    for rows in np.split(order, ends):
        experts = trace.records["experts"][rows].swapaxes(0, 1).reshape(n_layers, -1).astype(np.int64)
        uses = experts + n_expert * np.arange(n_layers)[:, None]
        yield np.bincount(uses.ravel(), minlength=n_layers * n_expert).reshape(n_layers, n_expert)
