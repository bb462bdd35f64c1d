"""How memory is divided: among experts and contexts, of the host and of devices, and among forms of experts."""

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

LEAST_UBATCH, NARROW_UBATCH, WIDE_UBATCH = 32, 512, 2048  # tokens that are computed at once

# Of a device's memory, what stays free under the automatic budget: for what its driver and others take, and for what
# llama.cpp makes beside the buffers that it reports.
MARGIN_SHARE, MARGIN_BYTES = 0.05, 256 * MiB


def device_margin(total_bytes: int) -> int:
    """What stays free of a device with so much memory."""
    return max(MARGIN_BYTES, round(MARGIN_SHARE * total_bytes))


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process's memory. free_bytes: what may still be allocated under it."""

    source: str
    limit_bytes: int
    free_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Kept free: stacks, page tables, tokenizer, the page cache that buffered reads need."""
        return 96 * MiB + self.limit_bytes * 3 // 100

    def rest_bytes(self, dense_bytes: int, context_bytes: int = 0) -> int:
        """What is left for experts, below 0 if nothing is."""
        return self.free_bytes - dense_bytes - context_bytes - self.margin_bytes


@dataclass(frozen=True)
class Division:
    """How memory is divided now.

    budget: bytes for experts in host memory; None: no engine, llama.cpp keeps the experts, or there are none. devices:
    of each device's memory for experts, 0 where a context is to say it; is_final: a context has said it, which a later
    one does not change. n_ubatch, context_bytes: how wide the last context computes, and its bytes of host memory.

    pools: how the budget is divided among the forms of a compressed pack's experts, None where experts come from no
    such pack. origin: who divided it, "given", a plan, or what is known of the routing; or why a pack that lies there
    is not used; "" where there is none. split: what is expected of it, None where the settings divide the memory.
    planner: divides another budget, None likewise.
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
        """The same with another budget, in bytes."""
        if self.planner is None:
            return replace(self, budget=budget)
        split = self.planner.packed_best(budget)
        return replace(self, budget=budget, pools=Pools(*split.shares), origin=self.planner.origin, split=split)


@dataclass(frozen=True)
class Room:
    """What a context finds when memory is divided.

    limit: its free bytes are those that a context and all experts of the model may use together. host_dense,
    device_dense: bytes of dense weights that look free and are not. n_ubatch: tokens that the context computes at once,
    where widest is 0; else how many is chosen, at most that. is_taken: experts have their memory of the devices.
    """

    limit: MemoryLimit
    host_dense: int
    device_dense: tuple[int, ...]
    n_ubatch: int
    widest: int = 0
    is_taken: bool = False


def divide(settings: Settings, devices: Sequence[Device], division: Division, room: Room, facts: Facts) -> Division:
    """What a context leaves for experts: of devices' memory, and under the automatic budget of the host's.

    Of facts: context_sizes(n_ubatch), a ContextSizes; device_memory(device), free and total bytes. BudgetError if less
    than the floor is left.
    """
    header, n_ubatch = facts.header, room.n_ubatch
    shared = [i for i, device in enumerate(devices) if device.shares_memory]  # of which this memory is taken, too

    def of_devices() -> tuple[int, ...]:
        return division.devices if division.is_final else _device_bytes(
            settings, devices, division.devices, room, facts, n_ubatch)

    def needed(n_ubatch: int) -> int:
        beside = header.chain_bytes(n_ubatch) if devices else 0
        sizes = facts.context_sizes(n_ubatch)
        return sizes.host + beside + sum(sizes.devices[i] + beside for i in shared)

    if settings.budget == AUTO:
        info = header.info
        there = sum(of_devices()[i] for i in shared) if shared else 0
        # An expert lies once, but for what passes on its way to a device.
        most = max(0, info.slots_bytes - there) + info.floor_bytes if there else info.slots_bytes
        to_come = 0 if room.is_taken else there
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
    """Of each device, bytes for experts beside the dense weights and a context: of a budget that was given, at most
    that; under the automatic one none of the processor's memory."""
    found, sizes = [], facts.context_sizes(n_ubatch) if devices else None
    for i, (device, most) in enumerate(zip(devices, given)):
        free, total = facts.device_memory(device)
        left = free - sizes.devices[i] - facts.header.chain_bytes(n_ubatch) - room.device_dense[i]
        if settings.vram_budget == AUTO:
            left, most = left - device_margin(total), 0 if device.shares_memory else left
        found.append(max(0, min(left, most)))
    return tuple(found)


def _widest_ubatch(needed: Callable[[int], int], widest: int, free_bytes: int, slots_bytes: int) -> int:
    """The widest ubatch whose buffers cost the experts at most a tenth of their memory.

    needed: bytes of the context for an ubatch. Where all experts fit, none is read twice: the narrow one.
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
    """Bytes for experts of what is free under the limit, at most what all of them occupy; dense weights, a context and
    what a device has of this memory for experts are still to come, of so many bytes. BudgetError if less than the floor
    is left.
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
