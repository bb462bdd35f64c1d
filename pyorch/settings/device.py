"""How experts in the memory of a device are treated."""

from __future__ import annotations

from pyorch.errors import BudgetError, PyorchError
from pyorch.settings.budget import RESIDENT, Budget

NONE = "none"  # no device
AUTO = "auto"  # a GPU with memory of its own, if it computes experts sooner than the processor
REMOTE = "rpc:"  # before HOST:PORT of another process that has one

# What computes an expert that the device does not have: the processor, from host memory, while the expert is uploaded
# if it is worth it; or the device, once it was uploaded. In the order of pyorch_device_misses.
PROCESSOR, UPLOAD = DEVICE_MISSES = ("processor", "upload")

MAX_AHEAD = 64  # experts of a layer that forecasts upload


def device_misses(given: str) -> str:
    """One of DEVICE_MISSES."""
    if not isinstance(given, str):
        raise TypeError(given)
    return DEVICE_MISSES[DEVICE_MISSES.index(given)]


def device_name(given: str) -> str:
    """Of "none", "auto", "rpc:HOST:PORT" or a device of ggml, which is asked for when a model is loaded."""
    if not isinstance(given, str) or not given.strip() or not (given.isascii() and given.isprintable()):
        raise ValueError(given)
    if "," in given:
        raise PyorchError(f'device "{given}" is more than one: experts lie in the memory of one device')
    host, _, port = given.removeprefix(REMOTE).rpartition(":")
    if given.startswith(REMOTE) and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise PyorchError(f'device "{given}" is not understood: of another process it is rpc:HOST:PORT, such as '
                          "rpc:127.0.0.1:50052")
    return given


def vram_budget(given: int | str | Budget) -> Budget:
    """As Budget.parse, but the memory of a device never is all that the model needs. BudgetError for anything else."""
    try:
        budget = Budget.parse(given)
    except BudgetError as error:
        raise BudgetError(f"--vram-{error}") from None
    if budget == RESIDENT:
        raise BudgetError("--vram-budget is a size, a share of the experts, or auto")
    return budget
