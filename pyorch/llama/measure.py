"""Asks llama.cpp for the memory of a context, before anything is allocated.

llama.cpp can load a model and make a context without allocating (no_alloc). It then knows the sizes of the KV cache and
of the compute buffers of any architecture, and reports them only in its log.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama

from pyorch import files
from pyorch.errors import BudgetError, FormatError
from pyorch.llama import logs
from pyorch.llama.division import LEAST_UBATCH
from pyorch.llama.originals import original
from pyorch.runtime import fatal
from pyorch.runtime.devices import Devices
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import MiB

_PROBE_CTX = 1 << 17  # the largest context that is measured, in tokens: larger than any sliding window
CELL_BYTES = 64  # per token in llama.cpp's list of the cache's cells, which it fills even under no_alloc

# A line for the place of each layer, and then the sum of the KV cache (or recurrent state); then buffers by name.
# Buffers are empty under no_alloc.
_PLACE = re.compile(r": layer +\d+: dev = (\S+)")
_SIZE = re.compile(r": size = +([\d.]+) MiB")
_BUFFER = re.compile(r": +(\S+) +(?:output|compute) buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class ContextSizes:
    """Bytes of a context in host memory and in the memory of each device."""

    host: int
    devices: tuple[int, ...] = ()


def not_loaded(path: str) -> FormatError:
    """Returns the error for a model that llama.cpp did not load."""
    hint = "; the file seems to be a header without weights" if files.has_holes([path]) else ""
    return FormatError(f"{path}: llama.cpp cannot load it: {logs.last_error()}{hint}")


@contextlib.contextmanager
def twin(path: str, params: llama.llama_model_params) -> Iterator[int]:
    """Loads a model that has everything except memory for its weights."""
    params = llama.llama_model_params.from_buffer_copy(params)
    params.no_alloc = True
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    logs.forget_errors()
    with logs.collect(), fatal.refused():
        model = original("llama_model_load_from_file")(os.fsencode(path), params)
    if not model:
        raise not_loaded(path)
    try:
        yield model
    finally:
        with logs.collect():
            llama.llama_model_free(model)


def sizes_of(
    model_map: ModelMap, model_params: llama.llama_model_params, params: llama.llama_context_params,
    devices: Devices | None = None,
) -> ContextSizes:
    """Returns context_sizes() of a model that is loaded with these parameters."""
    with twin(model_map.path, model_params) as model:
        return context_sizes(model, params, model_map, devices)


def context_sizes(
    model: int, params: llama.llama_context_params, model_map: ModelMap, devices: Devices | None = None
) -> ContextSizes:
    """Returns the bytes of KV cache, compute buffers and work space of a context with these parameters.

    Args:
        model: A twin, with dense layers on the devices.
        params: Of the context.
        model_map: Of the model.
        devices: None: the processor alone.

    Raises:
        BudgetError: llama.cpp refuses the parameters.
    """
    sizes = reported_sizes(_lines_of_context(model, params, model_map), devices)
    return ContextSizes(sizes.host + work_bytes(model_map, params.n_ubatch), sizes.devices)


def _lines_of_context(model: int, params: llama.llama_context_params, model_map: ModelMap) -> list[str]:
    """Returns llama.cpp's log of making a twin's context. BudgetError: it refuses the parameters."""
    logs.forget_errors()
    with logs.collect() as lines:
        with fatal.refused():
            context = original("llama_init_from_model")(model, params)
        if context:
            llama.llama_free(context)
    if not context:
        raise BudgetError(f"{model_map.path}: {refusal(model_map)}")
    return lines


@dataclass(frozen=True)
class Growth:
    """The host memory of a context by its tokens: base + slope * n_ctx bytes."""

    base: int
    slope: float

    def needed(self, n_ctx: int) -> int:
        """Returns the bytes of a context of n_ctx tokens."""
        return round(self.base + self.slope * n_ctx)

    def largest(self, n_bytes: int) -> int:
        """Returns the most tokens of context that fit into n_bytes, 0 if not even the base fits."""
        return max(0, int((n_bytes - self.base) / self.slope))


def growth(
    model: int, params: llama.llama_context_params, model_map: ModelMap, devices: Devices | None = None
) -> Growth:
    """Returns host memory by tokens of context, from two contexts of a twin: exact up to _PROBE_CTX tokens.

    A cache, a mask and a list of cells grow in proportion to the tokens; sliding windows and recurrent states stop
    growing. Larger contexts are not measured, because llama.cpp allocates the list of cells even under no_alloc.
    Raises:
        BudgetError: llama.cpp refuses the parameters.
    """
    def host_bytes(n_ctx: int) -> int:
        probe = llama.llama_context_params.from_buffer_copy(params)
        probe.n_ctx = n_ctx
        return context_sizes(model, probe, model_map, devices).host

    n_ctx = min(max(1024, params.n_ctx or model_map.trained_ctx), _PROBE_CTX)
    whole, half = host_bytes(n_ctx), host_bytes(n_ctx // 2)
    slope = (whole - half) / (n_ctx - n_ctx // 2)
    return Growth(round(whole - slope * n_ctx), slope + CELL_BYTES)


def cache_bytes(model_map: ModelMap, n_ctx: int) -> int:
    """Returns the bytes of keys, values and recurrent states of n_ctx tokens of one sequence in llama.cpp.

    Raises:
        PyorchError: llama.cpp cannot load the model, or refuses the context.
    """
    def reported(n_ctx: int) -> float:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, LEAST_UBATCH, LEAST_UBATCH
        lines = _lines_of_context(model, params, model_map)
        return sum(float(size[1]) * MiB for size in map(_SIZE.search, lines) if size)

    with twin(model_map.path, llama.llama_model_default_params()) as model:
        measured = min(n_ctx, _PROBE_CTX)
        whole = reported(measured)
        if n_ctx > measured:
            whole += (whole - reported(measured // 2)) / (measured - measured // 2) * (n_ctx - measured)
    return round(whole)


def reported_sizes(lines: Iterable[str], devices: Devices | None) -> ContextSizes:
    """Reads the sizes from llama.cpp's log. A KV cache is divided in proportion to its layers."""
    each = devices.each if devices is not None else ()
    by_name, by_buffers = ({name: i for i, name in enumerate(names)} for names in (
        [device.name for device in each], [device.buffers for device in each]))
    sizes = [0.0] * (len(each) + 1)  # the host is last
    places: list[int] = []
    for line in lines:
        if place := _PLACE.search(line):
            places.append(by_name.get(place[1], len(each)))
        elif size := _SIZE.search(line):
            for i in places or [len(each)]:
                sizes[i] += float(size[1]) / max(1, len(places))
            places = []
        elif buffer := _BUFFER.search(line):
            sizes[by_buffers.get(buffer[1], len(each))] += float(buffer[2])
    *of_devices, of_host = (round(size * MiB) for size in sizes)
    return ContextSizes(of_host, tuple(of_devices))


def refusal(model_map: ModelMap) -> str:
    """Returns why llama.cpp made no context: from its log, or the most probable cause if the log has none."""
    gating = f"{model_map.info.arch}.expert_gating_func"
    if model_map.layers and model_map.metadata(gating, int) is None and "llama-graph.cpp" in logs.last_error():
        return f"the gating function of its routers is not known: it has no {gating}"
    return f"llama.cpp refuses this context: {logs.last_error()}"


def work_bytes(model_map: ModelMap, n_ubatch: int) -> int:
    """Returns the bytes of the work space of mul_mat_id, which is in none of the buffers that llama.cpp reports.

    It has the quantized inputs of the down matrices, at most two bytes a value, and for each expert a list with room
    for all selections of the ubatch, eight bytes each.
    """
    return n_ubatch * max((layer.n_expert_used * (2 * layer.n_ff + 8 * layer.n_expert) for layer in model_map.layers),
                          default=0)
