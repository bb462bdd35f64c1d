"""divide() divides the memory of the host and of devices among experts, their forms, and contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyorch.errors import BudgetError
from pyorch.llama.facts import Facts
from pyorch.settings.budget import AUTO
from pyorch.settings.pools import Pools
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB, format_bytes

if TYPE_CHECKING:
    from pyorch.llama.pools import PoolPlanner
    from pyorch.planning.planner import Split
    from pyorch.runtime.devices import Device
    from pyorch.runtime.model_map import MapInfo

LEAST_UBATCH, NARROW_UBATCH, WIDE_UBATCH = 32, 512, 2048  # tokens computed at once

# The part of a device's memory that the automatic budget leaves free: for the driver, for other processes, and for
# buffers that llama.cpp does not report.
MARGIN_SHARE, MARGIN_BYTES = 0.05, 256 * MiB


def device_margin(total_bytes: int) -> int:
    """Returns the bytes of a device's memory that the automatic budget leaves free."""
    return max(MARGIN_BYTES, round(MARGIN_SHARE * total_bytes))


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process's memory. free_bytes: what may still be allocated under it."""

    source: str
    limit_bytes: int
    free_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Returns the bytes that stay free: stacks, page tables, the tokenizer, the page cache of buffered reads."""
        return 96 * MiB + self.limit_bytes * 3 // 100

    def rest_bytes(self, dense_bytes: int, context_bytes: int = 0) -> int:
        """Returns the bytes left for experts, below 0 if too few are free."""
        return self.free_bytes - dense_bytes - context_bytes - self.margin_bytes


@dataclass(frozen=True)
class Division:
    """The division of memory now.

    Attributes:
        budget: Bytes for experts in host memory. None without an engine: llama.cpp keeps the experts, or the model is
            dense.
        devices: Bytes for experts in the memory of each device. 0 before a context determines them.
        is_final: A context determined `devices`. Later contexts do not change them.
        n_ubatch, context_bytes: The ubatch of the last context, and its bytes of host memory.
        pools: Shares of the budget for the forms of a compressed pack's experts. None without such a pack.
        origin: The source of `pools`: "given", a plan, or the known routing. If a pack is not used, the reason.
        split: The hits and waits that are expected of `pools`. None if the settings give `pools`.
        planner: Divides another budget. None if the settings give `pools`.
    """

    budget: int | None = None
    devices: tuple[int, ...] = ()
    is_final: bool = False
    n_ubatch: int = 0
    context_bytes: int = 0
    pools: Pools | None = None
    origin: str = ""
    split: Split | None = None
    planner: PoolPlanner | None = None

    def at(self, budget: int) -> Division:
        """Returns this division with another budget, in bytes."""
        if self.planner is None:
            return replace(self, budget=budget)
        split = self.planner.packed_best(budget)
        return replace(self, budget=budget, pools=Pools(*split.shares), origin=self.planner.origin, split=split)


@dataclass(frozen=True)
class Room:
    """The memory that a new context finds.

    Attributes:
        limit: Its free bytes are for contexts and all experts of the model together.
        host_dense, device_dense: Bytes of dense weights that still count as free.
        n_ubatch: The ubatch of the context.
        widest: If above 0, divide() chooses the ubatch, at most this.
        is_taken: Experts occupy the memory of devices already.
    """

    limit: MemoryLimit
    host_dense: int
    device_dense: tuple[int, ...]
    n_ubatch: int
    widest: int = 0
    is_taken: bool = False


def divide(settings: Settings, devices: Sequence[Device], division: Division, room: Room, facts: Facts) -> Division:
    """Divides memory between a new context and the experts: that of devices, and under the automatic budget the host's.

    Args:
        settings: The user's settings.
        devices: The devices of the plan.
        division: The division before.
        room: The memory that the context finds.
        facts: context_sizes(n_ubatch) is a ContextSizes, device_memory(device) its free and total bytes.

    Raises:
        BudgetError: The context leaves less than the floor.
        Unknown: A fact is missing.
    """
    header, n_ubatch = facts.header, room.n_ubatch
    shared = [i for i, device in enumerate(devices) if device.shares_memory]  # their memory is the host's

    def of_devices() -> tuple[int, ...]:
        return division.devices if division.is_final else _device_bytes(
            settings, devices, division.devices, room, facts, n_ubatch)

    def needed(n_ubatch: int) -> int:
        beside = header.chain_bytes(n_ubatch) if devices else 0
        sizes = facts.context_sizes(n_ubatch)
        return sizes.host + beside + sum(sizes.devices[i] + beside for i in shared)

    if settings.budget == AUTO:
        info = header.info
        shared_bytes = sum(of_devices()[i] for i in shared) if shared else 0
        # An expert is in one place only, except while it passes to a device.
        most = max(0, info.slots_bytes - shared_bytes) + info.floor_bytes if shared_bytes else info.slots_bytes
        to_come = 0 if room.is_taken else shared_bytes
        dense = room.host_dense
        if any(room.device_dense[i] for i in shared):
            dense = min(dense + sum(room.device_dense[i] for i in shared), info.dense_bytes)
        if room.widest:
            n_ubatch = _widest_ubatch(needed, room.widest, room.limit.rest_bytes(to_come), most)
            while n_ubatch > LEAST_UBATCH and room.limit.rest_bytes(dense + to_come, needed(n_ubatch)) < (
                    info.floor_bytes):
                n_ubatch //= 2
        division = division.at(min(most, budget_beside(info, room.limit, dense, needed(n_ubatch), to_come)))
        division = replace(division, context_bytes=needed(n_ubatch))
    return replace(division, n_ubatch=n_ubatch, devices=of_devices(), is_final=True)


def _device_bytes(
    settings: Settings, devices: Sequence[Device], given: Sequence[int], room: Room, facts: Facts, n_ubatch: int
) -> tuple[int, ...]:
    """Returns the bytes for experts of each device: its memory without dense weights and a context.

    A given budget is the maximum. The automatic budget uses none of the processor's memory.
    """
    found, sizes = [], facts.context_sizes(n_ubatch) if devices else None
    for i, (device, most) in enumerate(zip(devices, given)):
        free, total = facts.device_memory(device)
        left = free - sizes.devices[i] - facts.header.chain_bytes(n_ubatch) - room.device_dense[i]
        if settings.vram_budget == AUTO:
            left, most = left - device_margin(total), 0 if device.shares_memory else left
        found.append(max(0, min(left, most)))
    return tuple(found)


def _widest_ubatch(needed: Callable[[int], int], widest: int, free_bytes: int, slots_bytes: int) -> int:
    """Returns the widest ubatch whose buffers cost the experts at most a tenth of their memory.

    needed: Returns the bytes of the context for a ubatch. If all experts fit, none is read twice, so the narrow ubatch
    suffices.
    """
    narrow = min(NARROW_UBATCH, widest)
    rest = free_bytes - needed(narrow)
    width = min(WIDE_UBATCH, widest)
    while width > narrow and (rest >= slots_bytes or needed(width) - needed(narrow) > rest // 10):
        width //= 2
    return max(width, narrow)


def budget_beside(
    info: MapInfo, limit: MemoryLimit, dense_bytes: int, context_bytes: int, device_bytes: int = 0
) -> int:
    """Returns the bytes that the limit leaves for experts, at most the bytes of all experts.

    Args:
        info: The model.
        limit: The memory limit.
        dense_bytes, context_bytes: Of dense weights and a context that are not in memory yet.
        device_bytes: Of experts that a device will have in this memory.

    Raises:
        BudgetError: Less than the floor is left.
    """
    rest = limit.rest_bytes(dense_bytes + device_bytes, context_bytes)
    if rest < info.floor_bytes:
        needs = {
            "for dense weights": dense_bytes,
            "for the context": context_bytes,
            "for the experts on a device that shares this memory (--vram-budget)": device_bytes,
            "for the fewest experts": info.floor_bytes,
            "as a margin": limit.margin_bytes,
        }
        remedy = "allow it more memory, use a smaller context or ubatch"
        if rest + limit.margin_bytes >= info.floor_bytes:
            remedy += ", or name a budget, such as --budget 40%, for which no margin is kept free"
        terms = ", ".join(f"{format_bytes(n, round_up=True)} {what}" for what, n in needs.items() if n)
        raise BudgetError(
            f"{info.name or info.arch} does not fit: {format_bytes(limit.free_bytes)} are free under the limit of "
            f"{format_bytes(limit.limit_bytes)} ({limit.source}), but it still needs "
            f"{format_bytes(sum(needs.values()), round_up=True)} ({terms}): {remedy}"
        )
    return min(rest, info.slots_bytes)
