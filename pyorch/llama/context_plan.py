"""How wide a context computes, and what it leaves for experts: of host memory, and of devices'."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import llama_cpp.llama_cpp as llama

from pyorch.errors import BudgetError, PyorchError
from pyorch.llama import measure, memory
from pyorch.llama.device import device_dense_bytes, host_dense_bytes, margin_bytes
from pyorch.llama.managed import ManagedModel, lock, models
from pyorch.llama.measure import LEAST_UBATCH, NARROW_UBATCH, WIDE_UBATCH
from pyorch.runtime import fatal
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO
from pyorch.sizes import format_bytes

CTX_STEP = 256  # tokens: llama.cpp makes a context a multiple of so many
MAX_SHARE_UBATCH = 1024  # QUOTA_SLOTS in native/src/api/cluster.cpp: each server takes a request of so many


def default_ubatch(managed: ManagedModel) -> int | None:
    """Tokens to compute at once: in prefill every expert is read once for each ubatch, so twice as wide is half the
    reading. None under the automatic budget, where it depends on what memory a context leaves."""
    if managed.plan.automatic:
        return None
    whole = managed.engine is None or managed.budget_bytes() >= managed.map.info.slots_bytes
    return NARROW_UBATCH if whole or managed.plan.has_share else WIDE_UBATCH


def check_ubatch(managed: ManagedModel, n_ubatch: int) -> None:
    """PyorchError where a model that has a share of the experts is to compute more tokens at once than others take."""
    if managed.plan.has_share and n_ubatch > MAX_SHARE_UBATCH:
        raise PyorchError(f"{managed.path} has a share of the experts, and other servers take no more than "
                          f"{MAX_SHARE_UBATCH} rows for one of them: a ubatch of {n_ubatch} tokens is too wide")


def check_context(managed: ManagedModel, params: llama.llama_context_params, widen: bool) -> None:
    """Refuses a context that memory cannot hold, before llama.cpp allocates any of it.

    Args:
        managed: A model that is loaded, or is being loaded.
        params: Of the context.
        widen: As plan_context() has it: the ubatch may still become narrow.

    Raises:
        BudgetError: The context needs more than is free beside the experts. The sentence names the largest that fits.
    """
    n_ctx = params.n_ctx or managed.map.trained_ctx
    free = _free(managed)
    left = free.free_bytes - _dense_to_come(managed)
    if managed.plan.automatic:
        left -= managed.map.info.floor_bytes + memory.margin_bytes(free)
    elif managed.engine is not None:
        # A budget that alone is more than the free memory is the user's decision.
        beside = left - managed.engine.stats().budget_bytes
        left = beside if beside > 0 else left
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


def _free(managed: ManagedModel) -> memory.MemoryLimit:
    """The memory limit. Its free bytes are those that a context and all experts of the model may use together."""
    limit = memory.memory_limit()
    used = managed.engine.stats().used_bytes if managed.engine is not None else 0
    return dataclasses.replace(limit, free_bytes=limit.free_bytes + used - _promised_bytes(managed))


def _dense_to_come(managed: ManagedModel) -> int:
    """Bytes of dense weights of the host that count as free memory today.

    The kernel can drop mapped dense weights, so they look free; but every token needs them.
    """
    mapped = managed.params.load_mode in (llama.LLAMA_LOAD_MODE_MMAP, llama.LLAMA_LOAD_MODE_AUTO)
    return host_dense_bytes(managed.map, managed.devices, managed.params) if mapped else 0


def _most_bytes(model_map: ModelMap, n_ctx: int, n_ubatch: int) -> int:
    """More bytes than a context takes, known without llama.cpp: keys, values and states at twice their size, and the
    attention of each head and each token of a ubatch to each token."""
    n_head = max((model_map.hparam("attention.head_count", 1, il) for il in range(model_map.info.n_layers)), default=1)
    return 2 * model_map.kv_bytes(n_ctx) + n_ctx * (4 * n_head * n_ubatch + measure.CELL_BYTES)


def plan_context(
    managed: ManagedModel, params: llama.llama_context_params, widen: bool, is_loaded: bool = True
) -> int:
    """Sets the engine's budget to what a context with these parameters will leave; returns its bytes of host memory.

    widen: choose params.n_ubatch: narrower than llama.cpp's only where its buffers would not leave the floor.
    is_loaded: the dense weights of devices are there already. Raises BudgetError if that is not left.
    """
    info, free = managed.map.info, _free(managed)
    dense_bytes = _dense_to_come(managed)
    # What is on devices that share this memory is taken of it, too.
    shared = [i for i, device in enumerate(managed.devices.each) if device.shares_memory] if managed.devices else []
    if shared and not is_loaded:
        dense_there = device_dense_bytes(managed.map, managed.params.n_gpu_layers, managed.devices)
        dense_bytes = min(dense_bytes + sum(dense_there[i] for i in shared), info.dense_bytes)
    slots_bytes, to_come = info.slots_bytes, 0
    with managed.engine.capture(), measure.twin(managed.path, managed.params) as twin:

        def need(n_ubatch: int) -> int:
            params.n_ubatch = n_ubatch
            beside = measure.chain_bytes(managed.map, n_ubatch) if managed.devices is not None else 0
            sizes = measure.context_sizes(twin, params, managed.map, managed.devices)
            return sizes.host + beside + sum(sizes.devices[i] + beside for i in shared)

        if shared:
            sizes = measure.context_sizes(twin, params, managed.map, managed.devices)
            budgets = managed.device_bytes or _device_budgets(managed, sizes, params.n_ubatch, is_loaded)
            there = sum(budgets[i] for i in shared)
            to_come = there if managed.engine.stats().device_used_bytes == 0 else 0
            if there:  # an expert lies once, but for what passes on its way there
                slots_bytes = max(0, slots_bytes - there) + info.floor_bytes
        if widen:
            most = min(params.n_batch, MAX_SHARE_UBATCH) if managed.plan.has_share else params.n_batch
            without = dataclasses.replace(free, free_bytes=free.free_bytes - to_come)
            params.n_ubatch = _widest_ubatch(need, most, without, slots_bytes)
        needed = need(params.n_ubatch)
        while (widen and params.n_ubatch > LEAST_UBATCH
               and memory.rest_bytes(free, dense_bytes + to_come, needed) < info.floor_bytes):
            needed = need(params.n_ubatch // 2)
        budget = min(memory.budget_beside(info, free, dense_bytes, needed, to_come), slots_bytes)
    managed.engine.set_budget(budget)
    if managed.division.planner is not None:
        managed.division = managed.division.at(budget)
        managed.engine.set_pools(managed.division.pools)
    return needed


def plan_devices(managed: ManagedModel, params: llama.llama_context_params, is_loaded: bool = True) -> None:
    """What experts get of each device: under the automatic budget, what a first context with these parameters leaves of
    it; of a budget that was given, no more than that, and a line says so.

    is_loaded: the dense weights are there already.
    """
    devices = managed.devices
    if managed.engine is None or devices is None or managed.device_bytes is not None:
        return
    with managed.engine.capture():
        sizes = measure.sizes_of(managed.map, managed.params, params, devices)
    managed.device_bytes = _device_budgets(managed, sizes, params.n_ubatch, is_loaded)
    is_automatic = managed.plan.settings.vram_budget == AUTO
    for i, (device, given, found) in enumerate(zip(devices.each, managed.plan.device_bytes, managed.device_bytes)):
        if is_automatic or found < given:
            managed.engine.set_device_budget(i, found)
        if not is_automatic and found < given:
            fatal.notice(f"note: {device.name} has {format_bytes(found)} left beside the other layers and the context: "
                         f"so much is for experts, not {format_bytes(given)}")


def _device_budgets(
    managed: ManagedModel, sizes: measure.ContextSizes, n_ubatch: int, is_loaded: bool
) -> tuple[int, ...]:
    """Of each device, bytes for experts beside a context of these sizes: of a budget that was given, at most that."""
    devices, found = managed.devices, []
    dense = [0] * len(devices.each) if is_loaded else device_dense_bytes(
        managed.map, managed.params.n_gpu_layers, devices)
    for i, (device, given) in enumerate(zip(devices.each, managed.plan.device_bytes)):
        left = max(0, device.free_bytes() - sizes.devices[i] - measure.chain_bytes(managed.map, n_ubatch) - dense[i])
        if managed.plan.settings.vram_budget != AUTO:
            found.append(min(given, left))
            continue
        left = max(0, left - margin_bytes(device.total_bytes()))
        found.append(0 if device.shares_memory else left)  # one of several that shares the processor's memory has none
    return tuple(found)


def _promised_bytes(managed: ManagedModel) -> int:
    """What looks free and is not: what other models' experts may still take, and contexts of this model."""
    with lock:
        # Compute buffers may not have been touched yet; to count them twice is on the safe side.
        promised = sum(managed.contexts.values())
        for other in list(models.values()):
            if other.engine is not None and other is not managed:
                stats = other.engine.stats()
                promised += stats.budget_bytes - stats.used_bytes
    return promised


def _widest_ubatch(need: Callable[[int], int], n_batch: int, free: memory.MemoryLimit, slots_bytes: int) -> int:
    """The widest ubatch whose buffers cost the experts at most a tenth of their memory.

    need: bytes of the context for an ubatch. Where all experts fit, none is read twice: the narrow one.
    """
    narrow = min(NARROW_UBATCH, n_batch)
    least = need(narrow)
    rest = free.free_bytes - memory.margin_bytes(free) - least
    width = min(WIDE_UBATCH, n_batch)
    while width > narrow and (rest >= slots_bytes or need(width) - least > rest // 10):
        width //= 2
    return max(width, narrow)
