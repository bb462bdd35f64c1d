"""Where a model computes: on which devices, which of its dense layers on each, and how much of them is in host memory
all the same."""

from __future__ import annotations

import contextlib
import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import llama_cpp.llama_cpp as llama

from pyorch import _libs
from pyorch.errors import PyorchError
from pyorch.llama import measure
from pyorch.llama.cores import physical_cores
from pyorch.runtime.devices import Device, Devices, find_devices, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO as BUDGET_AUTO
from pyorch.settings.device import AUTO, MAX_DEVICES, NONE, PROCESSOR, UPLOAD
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB

# Of the device's memory, what stays free under the automatic budget: for what its driver and others take, and for what
# llama.cpp makes beside the buffers that it reports.
MARGIN_SHARE, MARGIN_BYTES = 0.05, 256 * MiB

# DeviceAreas::LEAST_TOKENS and NO_TOKENS in native/src/device/areas.h
LEAST_PROMPT, NO_PROMPT = 32, 2**31 - 1

NO_TENSOR = "^$"  # a rule of llama.cpp's that no tensor's name meets

# Of an expert that a device lacks: its upload is waited for, and the processor computes it while the device computes
# others. So with uploads it has to be so many times as fast.
_CLEARLY_SOONER = 1.5

# Beside dense weights and a KV cache: what all layers certainly fit with.
_ROOM_TO_SPARE = 1536 * MiB


def margin_bytes(total_bytes: int) -> int:
    """What stays free of a device with so much memory."""
    return max(MARGIN_BYTES, round(MARGIN_SHARE * total_bytes))


def choose(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, context: llama.llama_context_params
) -> tuple[Devices | None, str]:
    """The devices that the settings name, None for none, and a note of what was decided. llama.cpp then loads the model
    there, with these parameters: unless the caller said how many layers, as many of the last ones as fit beside their
    part of this context.

    PyorchError for a device that there is not.
    """
    found, note = _named(settings, model_map)
    chosen = params.n_gpu_layers not in (0, -1)  # which llama.cpp takes for nothing said
    if not found:
        if settings.device == AUTO:
            params.n_gpu_layers = 0
        place(params, None)
        return None, note
    if settings.device == AUTO:
        found = _that_suffice(found, settings, model_map, context)
    params.n_gpu_layers = params.n_gpu_layers or -1
    if chosen:
        return _divided(found, model_map, params, context), note
    n_blocks = model_map.info.n_layers
    n = _layers_that_fit(found, model_map, params, context)
    if n <= 1 and settings.device == AUTO:
        params.n_gpu_layers = 0
        place(params, None)
        return None, (f"{_names(found)} {_has(found)} no room for a layer beside its part of the context, and "
                      f"{'is' if len(found) == 1 else 'are'} not used")
    params.n_gpu_layers = n if 0 < n <= n_blocks else -1
    devices = _divided(found, model_map, params, context)
    if 0 < n <= n_blocks:
        note += (f"{'; ' if note else ''}{_names(found)} {_has(found)} room for {n - 1} of {n_blocks} layers beside "
                 "their part of the context: the processor computes the others")
    return devices, note


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)


def _has(devices: Sequence[Device]) -> str:
    return "has" if len(devices) == 1 else "have"


def _named(settings: Settings, model_map: ModelMap) -> tuple[list[Device], str]:
    """Those that the settings name; and a note of what was chosen. "auto": the fastest first."""
    if settings.device == NONE:
        return [], ""
    found = find_devices(settings.device)
    if settings.device != AUTO or not model_map.layers:
        return found, ""
    used, notes = [], []
    for device in found:
        said = f"{device.name} ({device.description})"
        try:
            _, processor, _, there, _ = _rates(device, settings, model_map)
        except PyorchError as error:
            notes.append(f"{said} is not used: {error}")
            continue
        if there <= processor:
            notes.append(f"{said} computes experts at {there / processor:.2g} of the processor's speed, and is not "
                         f"used: --device {device.name} uses it all the same")
            continue
        used.append((there, device))
        notes.append(f"{said} computes experts {there / processor:.2g} times as fast as the processor: it is used")
    used.sort(key=lambda pair: -pair[0])
    return [device for _, device in used], "; ".join(notes)


