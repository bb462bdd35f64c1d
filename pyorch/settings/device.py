"""How experts in the memory of devices are treated."""

from __future__ import annotations

import re

from pyorch.errors import BudgetError, PyorchError
from pyorch.settings.budget import RESIDENT, Budget

NONE = "none"  # no device
AUTO = "auto"  # the GPUs with memory of their own that compute experts sooner than the processor
REMOTE = "rpc:"  # before HOST:PORT of another process that has one

# What computes an expert that the device does not have: the processor, from host memory, while the expert is uploaded
# if it is worth it; or the device, once it was uploaded. In the order of pyorch_device_misses.
PROCESSOR, UPLOAD = DEVICE_MISSES = ("processor", "upload")

MAX_AHEAD = 64  # experts of a layer that forecasts upload
MAX_DEVICES = 16  # PYORCH_MAX_DEVICES


def device_misses(given: str) -> str:
    """One of DEVICE_MISSES."""
    if not isinstance(given, str):
        raise TypeError(given)
    return DEVICE_MISSES[DEVICE_MISSES.index(given)]


def device_name(given: str) -> str:
    """Of "none", "auto", or one or several of "rpc:HOST:PORT" or a device of ggml, with commas between them. They are
    asked for when a model is loaded."""
    if not isinstance(given, str) or not (given.isascii() and given.isprintable()):
        raise ValueError(given)
    names = device_names(given)
    if not all(names):
        raise ValueError(given)
    if len(names) > 1 and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise PyorchError(f'device "{given}" names {twice} twice')
    if len(names) > 1 and (other := next((name for name in names if name in (NONE, AUTO)), None)):
        raise PyorchError(f'device "{given}" names others beside {other}, which stands alone')
    if len(names) > MAX_DEVICES:
        raise PyorchError(f'device "{given}" is more than {MAX_DEVICES} devices')
    for name in names:
        host, _, port = name.removeprefix(REMOTE).rpartition(":")
        if name.startswith(REMOTE) and not (
                re.fullmatch(r"[\w.-]+", host) and port.isdecimal() and 0 < int(port) < 65536):
            raise PyorchError(f'device "{name}" is not understood: of another process it is rpc:HOST:PORT, such as '
                              "rpc:127.0.0.1:50052")
    return ",".join(names)


def device_names(given: str) -> list[str]:
    """Of each device of a setting."""
    return [name.strip() for name in given.split(",")]


def vram_budget(given: int | str | Budget) -> Budget:
    """As Budget.parse, but the memory of a device never is all that the model needs. BudgetError for anything else."""
    try:
        budget = Budget.parse(given)
    except BudgetError as error:
        raise BudgetError(f"--vram-{error}") from None
    if budget == RESIDENT:
        raise BudgetError("--vram-budget is a size, a share of the experts, or auto")
    return budget
