"""Makes expert maps from a recorded trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.history import CAPACITY, DISTANCE, ExpertMaps, token_embeddings
from pyorch.traces.file import Trace

OnProgress = Callable[[str, int, int], None]  # "searching", tokens done, total

_RECORDS_AT_ONCE = 1 << 10


def maps_from_trace(
    trace: Trace, model_map: ModelMap, capacity: int = CAPACITY, distance: int = DISTANCE,
    on_progress: OnProgress | None = None,
) -> ExpertMaps:
    """Returns expert maps of a trace's tokens, in order, and the counts of uses of each expert.

    Raises:
        FormatError: The trace is damaged or belongs to another model.
        PyorchError: The trace has no tokens, or only the selected experts instead of whole distributions.
    """
    maps = ExpertMaps.for_model(model_map, capacity, distance)
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
    for uses, experts in zip(maps.uses, trace.records["experts"].swapaxes(0, 1)):
        uses += np.bincount(experts.ravel(), minlength=len(uses))
    return maps