def misses_of(settings: Settings, devices: Devices, model_map: ModelMap) -> tuple[str, str]:
    """What computes the experts that these devices lack, one of DEVICE_MISSES: what is sooner for one token, unless the
    settings say it; and a note. What another process has comes as its network allows: the processor computes."""
    if settings.device_misses is not None:
        return settings.device_misses, ""
    if devices.is_remote or settings.device_ahead or not model_map.layers:
        return PROCESSOR, ""
    gains = []
    for device in devices.each:
        try:
            upload, processor, _, there, _ = _rates(device, settings, model_map)
        except PyorchError:
            return PROCESSOR, ""
        gains.append(1 / processor / (1 / upload + 1 / there))
    if min(gains) < _CLEARLY_SOONER:
        return PROCESSOR, ""
    return UPLOAD, (f"experts that {_names(devices.each)} {_lacks(devices.each)} are uploaded and computed there, "
                    f"{min(gains):.2g} times as fast as the processor would: --device-misses processor has it do so")


def prompt_tokens_of(settings: Settings, devices: Devices, model_map: ModelMap) -> int:
    """Of a ubatch for which experts that these devices lack are brought there rather than computed by the processor, at
    least, by the same rates: what is uploaded and what is computed of other layers go on at once. The least that there
    is for devices of other processes; NO_PROMPT where it is no ubatch."""
    if devices.is_remote or not model_map.layers:
        return LEAST_PROMPT
    try:
        rates = [_rates(device, settings, model_map) for device in devices.each]
    except PyorchError:
        return LEAST_PROMPT
    used = max(layer.n_expert_used / layer.n_expert for layer in model_map.layers)

    def is_sooner(n_tokens: int) -> bool:
        more = used * n_tokens / (1 - (1 - used) ** n_tokens) - 1 if used < 1 else n_tokens - 1  # rows of an expert
        return all(max(1 / upload, 1 / there + more / there_more) <= 1 / processor + more / processor_more
                   for upload, processor, processor_more, there, there_more in rates)

    # By quarters: the rates are not better known. Where it is not so for wide ones, it is for none.
    n, widest = LEAST_PROMPT, max(settings.n_ubatch, measure.WIDE_UBATCH)
    while n <= widest and not is_sooner(n):
        n += n // 4
    return n if n <= widest and is_sooner(widest) else NO_PROMPT


def _rates(device: Device, settings: Settings, model_map: ModelMap) -> list[float]:
    return rates_of(device, model_map, settings.n_threads or physical_cores())


def _lacks(devices: Sequence[Device]) -> str:
    return "lacks" if len(devices) == 1 else "lack"


def _left(device: Device) -> int:
    """Bytes of its memory for a model."""
    return device.free_bytes() - margin_bytes(device.total_bytes())


def _that_suffice(
    found: list[Device], settings: Settings, model_map: ModelMap, context: llama.llama_context_params
) -> list[Device]:
    """The first ones, which have room for all that is to lie on devices; else all."""
    info, budget = model_map.info, settings.vram_budget
    experts = info.expert_bytes if budget == BUDGET_AUTO else budget.amount.of(info.expert_bytes)
    needed = info.dense_bytes + experts + model_map.kv_bytes(context.n_ctx or model_map.trained_ctx)
    for n in range(1, len(found)):
        needed += _ROOM_TO_SPARE
        if sum(map(_left, found[:n])) >= needed:
            return found[:n]
    return found


