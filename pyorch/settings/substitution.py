"""Buddy substitution: whether a resident expert may stand in for an absent one, and which (BuddyMoE).

Lossy, so it is off unless asked for. Here are the settings; the gates and the choice are in
native/src/routing/substitution.cpp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyorch.errors import PyorchError
from pyorch.library import choices


@dataclass(frozen=True)
class Percentile:
    """A threshold that is a percentile, 0 to 100, of a layer's distribution in the trace."""

    percent: float

    def __str__(self) -> str:
        return f"p{self.percent:g}"


@dataclass(frozen=True)
class Substitution:
    """How absent experts are treated; equations are those of the BuddyMoE paper. None: the gate is off.

    An expert is absent when it is not resident as its layer is routed; only resident experts that the
    token does not use already stand in, and what nobody covers is fetched, or dropped.
    """

    mode: str = "buddies"  # "random": any resident expert, the baseline; "none": only `miss` counts
    alpha: float | None = None  # cumulative frequency threshold of the lists (eq. 5); default: the sidecar's
    k: int | None = None  # longest list
    rho: int | None = None  # most substitutions of a token in a layer
    tau: float | Percentile | None = None  # none where the token activating entropy (eq. 1) is at most this
    temperature: float = 1.0  # of the probabilities in it
    gamma: float | Percentile | None = None  # none where the two largest probabilities differ by at least this
    beta: float | None = None  # none where at least this share of the requested experts is absent (eq. 2)
    read_ms: float | None = None  # beta adapts instead, so that a token spends at most this on reading
    rank: int | None = None  # search rank H of algorithm 1
    eta: float = 0.0  # of the router's normalized logit in the priority (eq. 3)
    kappa: float = 0.0  # of the hops in the priority (eq. 3)
    reuse: float = 1.0  # factor in the priority for each time a buddy was chosen in the ubatch
    weight: str = "keep"  # of a substitute: the replaced expert's; its "own"; or the replaced one's "fitted" to its output
    order: str = "rank"  # of a token's absent experts: by the router's "rank", or the lowest "weight" first
    miss: str = "fetch"  # what the gates allow but no buddy covers: "fetch" it or "drop" it
    prefill: bool = False  # in prompts too, not only in decoding
    seed: int = 0  # of the random baseline

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def parse(cls, text: str) -> Substitution:
        """From "alpha=0.95,k=16,rho=3,tau=p15"; "" or "default" is all defaults. PyorchError for what it cannot mean."""
        values: dict[str, Any] = {}
        for item in (text.split(",") if text not in ("", "default") else ()):
            key, equals, value = (part.strip() for part in item.partition("="))
            if key not in _PARSERS:
                raise PyorchError(f'substitution setting "{key}" is not known: use {", ".join(_PARSERS)}')
            if key in values:
                raise PyorchError(f'substitution setting "{key}" is given twice')
            if not equals and key == "prefill":
                value = "1"
            try:
                values[key] = _PARSERS[key](value)
            except ValueError:
                raise PyorchError(f'substitution setting {key}="{value}" is not {_KINDS[_PARSERS[key]]}') from None
        return cls(**values)

    def __str__(self) -> str:
        """What parse() reads, without defaults."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
        return ",".join(parts) or "default"

    @property
    def lossy(self) -> bool:
        return self.mode != "none" or self.miss == "drop"

    @property
    def needs_buddies(self) -> bool:
        return self.mode == "buddies" or isinstance(self.tau, Percentile) or isinstance(self.gamma, Percentile)


def _check(settings: Substitution) -> None:
    for name in ("mode", "weight", "order", "miss"):
        allowed = choices.substitution(name)
        if getattr(settings, name) not in allowed:
            raise PyorchError(f'substitution setting {name}="{getattr(settings, name)}" is not known: use {" or ".join(allowed)}')
    if settings.alpha is not None and not 0 < settings.alpha <= 1:
        raise PyorchError(f"substitution setting alpha={settings.alpha:g} is not above 0 and at most 1")
    for name in ("k", "rho", "rank"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise PyorchError(f"substitution setting {name}={value} is below 1: leave it out for no limit")
    if not settings.temperature > 0:
        raise PyorchError(f"substitution setting temperature={settings.temperature:g} is not above 0")
    for name in ("reuse", "read_ms", "beta", "eta", "kappa"):
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise PyorchError(f"substitution setting {name}={value:g} is negative")
    if settings.beta is not None and settings.read_ms is not None:
        raise PyorchError("substitution settings beta and read_ms exclude each other: read_ms chooses beta")
    for name in ("tau", "gamma"):
        value = getattr(settings, name)
        if isinstance(value, Percentile) and not 0 <= value.percent <= 100:
            raise PyorchError(f"substitution setting {name}={value} is not a percentile from p0 to p100")


def _number_or_percentile(text: str) -> float | Percentile:
    return Percentile(_number(text[1:])) if text.startswith("p") else _number(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


_PARSERS: dict[str, Callable[[str], Any]] = {
    "mode": str, "alpha": _number, "k": int, "rho": int, "tau": _number_or_percentile, "temperature": _number,
    "gamma": _number_or_percentile, "beta": _number, "read_ms": _number, "rank": int, "eta": _number, "kappa": _number,
    "reuse": _number, "weight": str, "order": str, "miss": str, "prefill": _flag, "seed": int,
}
_KINDS = {
    str: "a word", int: "a whole number", _number: "a number", _flag: "0 or 1",
    _number_or_percentile: "a number, or a percentile such as p15",
}

OFF = Substitution(mode="none")
