"""Options of devices: their names, their memory for experts, and experts that they lack."""

from __future__ import annotations

import re

from pyorch.errors import BudgetError, PyorchError
from pyorch.settings.budget import RESIDENT, Budget

NONE = "none"  # no device
AUTO = "auto"  # the GPUs with their own memory that compute experts faster than the processor
REMOTE = "rpc:"  # prefix of HOST:PORT, a device of another process

# Who computes an expert that the device lacks: the processor from host memory, while valuable experts are uploaded;
# or the device, after an upload. In the order of pyorch_device_misses.
PROCESSOR, UPLOAD = DEVICE_MISSES = ("processor", "upload")

MAX_AHEAD = 64  # predicted experts of a layer that are uploaded ahead
MAX_DEVICES = 16  # PYORCH_MAX_DEVICES


def device_misses(given: str) -> str:
    """Returns `given` if it is one of DEVICE_MISSES."""
    if not isinstance(given, str):
        raise TypeError(given)
    return DEVICE_MISSES[DEVICE_MISSES.index(given)]


def device_name(given: str) -> str:
    """Returns the names of devices with commas between them: "none", "auto", "rpc:HOST:PORT" or devices of ggml.

    Loading a model checks that the devices exist.

    Raises:
        PyorchError: The names contradict each other, or one of them is malformed.
        ValueError: The text is no list of names.
    """
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
    """Returns the name of each device of a setting."""
    return [name.strip() for name in given.split(",")]


def vram_budget(given: int | str | Budget) -> Budget:
    """Parses a budget as Budget.parse() does, except "resident": a device never holds everything.

    Raises:
        BudgetError: The text is no such budget.
    """
    try:
        budget = Budget.parse(given)
    except BudgetError as error:
        raise BudgetError(f"--vram-{error}") from None
    if budget == RESIDENT:
        raise BudgetError("--vram-budget is a size, a share of the experts, or auto")
    return budget
