"""A model on devices: its sizes there from the file, and llama.cpp's parameters to place it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import llama_cpp.llama_cpp as llama

from pyorch import _libs
from pyorch.errors import PyorchError
from pyorch.llama.device_placement import Placement
from pyorch.llama.facts import Header
from pyorch.runtime.devices import Devices
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.device_options import MAX_DEVICES

NO_TENSOR = "^$"  # a rule of llama.cpp that matches no tensor's name


def devices_of(placement: Placement) -> Devices | None:
    """Returns the devices of a placement, or None for the processor alone."""
    return Devices(placement.each, placement.ends) if placement.each else None


def set_placement(params: llama.llama_model_params, placement: Placement) -> None:
    """Sets the parameters with which llama.cpp loads the model.

    Without a device, and without a choice of the caller, the processor computes everything.
    """
    params.n_gpu_layers = placement.n_layers
    if not placement.each and placement.n_layers != 0:
        return
    each = [device.address for device in placement.each]
    device_list = (ctypes.c_void_p * (len(each) + 1))(*each, None)
    params.device_list = device_list  # keeps it alive as long as the pointer
    params.devices = ctypes.addressof(device_list)  # type: ignore[assignment]
    if len(each) > 1:
        params.split_mode = llama.LLAMA_SPLIT_MODE_LAYER
        params.split = (ctypes.c_float * MAX_DEVICES)(*placement.counts)
        params.tensor_split = ctypes.cast(params.split, ctypes.POINTER(ctypes.c_float))  # type: ignore[assignment]
    if len(each) > 1 and not placement.pipelined:
        # llama.cpp does not pipeline a model that has such a rule. This one matches no tensor.
        params.rules = (ctypes.c_char_p * 4)(NO_TENSOR.encode(), None, None, None)
        params.tensor_buft_overrides = ctypes.addressof(params.rules)  # type: ignore[assignment]


@contextlib.contextmanager
def connected(devices: Devices) -> Iterator[None]:
    """Keeps the devices of other processes connected in the `with` block.

    Such a process serves one client at a time. Without a connection, a waiting client would get it between two models,
    and if it ended while ggml connects, this process would end.
    """
    # The ggml that llama.cpp loaded, whose functions llama_cpp does not declare.
    ggml = ctypes.CDLL(str(_libs.lib_dir() / f"libggml-base{_libs.SUFFIX}"))
    ggml.ggml_backend_dev_init.restype = ctypes.c_void_p
    with contextlib.ExitStack() as stack:
        for device in devices.each:
            if device.is_remote:
                backend = ggml.ggml_backend_dev_init(ctypes.c_void_p(device.address), None)
                stack.callback(ggml.ggml_backend_free, ctypes.c_void_p(backend))
        yield


def header_of(model_map: ModelMap) -> Header:
    """Reads the header of a model's file for decisions."""
    info, state_bytes = model_map.info, model_map.kv_bytes(0)
    return Header(
        info, model_map.layers, tuple(model_map.dense_bytes(il) for il in range(info.n_layers)),
        output_bytes(model_map), host_bytes_beside_device(model_map), model_map.kv_bytes(1) - state_bytes, state_bytes,
        model_map.trained_ctx, model_map.path, model_map,
    )


def output_bytes(model_map: ModelMap) -> int:
    """Returns the bytes of dense weights behind the blocks, which are on the device of the last block."""
    info = model_map.info
    rest = info.dense_bytes - sum(model_map.dense_bytes(il) for il in range(info.n_layers))
    with contextlib.suppress(PyorchError):  # otherwise the table of embeddings is the output's matrix too
        if model_map.tensor_range("output.weight").size > 0:
            rest -= model_map.tensor_range("token_embd.weight").size  # stays in host memory
    return rest


def host_bytes_beside_device(model_map: ModelMap) -> int:
    """Returns the bytes of dense weights in host memory if all layers are on a device.

    These are the table of embeddings, and copies of the experts' biases, which both sides compute with.
    """
    try:
        return min(model_map.info.dense_bytes,
                   model_map.tensor_range("token_embd.weight").size + bias_bytes(model_map))
    except PyorchError:
        return model_map.info.dense_bytes


def bias_bytes(model_map: ModelMap) -> int:
    """Returns the bytes of the experts' biases."""
    total = 0
    for layer in model_map.layers:
        for role in ("gate", "up", "down", "gate_up"):
            with contextlib.suppress(PyorchError):
                total += model_map.tensor_range(f"blk.{layer.il}.ffn_{role}_exps.bias").size
    return total
