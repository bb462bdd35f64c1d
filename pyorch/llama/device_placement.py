"""Places a model on devices: which devices compute which layers, and whether a device or the processor computes the
experts that a device lacks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from pyorch.llama.division import WIDE_UBATCH, device_margin
from pyorch.llama.facts import Facts, Header
from pyorch.settings.budget import AUTO as BUDGET_AUTO
from pyorch.settings.device_options import AUTO, NONE, PROCESSOR, UPLOAD
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB

if TYPE_CHECKING:
    from pyorch.runtime.devices import Device

# DeviceAreas::LEAST_TOKENS and NO_TOKENS in native/src/device/areas.h
LEAST_PROMPT, NO_PROMPT = 32, 2**31 - 1

# A device that uploads missing experts must be this many times faster: the token waits for the upload, while the
# processor could compute them at the same time as the device computes others.
_CLEARLY_SOONER = 1.5

# Memory in addition to dense weights and a KV cache with which all layers certainly fit.
_ROOM_TO_SPARE = 1536 * MiB


@dataclass(frozen=True)
class Placement:
    """The devices of a model, and the layers of each.

    Attributes:
        n_layers: Layers on devices, as llama.cpp counts them: the output counts as the last layer and is moved first.
            Below 0: all.
        each: The devices, () if the processor computes alone.
        ends: For each device the block after its last one.
        pipelined: llama.cpp may compute several ubatches of a prompt at once, on several devices. A layer under an
            engine computes one ubatch at a time.
    """

    n_layers: int
    each: tuple[Device, ...] = ()
    ends: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    pipelined: bool = False

    def blocks(self) -> list[range]:
        """The blocks of each device."""
        return [range(begin, end) for begin, end in zip((0, *self.ends), self.ends)]

    def expert_bytes(self, header: Header) -> list[int]:
        """Returns the bytes of all experts in the blocks of each device."""
        return [sum(n_bytes for il, n_bytes in header.expert_bytes.items() if il in blocks) for blocks in self.blocks()]

    def device_dense(self, header: Header) -> list[int]:
        """Returns the bytes of dense weights on each device."""
        if self.n_layers == 0 or not self.each:
            return [0] * len(self.each)
        first = 0 if self.n_layers < 0 else max(0, header.info.n_layers + 1 - self.n_layers)
        found = [sum(header.block_bytes[il] for il in blocks if il >= first) for blocks in self.blocks()]
        found[-1] += header.output_bytes
        return found

    def host_dense(self, header: Header) -> int:
        """Returns the bytes of dense weights in host memory."""
        on_devices = self.each and not 0 <= self.n_layers <= header.info.n_layers
        return header.host_bytes if on_devices else header.info.dense_bytes


def place(settings: Settings, facts: Facts) -> tuple[Placement, str]:
    """Places the model on the devices that the settings name.

    If the request leaves the number of layers open, as many of the last layers are on devices as fit together with
    their part of the first context.

    Returns:
        The placement and a note for people.

    Raises:
        Unknown: A fact is missing.
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
    """Returns the devices that the settings name, for "auto" the fastest first, and a note about the choice."""
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
        _, processor, _, device_rate, _ = rates
        if device_rate <= processor:
            notes.append(f"{said} computes experts at {device_rate / processor:.2g} of the processor's speed, and is "
                         f"not used: --device {device.name} uses it all the same")
            continue
        used.append((device_rate, device))
        notes.append(f"{said} computes experts "
                     f"{device_rate / processor:.2g} times as fast as the processor: it is used")
    used.sort(key=lambda pair: -pair[0])
    return [device for _, device in used], "; ".join(notes)


def _left(device: Device, facts: Facts) -> int:
    """Returns the bytes of a device's memory for a model."""
    free, total = facts.device_memory(device)
    return free - device_margin(total)


