"""How experts in the memory of a device are treated."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.errors import BudgetError, PyorchError
from pyorch.settings.budget import RESIDENT, Budget
from pyorch.sizes import Amount

NONE = "none"  # no device
REMOTE = "rpc:"  # before HOST:PORT of another process that has one

# What computes an expert that the device does not have: the processor, from host memory, while the expert is uploaded
# if it is worth it; or the device, once it was uploaded; or whichever is estimated to be faster. In the order of
# pyorch_device_misses.
PROCESSOR, UPLOAD, AUTO = DEVICE_MISSES = ("processor", "upload", "auto")

MAX_AHEAD = 64  # experts of a layer that forecasts upload

_N_RATES = 5


@dataclass(frozen=True)
class DeviceMisses:
    """who: one of DEVICE_MISSES.

    rates: what auto estimates by, bytes of weights a second: of uploads, of the processor for the first row of an
    expert and for each further one, and the same of the device (pyorch_measure_device); (): they are measured.
    """

    who: str = PROCESSOR
    rates: tuple[float, ...] = ()

    @classmethod
    def parse(cls, given: str | DeviceMisses) -> DeviceMisses:
        """From "processor", "upload", "auto", or "auto:12GB/s:20GB/s:90GB/s:300GB/s:2TB/s"."""
        if isinstance(given, DeviceMisses):
            return given
        if not isinstance(given, str):
            raise TypeError(given)
        who, *rates = given.split(":")
        if who not in DEVICE_MISSES or (rates and (who != AUTO or len(rates) != _N_RATES)):
            raise ValueError(given)
        return cls(who, tuple(_rate(rate) for rate in rates))

    def __str__(self) -> str:
        """What parse() reads."""
        return ":".join([self.who, *(f"{rate / 1e9:g}GB/s" for rate in self.rates)])


def _rate(text: str) -> float:
    rate = Amount.parse(text.strip().removesuffix("/s")).n_bytes
    if not rate or rate <= 0:
        raise ValueError(text)
    return float(rate)


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
