"""Chooses the ubatch of a context, and the memory that it leaves for experts on the host and on devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import llama_cpp.llama_cpp as llama

from pyorch.errors import BudgetError, PyorchError
from pyorch.llama import measure, memory
from pyorch.llama.division import LEAST_UBATCH, NARROW_UBATCH, WIDE_UBATCH, MemoryLimit, Room, divide
from pyorch.llama.facts import Facts, settle
from pyorch.llama.managed import ManagedModel, lock, models
from pyorch.runtime import fatal
from pyorch.runtime.devices import Device
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO
from pyorch.sizes import format_bytes

CTX_STEP = 256  # llama.cpp rounds a context up to a multiple of so many tokens
MAX_SHARE_UBATCH = 1024  # QUOTA_SLOTS in native/src/api/cluster.cpp: the rows that a server accepts in a request


def default_ubatch(managed: ManagedModel) -> int | None:
    """Returns the tokens to compute at once. None under the automatic budget: the context's memory decides.

    A prefill reads every expert once per ubatch, so doubling the ubatch halves the reads.
    """
    if managed.plan.automatic:
        return None
    whole = managed.engine is None or managed.budget_bytes() >= managed.map.info.slots_bytes
    return NARROW_UBATCH if whole or managed.plan.has_share else WIDE_UBATCH


def check_ubatch(managed: ManagedModel, n_ubatch: int) -> None:
    """Raises PyorchError if the ubatch of a model with a share of the experts is wider than other servers accept."""
    if managed.plan.has_share and n_ubatch > MAX_SHARE_UBATCH:
        raise PyorchError(f"{managed.path} has a share of the experts, and other servers take no more than "
                          f"{MAX_SHARE_UBATCH} rows for one expert: a ubatch of {n_ubatch} tokens is too wide")


def check_context(managed: ManagedModel, params: llama.llama_context_params, widen: bool) -> None:
    """Refuses a context that memory cannot hold, before llama.cpp allocates any of it.

    Args:
        managed: A model that is loaded, or is being loaded.
        params: Of the context.
        widen: As for plan_context(): the ubatch may still become narrow.

    Raises:
        BudgetError: The experts leave too little memory for the context. The message names the largest that fits.
    """
    n_ctx = params.n_ctx or managed.map.trained_ctx
    free = _free(managed)
    left = free.free_bytes - _dense_to_come(managed)
    if managed.plan.automatic:
        left -= managed.map.info.floor_bytes + free.margin_bytes
    elif managed.engine is not None:
        # A budget that alone is more than the free memory is the user's decision.
        rest = left - managed.engine.stats().budget_bytes
        left = rest if rest > 0 else left
    params = llama.llama_context_params.from_buffer_copy(params)
    if managed.plan.automatic and widen:
        params.n_ubatch = min(params.n_ubatch, LEAST_UBATCH)
    if _most_bytes(managed.map, n_ctx, params.n_ubatch) < left:
        return
    capture = managed.engine.capture() if managed.engine is not None else contextlib.nullcontext()
    with capture, measure.twin(managed.path, managed.params) as twin:
        growth = measure.growth(twin, params, managed.map, managed.devices)
        needed, n_ubatch = growth.needed(n_ctx), None
        largest = growth.largest(left) // CTX_STEP * CTX_STEP
        if needed > left:
            n_ubatch = _ubatch_that_fits(params, lambda params: measure.growth(
                twin, params, managed.map, managed.devices).needed(n_ctx) <= left)
    if needed > left:
        remedies = []
        if largest:
            remedies.append(f"the largest that fits has {largest} tokens (--ctx {largest}, in Python n_ctx={largest})")
        if n_ubatch:
            remedies.append(f"it fits where {n_ubatch} tokens are computed at once (--ubatch {n_ubatch}, in Python "
                            f"n_ubatch={n_ubatch})")
        remedy = "; ".join(remedies) or (
            "use a smaller context or ubatch, lower the budget of the experts, or allow the process more memory")
        raise BudgetError(f"{managed.path}: a context of {n_ctx} tokens needs {format_bytes(needed, round_up=True)}, "
                          f"and {format_bytes(max(0, left))} are left for it under the limit of "
                          f"{format_bytes(free.limit_bytes)} ({free.source}): {remedy}")


def _ubatch_that_fits(
    params: llama.llama_context_params, fits: Callable[[llama.llama_context_params], bool]
) -> int | None:
    """The widest power of two below the ubatch of these parameters with which the context fits; None if none does."""
    params = llama.llama_context_params.from_buffer_copy(params)
    params.n_ubatch = 1 << (params.n_ubatch - 1).bit_length()
    while params.n_ubatch > LEAST_UBATCH:
        params.n_ubatch //= 2
        if fits(params):
            return params.n_ubatch
    return None


def _free(managed: ManagedModel) -> MemoryLimit:
    """Returns the memory limit, whose free bytes are for a context and all experts of the model together."""
    limit = memory.memory_limit()
    used = managed.engine.stats().used_bytes if managed.engine is not None else 0
    return dataclasses.replace(limit, free_bytes=limit.free_bytes + used - _promised_bytes(managed))


def _dense_to_come(managed: ManagedModel) -> int:
    """Returns the bytes of the host's dense weights that still count as free memory.

    The kernel can drop mapped dense weights, so they look free; but every token needs them.
    """
    mapped = managed.params.load_mode in (llama.LLAMA_LOAD_MODE_MMAP, llama.LLAMA_LOAD_MODE_AUTO)
    return managed.plan.placement.host_dense(managed.plan.header) if mapped else 0


def _most_bytes(model_map: ModelMap, n_ctx: int, n_ubatch: int) -> int:
    """Returns an upper bound of a context's bytes, without llama.cpp.

    It counts keys, values and states twice, and the attention of each head and each token of a ubatch to each token.
    """
    n_head = max((model_map.hparam("attention.head_count", 1, il) for il in range(model_map.info.n_layers)), default=1)
    return 2 * model_map.kv_bytes(n_ctx) + n_ctx * (4 * n_head * n_ubatch + measure.CELL_BYTES)


def plan_context(
    managed: ManagedModel, params: llama.llama_context_params, widen: bool, is_loaded: bool = True
) -> int:
    """Gives the engine the memory that a context with these parameters leaves.

    Args:
        managed: A model that is loaded, or is being loaded.
        params: Of the context; the ubatch is set.
        widen: Choose the ubatch: narrower than llama.cpp's only if its buffers would not leave the floor.
        is_loaded: The dense weights of devices are loaded.

    Returns:
        The context's bytes of host memory.

    Raises:
        BudgetError: The context leaves less than the floor.
    """
    widest = min(params.n_batch, MAX_SHARE_UBATCH) if managed.plan.has_share else params.n_batch
    _divide(managed, params, widest if widen else 0, is_loaded)
    params.n_ubatch = managed.division.n_ubatch
    return managed.division.context_bytes


def plan_devices(managed: ManagedModel, params: llama.llama_context_params, is_loaded: bool = True) -> None:
    """Gives experts the memory of devices that the first context with these parameters leaves.

    A given budget is not exceeded. If less is left, a note says so. is_loaded: as for plan_context().
    """
    if managed.engine is not None and managed.devices is not None and not managed.division.is_final:
        _divide(managed, params, 0, is_loaded)


def _divide(managed: ManagedModel, params: llama.llama_context_params, widest: int, is_loaded: bool) -> None:
    """Divides memory anew for a context with these parameters, and sets the engine. widest: as in Room."""
    plan, devices = managed.plan, managed.plan.placement.each
    dense = [0] * len(devices) if is_loaded else plan.placement.device_dense(plan.header)
    room = Room(_free(managed), _dense_to_come(managed), tuple(dense), params.n_ubatch, widest,
                managed.engine.stats().device_used_bytes > 0)
    before, engine = managed.division, managed.engine
    with engine.capture(), measure.twin(managed.path, managed.params) as twin:

        def context_sizes(n_ubatch: int) -> measure.ContextSizes:
            wide = llama.llama_context_params.from_buffer_copy(params)
            wide.n_ubatch = n_ubatch
            return measure.context_sizes(twin, wide, managed.map, managed.devices)

        survey = SimpleNamespace(context_sizes=context_sizes, device_memory=Device.memory)
        found = settle(partial(divide, plan.settings, devices, before, room), Facts(plan.header), survey)
    with managed.in_use:  # else the budget could follow free memory between the lines
        managed.division = found
        if plan.automatic:
            engine.set_budget(found.budget)
            if found.planner is not None:
                engine.set_pools(found.pools)
    is_automatic = plan.settings.vram_budget == AUTO
    for i, (given, n_bytes) in enumerate(zip(before.devices, () if before.is_final else found.devices)):
        if is_automatic or n_bytes < given:
            engine.set_device_budget(i, n_bytes)
        if not is_automatic and n_bytes < given:
            fatal.notice(f"note: the other layers and the context leave {format_bytes(n_bytes)} of {devices[i].name} "
                         f"for experts, not {format_bytes(given)}")


def _promised_bytes(managed: ManagedModel) -> int:
    """Returns bytes that look free and are reserved: for experts of other models, and for contexts of this model."""
    with lock:
        # Compute buffers may be untouched yet. Counting them twice is the safe side.
        promised = sum(managed.contexts.values())
        for other in list(models.values()):
            if other.engine is not None and other is not managed:
                stats = other.engine.stats()
                promised += stats.budget_bytes - stats.used_bytes
    return promised