def _divided(
    found: Sequence[Device], model_map: ModelMap, params: llama.llama_model_params, context: llama.llama_context_params
) -> Devices:
    """Blocks in a row for each, by bytes as its memory allows; and llama.cpp is told so. Of blocks whose dense part is
    on the processor the first device has the experts. One that would have no block with experts is left out.
    """
    info = model_map.info
    n_on = info.n_layers + 1 if params.n_gpu_layers < 0 else min(params.n_gpu_layers, info.n_layers + 1)
    first = info.n_layers + 1 - n_on
    experts = {layer.il: layer.n_expert * layer.expert_bytes for layer in model_map.layers}
    kv = model_map.kv_bytes(context.n_ctx or model_map.trained_ctx) // max(1, info.n_layers)
    sizes = [model_map.dense_bytes(il) + kv + experts.get(il, 0) for il in range(first, info.n_layers)]
    sizes.append(0 if info.slim else output_bytes(model_map))
    rooms = list(accumulate(max(1, _left(device)) for device in found)) if len(found) > 1 else [1]
    counts, before = [0] * len(found), sum(n_bytes for il, n_bytes in experts.items() if il < first)
    total = max(1, before + sum(sizes))
    for size in sizes:  # to whom its middle belongs
        counts[bisect_left(rooms, (before + size / 2) / total * rooms[-1])] += 1
        before += size
    ends = [min(first + end, info.n_layers) for end in accumulate(counts)]
    devices = Devices(tuple(found), (*ends[:-1], info.n_layers))
    idle = {device for device, n in zip(found, _lengths(devices.layer_ends(model_map))) if n == 0}
    if idle and len(found) > 1 and model_map.layers:
        return _divided([device for device in found if device not in idle] or found[:1], model_map, params, context)
    place(params, devices, counts)
    return devices


def _lengths(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in zip((0, *ends), ends)]


def _layers_that_fit(
    found: Sequence[Device], model_map: ModelMap, params: llama.llama_model_params, context: llama.llama_context_params
) -> int:
    """As llama.cpp counts them: what comes behind the blocks is the first one. Leaves params with another number."""
    info = model_map.info
    if info.slim:  # of which llama.cpp knows nothing without an engine
        return info.n_layers + 1
    left = {device: _left(device) for device in found}
    if info.dense_bytes + model_map.kv_bytes(context.n_ctx or model_map.trained_ctx) + _ROOM_TO_SPARE <= min(
            left.values()):
        return info.n_layers + 1

    def fits(n: int) -> bool:
        params.n_gpu_layers = n
        devices = _divided(found, model_map, params, context)
        room = [left[device] for device in devices.each]
        needed = [dense + measure.chain_bytes(model_map, context.n_ubatch)
                  for dense in device_dense_bytes(model_map, n, devices)]
        if any(bytes_needed >= of for bytes_needed, of in zip(needed, room)):
            return False
        sizes = measure.sizes_of(model_map, params, context, devices)
        return all(dense + rest <= of for dense, rest, of in zip(needed, sizes.devices, room))

    fitting, not_fitting = 0, info.n_layers + 1
    if fits(not_fitting):
        return not_fitting
    while not_fitting - fitting > 1:
        n = (fitting + not_fitting) // 2
        fitting, not_fitting = (n, not_fitting) if fits(n) else (fitting, n)
    return fitting


def place(
    params: llama.llama_model_params, devices: Devices | None, counts: Sequence[int] = (), pipelined: bool = False
) -> None:
    """Sets the parameters with which llama.cpp loads the model: dense layers on the devices, as many on each as counts
    says; without one, and without a choice of the caller's, everything on the processor.

    pipelined: llama.cpp may compute several ubatches of a prompt at once, on several devices. Layers that ask the host
    are one ubatch's at a time.
    """
    if devices is None and params.n_gpu_layers != 0:
        return
    each = [device.address for device in devices.each] if devices is not None else []
    device_list = (ctypes.c_void_p * (len(each) + 1))(*each, None)
    params.device_list = device_list  # which lives as long as what points to it
    params.devices = ctypes.addressof(device_list)  # type: ignore[assignment]
    if len(each) > 1:
        params.split_mode = llama.LLAMA_SPLIT_MODE_LAYER
        params.split = (ctypes.c_float * MAX_DEVICES)(*counts)
        params.tensor_split = ctypes.cast(params.split, ctypes.POINTER(ctypes.c_float))  # type: ignore[assignment]
        # Where a model has such a rule, llama.cpp pipelines nothing: this one is of no tensor.
        params.rules = (ctypes.c_char_p * 4)(NO_TENSOR.encode(), None, None, None)
        params.tensor_buft_overrides = ctypes.addressof(params.rules)  # type: ignore[assignment]


