"""Decides which devices compute which layers of a model, and whether a device or the processor computes the experts
that a device lacks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from pyorch.llama.division import WIDE_UBATCH, device_margin
from pyorch.llama.facts import Facts, Header
from pyorch.settings.budget import AUTO as BUDGET_AUTO
from pyorch.settings.device import AUTO, NONE, PROCESSOR, UPLOAD
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB

if TYPE_CHECKING:
    from pyorch.runtime.devices import Device

# DeviceAreas::LEAST_TOKENS and NO_TOKENS in native/src/device/areas.h
LEAST_PROMPT, NO_PROMPT = 32, 2**31 - 1

# Of an expert that a device lacks: its upload is waited for, and the processor computes it while the device computes
# others. So with uploads it has to be so many times as fast.
_CLEARLY_SOONER = 1.5

# Beside dense weights and a KV cache: what all layers certainly fit with.
_ROOM_TO_SPARE = 1536 * MiB


@dataclass(frozen=True)
class Placement:
    """The devices of a model, and the layers of each.

    Attributes:
        n_layers: Layers on devices, as llama.cpp counts them: the output counts as the last layer and is moved first.
            Below 0: all.
        each: The devices, () if the processor computes alone.
        ends: For each device the block behind its last one.
        counts: Layers of each device, as llama.cpp counts them.
        pipelined: llama.cpp may compute several ubatches of a prompt at once, on several devices. A layer under an
            engine computes one ubatch at a time.
    """

    n_layers: int
    each: tuple[Device, ...] = ()
    ends: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    pipelined: bool = False

    def blocks(self) -> list[range]:
        """Of each device."""
        return [range(begin, end) for begin, end in zip((0, *self.ends), self.ends)]

    def expert_bytes(self, header: Header) -> list[int]:
        """Of all experts in the blocks of each device."""
        return [sum(n_bytes for il, n_bytes in header.expert_bytes.items() if il in blocks) for blocks in self.blocks()]

    def device_dense(self, header: Header) -> list[int]:
        """Of the dense weights, those that are on each device."""
        if self.n_layers == 0 or not self.each:
            return [0] * len(self.each)
        first = 0 if self.n_layers < 0 else max(0, header.info.n_layers + 1 - self.n_layers)
        found = [sum(header.block_bytes[il] for il in blocks if il >= first) for blocks in self.blocks()]
        found[-1] += header.output_bytes
        return found

    def host_dense(self, header: Header) -> int:
        """Of the dense weights, those that are in host memory."""
        on_devices = self.each and not 0 <= self.n_layers <= header.info.n_layers
        return header.host_bytes if on_devices else header.info.dense_bytes


def place(settings: Settings, facts: Facts) -> tuple[Placement, str]:
    """Places the model on the devices that the settings name. Returns the placement and a note for people.

    If the request leaves the number of layers open, as many of the last layers as fit beside their part of the first
    context are on devices. Raises Unknown if a fact is missing.
    """
    found, note = _named(settings, facts)
    is_auto, asked = settings.device == AUTO, facts.request.n_layers
    if not found:
        return Placement(0 if is_auto else asked), note
    if is_auto:
        found = _that_suffice(found, settings, facts)
    if asked not in (0, -1):
        return _divided(found, asked, facts), note
    n_blocks = facts.header.info.n_layers
    n = _layers_that_fit(found, facts)
    if n <= 1 and is_auto:
        return Placement(0), (f"{_names(found)} {_has(found)} no room for a layer beside its part of the context, and "
                              f"{'is' if len(found) == 1 else 'are'} not used")
    if 0 < n <= n_blocks:
        note += (f"{'; ' if note else ''}{_names(found)} {_has(found)} room for {n - 1} of {n_blocks} layers beside "
                 "their part of the context: the processor computes the others")
    return _divided(found, n if 0 < n <= n_blocks else -1, facts), note


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)


def _has(devices: Sequence[Device]) -> str:
    return "has" if len(devices) == 1 else "have"


def _named(settings: Settings, facts: Facts) -> tuple[Sequence[Device], str]:
    """Those that the settings name; and a note of what was chosen. "auto": the fastest first."""
    if settings.device == NONE:
        return (), ""
    found = facts.devices(settings.device)
    if settings.device != AUTO or not facts.header.layers:
        return found, ""
    used, notes = [], []
    for device in found:
        said, rates = f"{device.name} ({device.description})", facts.rates(device)
        if isinstance(rates, str):
            notes.append(f"{said} is not used: {rates}")
            continue
        _, processor, _, there, _ = rates
        if there <= processor:
            notes.append(f"{said} computes experts at {there / processor:.2g} of the processor's speed, and is not "
                         f"used: --device {device.name} uses it all the same")
            continue
        used.append((there, device))
        notes.append(f"{said} computes experts {there / processor:.2g} times as fast as the processor: it is used")
    used.sort(key=lambda pair: -pair[0])
    return [device for _, device in used], "; ".join(notes)


def _left(device: Device, facts: Facts) -> int:
    """Bytes of its memory for a model."""
    free, total = facts.device_memory(device)
    return free - device_margin(total)


def _that_suffice(found: Sequence[Device], settings: Settings, facts: Facts) -> Sequence[Device]:
    """The first ones, which have room for all that is to lie on devices; else all."""
    header, budget = facts.header, settings.vram_budget
    info = header.info
    experts = info.expert_bytes if budget == BUDGET_AUTO else budget.amount.of(info.expert_bytes)
    needed = info.dense_bytes + experts + header.kv_bytes(facts.request.n_ctx)
    for n in range(1, len(found)):
        needed += _ROOM_TO_SPARE
        if sum(_left(device, facts) for device in found[:n]) >= needed:
            return found[:n]
    return found


def _divided(found: Sequence[Device], n_layers: int, facts: Facts) -> Placement:
    """Blocks in a row for each, by bytes as its memory allows. Of blocks whose dense part is on the processor the first
    device has the experts. One that would have no block with experts is left out.
    """
    header, info = facts.header, facts.header.info
    n_on = info.n_layers + 1 if n_layers < 0 else min(n_layers, info.n_layers + 1)
    first, experts = info.n_layers + 1 - n_on, header.expert_bytes
    kv = header.kv_bytes(facts.request.n_ctx) // max(1, info.n_layers)
    sizes = [header.block_bytes[il] + kv + experts.get(il, 0) for il in range(first, info.n_layers)]
    sizes.append(0 if info.slim else header.output_bytes)
    rooms = list(accumulate(max(1, _left(device, facts)) for device in found)) if len(found) > 1 else [1]
    counts, before = [0] * len(found), sum(n_bytes for il, n_bytes in experts.items() if il < first)
    total = max(1, before + sum(sizes))
    for size in sizes:  # to whom its middle belongs
        counts[bisect_left(rooms, (before + size / 2) / total * rooms[-1])] += 1
        before += size
    ends = [min(first + end, info.n_layers) for end in accumulate(counts)]
    placement = Placement(n_layers, tuple(found), (*ends[:-1], info.n_layers), tuple(counts))
    busy = [device for device, n_bytes in zip(found, placement.expert_bytes(header)) if n_bytes]
    if len(busy) < len(found) > 1 and header.layers:
        return _divided(busy or found[:1], n_layers, facts)
    return placement


def _layers_that_fit(found: Sequence[Device], facts: Facts) -> int:
    """As llama.cpp counts them."""
    header, info = facts.header, facts.header.info
    if info.slim:  # of which llama.cpp knows nothing without an engine
        return info.n_layers + 1
    left = {device: _left(device, facts) for device in found}
    if info.dense_bytes + header.kv_bytes(facts.request.n_ctx) + _ROOM_TO_SPARE <= min(left.values()):
        return info.n_layers + 1

    def fits(n: int) -> bool:
        placement = _divided(found, n, facts)
        room = [left[device] for device in placement.each]
        beside = header.chain_bytes(facts.request.n_ubatch)
        needed = [dense + beside for dense in placement.device_dense(header)]
        if any(bytes_needed >= of for bytes_needed, of in zip(needed, room)):
            return False
        return all(dense + rest <= of for dense, rest, of in zip(needed, facts.sizes(placement).devices, room))

    fitting, not_fitting = 0, info.n_layers + 1
    if fits(not_fitting):
        return not_fitting
    while not_fitting - fitting > 1:
        n = (fitting + not_fitting) // 2
        fitting, not_fitting = (n, not_fitting) if fits(n) else (fitting, n)
    return fitting


def whole_model(placement: Placement, settings: Settings, facts: Facts) -> Placement | None:
    """The placement where the whole model fits into the devices' memory beside a context: llama.cpp keeps it there
    then, where no layer asks the host. None elsewhere, and where the settings want an engine, as those that say how
    much experts get."""
    header, info = facts.header, facts.header.info
    if settings.managed or settings.vram_budget != BUDGET_AUTO or settings.lossy or settings.source is not None:
        return None
    if info.slim or any(device.shares_memory for device in placement.each):  # whose experts are the processor's
        return None
    if not header.layers or 0 <= placement.n_layers <= info.n_layers:  # of which the processor has some
        return None
    weights = [sum(each) for each in zip(placement.expert_bytes(header), placement.device_dense(header))]
    left = [_left(device, facts) - n for device, n in zip(placement.each, weights)]
    whole = replace(placement, pipelined=True)
    if min(left) <= 0 or any(size > of for size, of in zip(facts.sizes(whole).devices, left)):
        return None
    return whole


def misses_of(settings: Settings, devices: Sequence[Device], facts: Facts) -> tuple[str, str]:
    """What computes the experts that these devices lack, one of DEVICE_MISSES: what is sooner for one token, unless the
    settings say it; and a note. What another process has comes as its network allows: the processor computes."""
    if settings.device_misses is not None:
        return settings.device_misses, ""
    if any(device.is_remote for device in devices) or settings.device_ahead or not facts.header.layers:
        return PROCESSOR, ""
    gains = []
    for device in devices:
        rates = facts.rates(device)
        if isinstance(rates, str):
            return PROCESSOR, ""
        upload, processor, _, there, _ = rates
        gains.append(1 / processor / (1 / upload + 1 / there))
    if min(gains) < _CLEARLY_SOONER:
        return PROCESSOR, ""
    return UPLOAD, (f"experts that {_names(devices)} {'lacks' if len(devices) == 1 else 'lack'} are uploaded and "
                    f"computed there, {min(gains):.2g} times as fast as the processor would: --device-misses processor "
                    "has it do so")


def prompt_tokens_of(settings: Settings, devices: Sequence[Device], facts: Facts) -> int:
    """Of a ubatch for which experts that these devices lack are brought there rather than computed by the processor, at
    least, by the same rates: what is uploaded and what is computed of other layers go on at once. The least that there
    is for devices of other processes; NO_PROMPT where it is no ubatch."""
    layers = facts.header.layers
    if any(device.is_remote for device in devices) or not layers:
        return LEAST_PROMPT
    measured = [facts.rates(device) for device in devices]
    if any(isinstance(rates, str) for rates in measured):
        return LEAST_PROMPT
    used = max(layer.n_expert_used / layer.n_expert for layer in layers)

    def is_sooner(n_tokens: int) -> bool:
        more = used * n_tokens / (1 - (1 - used) ** n_tokens) - 1 if used < 1 else n_tokens - 1  # rows of an expert
        return all(max(1 / upload, 1 / there + more / there_more) <= 1 / processor + more / processor_more
                   for upload, processor, processor_more, there, there_more in measured)

    # By quarters: the rates are not better known. Where it is not so for wide ones, it is for none.
    n, widest = LEAST_PROMPT, max(settings.n_ubatch, WIDE_UBATCH)
    while n <= widest and not is_sooner(n):
        n += n // 4
    return n if n <= widest and is_sooner(widest) else NO_PROMPT
