"""The memory left for experts, computed as for the budget "auto"."""

from __future__ import annotations

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.llama import logs, measure
from pyorch.llama.division import WIDE_UBATCH, MemoryLimit
from pyorch.runtime.model_map import MapInfo, ModelMap
from pyorch.sizes import MiB

# Compute buffers of a model that llama.cpp does not load, such as a header without a tokenizer.
_BUFFERS = 512 * MiB


def context_bytes(model_map: ModelMap, n_ctx: int, n_threads: int) -> int:
    """Returns the bytes of KV cache and compute buffers, without allocating them."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, n_threads, n_threads
    params.n_batch = params.n_ubatch = min(n_ctx, WIDE_UBATCH)
    logs.install()  # pyorch reads llama.cpp's lines about sizes and does not show them
    logs.set_quiet(True)
    try:
        with measure.twin(model_map.path, llama.llama_model_default_params()) as twin:
            return measure.growth(twin, params, model_map).needed(n_ctx)
    except PyorchError:
        return model_map.kv_bytes(n_ctx) + _BUFFERS


def rest_for_experts(info: MapInfo, limit: MemoryLimit, dense_bytes: int, n_context_bytes: int) -> int | None:
    """Returns the bytes left after dense weights and context, at most those of all experts; None below the floor."""
    rest = limit.rest_bytes(dense_bytes, n_context_bytes)
    return min(rest, info.slots_bytes) if rest >= info.floor_bytes else None