def _that_suffice(found: Sequence[Device], settings: Settings, facts: Facts) -> Sequence[Device]:
    """Returns the first devices that together have room for everything that belongs on devices; otherwise all."""
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
    """Gives each device consecutive blocks, by bytes in proportion to its memory.

    If the dense part of a block is on the processor, the first device has its experts. A device that would have no
    block with experts is left out.
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
    for size in sizes:  # a block belongs to the device that has its middle
        counts[bisect_left(rooms, (before + size / 2) / total * rooms[-1])] += 1
        before += size
    ends = [min(first + end, info.n_layers) for end in accumulate(counts)]
    placement = Placement(n_layers, tuple(found), (*ends[:-1], info.n_layers), tuple(counts))
    busy = [device for device, n_bytes in zip(found, placement.expert_bytes(header)) if n_bytes]
    if len(busy) < len(found) > 1 and header.layers:
        return _divided(busy or found[:1], n_layers, facts)
    return placement


def _layers_that_fit(found: Sequence[Device], facts: Facts) -> int:
    """Returns the number of layers that fit on devices, as llama.cpp counts them."""
    header, info = facts.header, facts.header.info
    if info.slim:  # llama.cpp cannot measure it without an engine
        return info.n_layers + 1
    left = {device: _left(device, facts) for device in found}
    if info.dense_bytes + header.kv_bytes(facts.request.n_ctx) + _ROOM_TO_SPARE <= min(left.values()):
        return info.n_layers + 1

    def fits(n: int) -> bool:
        placement = _divided(found, n, facts)
        room = [left[device] for device in placement.each]
        chain = header.chain_bytes(facts.request.n_ubatch)
        needed = [dense + chain for dense in placement.device_dense(header)]
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
    """Returns the placement if the whole model and a context fit into the devices' memory.

    llama.cpp then keeps the model there, and no layer needs the host. None if it does not fit, or if the settings need
    an engine, for example because they limit the experts' memory.
    """
    header, info = facts.header, facts.header.info
    if settings.managed or settings.vram_budget != BUDGET_AUTO or settings.lossy or settings.source is not None:
        return None
    if info.slim or any(device.shares_memory for device in placement.each):  # the processor computes these experts
        return None
    if not header.layers or 0 <= placement.n_layers <= info.n_layers:  # some layers are on the processor
        return None
    weights = [sum(each) for each in zip(placement.expert_bytes(header), placement.device_dense(header))]
    left = [_left(device, facts) - n for device, n in zip(placement.each, weights)]
    whole = replace(placement, pipelined=True)
    if min(left) <= 0 or any(size > of for size, of in zip(facts.sizes(whole).devices, left)):
        return None
    return whole


def misses_of(settings: Settings, devices: Sequence[Device], facts: Facts) -> tuple[str, str]:
    """Chooses what computes the experts that these devices lack: one of DEVICE_MISSES, and a note.

    Without a setting, the faster one for one token. For devices of other processes the processor, because the network's
    speed varies.
    """
    if settings.device_misses is not None:
        return settings.device_misses, ""
    if any(device.is_remote for device in devices) or settings.device_ahead or not facts.header.layers:
        return PROCESSOR, ""
    gains = []
    for device in devices:
        rates = facts.rates(device)
        if isinstance(rates, str):
            return PROCESSOR, ""
        upload, processor, _, device_rate, _ = rates
        gains.append(1 / processor / (1 / upload + 1 / device_rate))
    if min(gains) < _CLEARLY_SOONER:
        return PROCESSOR, ""
    return UPLOAD, (f"experts that {_names(devices)} {'lacks' if len(devices) == 1 else 'lack'} are uploaded and "
                    f"computed there, {min(gains):.2g} times as fast as the processor would: --device-misses processor "
                    "computes them there")


def prompt_tokens_of(settings: Settings, devices: Sequence[Device], facts: Facts) -> int:
    """Returns the tokens of a ubatch from which on missing experts are uploaded rather than computed by the processor.

    Decided by rates of devices. Uploads and computing of other layers overlap. LEAST_PROMPT for devices of other
    processes; NO_PROMPT if no ubatch is wide enough.
    """
    layers = facts.header.layers
    if any(device.is_remote for device in devices) or not layers:
        return LEAST_PROMPT
    measured = [facts.rates(device) for device in devices]
    if any(isinstance(rates, str) for rates in measured):
        return LEAST_PROMPT
    used = max(layer.n_expert_used / layer.n_expert for layer in layers)

    def is_sooner(n_tokens: int) -> bool:
        more = used * n_tokens / (1 - (1 - used) ** n_tokens) - 1 if used < 1 else n_tokens - 1  # rows of an expert
        return all(max(1 / upload, 1 / on_device + more / on_device_more) <= 1 / processor + more / processor_more
                   for upload, processor, processor_more, on_device, on_device_more in measured)

    # Steps of a quarter, because rates are not more precise. If uploads are slower for the widest, none is uploaded.
    n, widest = LEAST_PROMPT, max(settings.n_ubatch, WIDE_UBATCH)
    while n <= widest and not is_sooner(n):
        n += n // 4
    return n if n <= widest and is_sooner(widest) else NO_PROMPT