@contextlib.contextmanager
def connected(devices: Devices) -> Iterator[None]:
    """Keeps those of other processes inside: such a process serves one at a time, so who waits for it would get it
    between two models; and what goes while ggml connects ends this process."""
    # Of the ggml that llama.cpp has loaded, which llama_cpp does not declare.
    ggml = ctypes.CDLL(str(_libs.lib_dir() / f"libggml-base{_libs.SUFFIX}"))
    ggml.ggml_backend_dev_init.restype = ctypes.c_void_p
    with contextlib.ExitStack() as stack:
        for device in devices.each:
            if device.is_remote:
                backend = ggml.ggml_backend_dev_init(ctypes.c_void_p(device.address), None)
                stack.callback(ggml.ggml_backend_free, ctypes.c_void_p(backend))
        yield


def pipeline(params: llama.llama_model_params) -> None:
    """From now on llama.cpp may compute several ubatches at once: the engine has no part in it."""
    params.tensor_buft_overrides = None


def output_bytes(model_map: ModelMap) -> int:
    """Of the dense weights behind the blocks, which are on the device of the last ones."""
    info = model_map.info
    rest = info.dense_bytes - sum(model_map.dense_bytes(il) for il in range(info.n_layers))
    with contextlib.suppress(PyorchError):  # else the table of embeddings is the output's matrix, too
        if model_map.tensor_range("output.weight").size > 0:
            rest -= model_map.tensor_range("token_embd.weight").size  # which stays in host memory
    return rest


def device_dense_bytes(model_map: ModelMap, n_layers: int, devices: Devices) -> list[int]:
    """Of the dense weights, those that are on each device with so many layers in all, as llama.cpp counts them; below
    0: all."""
    if n_layers == 0:
        return [0] * len(devices.each)
    n_blocks = model_map.info.n_layers
    first = 0 if n_layers < 0 else max(0, n_blocks + 1 - n_layers)
    found = [sum(model_map.dense_bytes(il) for il in blocks if il >= first) for blocks in devices.blocks()]
    found[-1] += output_bytes(model_map)
    return found


def host_dense_bytes(model_map: ModelMap, devices: Devices | None, params: llama.llama_model_params) -> int:
    """Of the dense weights, those that are in host memory when llama.cpp loads the model with these parameters."""
    info = model_map.info
    if devices is None or 0 <= params.n_gpu_layers <= info.n_layers:
        return info.dense_bytes
    return host_bytes_beside_device(model_map)


def host_bytes_beside_device(model_map: ModelMap) -> int:
    """Of the dense weights, those that are in host memory with all layers on a device: the table of embeddings, and
    copies of the experts' biases, which both sides compute with."""
    try:
        return min(model_map.info.dense_bytes,
                   model_map.tensor_range("token_embd.weight").size + bias_bytes(model_map))
    except PyorchError:
        return model_map.info.dense_bytes


def bias_bytes(model_map: ModelMap) -> int:
    """Of the experts."""
    total = 0
    for layer in model_map.layers:
        for role in ("gate", "up", "down", "gate_up"):
            with contextlib.suppress(PyorchError):
                total += model_map.tensor_range(f"blk.{layer.il}.ffn_{role}_exps.bias").size
    return total
