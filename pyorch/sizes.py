"""Numbers of bytes and of things, as people write and read them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1 << 10 * _power, f"{_letter}IB": 1 << 10 * _power, f"{_letter}B": 1000**_power}

_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*|%)\s*", re.IGNORECASE)


def format_bytes(n: float, round_up: bool = False) -> str:
    """Returns a size for people, such as 214 MiB; rounded up if the number must suffice."""
    unit, name = next(((u, s) for u, s in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if n >= 10 * u), (1, "bytes"))
    if unit == 1 or name == "KiB":
        unit, name = (KiB, "KiB") if n >= KiB else (1, "bytes")
    scale = 10 if unit == GiB else 1
    value = (math.ceil if round_up else round)(n * scale / unit) / scale
    if unit == 1:
        return counted(int(value), "byte")
    return f"{value:.1f} {name}" if scale > 1 else f"{value:.0f} {name}"


def counted(n: int, noun: str) -> str:
    """Returns a number with its noun: 1 request, 2 requests."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def as_option(n: int) -> str:
    """Returns a size of at least n bytes in the form of options: 214MiB."""
    return format_bytes(n, round_up=True).replace(" ", "").removesuffix("bytes").removesuffix("byte")


@dataclass(frozen=True)
class Amount:
    """A number of bytes, or a share of an unknown whole; one of them is None. The share 0.4 is 40 %.

    text: the original text.
    """

    n_bytes: int | None = None
    share: float | None = None
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: Any) -> Amount:
        """Parses a number of bytes, a size such as "1.5GiB", "800MB" or "4096", or a share such as "40%".

        Raises:
            ValueError: The text is neither a size nor a share.
        """
        if isinstance(text, Integral) and not isinstance(text, bool):
            return cls(int(text))
        match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} is not a number with a unit")
        number, unit = match.groups()
        if unit == "%":
            if not math.isfinite(float(number)):
                raise ValueError(f"{text} is too large a number")
            return cls(share=float(number) / 100, text=text.strip())
        factor = _UNITS.get(unit.upper())
        # A bare 0.4 could be a share or bytes, so it is refused.
        if factor is None or (unit == "" and "." in number):
            raise ValueError(f"{text!r} is neither a size nor a share")
        n_bytes = float(number) * factor
        if not math.isfinite(n_bytes):
            raise ValueError(f"{text} is too large a number")
        return cls(round(n_bytes), text=text.strip())

    def of(self, whole: int) -> int:
        """Returns the bytes of this amount, if the whole has this size."""
        return self.n_bytes if self.n_bytes is not None else math.ceil(self.share * whole)

    def __str__(self) -> str:
        """Returns text that parse() reads."""
        if self.text:
            return self.text
        return str(self.n_bytes) if self.n_bytes is not None else f"{self.share * 100:.12g}%"
