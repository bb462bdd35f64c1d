"""Types of options that are numbers, for argparse."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from pyorch.sizes import Amount


def whole(least: float = float("-inf"), most: float = float("inf")) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to `most`."""
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            bounds = f" from {least} to {most}" if most < float("inf") else f" of {least} or more"
            bounds = "" if least == float("-inf") else bounds
            raise argparse.ArgumentTypeError(f'"{text}" is not a whole number{bounds}')
        return number

    return read


def share(text: str) -> float:
    """Parses a share above 0 and at most 1, such as 0.95 or 95%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a share above 0 and at most 1, such as 0.5 or 50%')
    return value


def size(text: str) -> int:
    """Parses a size such as 16GiB to bytes."""
    try:
        n_bytes = Amount.parse(text).n_bytes or 0
    except ValueError:
        n_bytes = 0
    if n_bytes <= 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not understood: use a size such as 16GiB')
    return n_bytes


def rate(text: str) -> float:
    """Parses bytes a second, a size with or without "/s"."""
    try:
        return float(size(re.sub(r"/s$", "", text.strip(), flags=re.IGNORECASE)))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not understood: use bytes a second such as 1GB/s or 800MiB/s') from None


def number(
    least: float = float("-inf"), most: float = float("inf"), above: float = float("-inf")
) -> Callable[[str], float]:
    """Returns a parser of numbers from `least` to `most` and above `above`."""
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isinf(value) and "inf" not in text.lower():  # too many digits for a float
            value = math.nan
        if not (least <= value <= most and value > above):
            bounds = [f"above {above:g}"] * (above > float("-inf"))
            bounds += [f"of {least:g} or more"] * (least > float("-inf"))
            bounds += [f"of at most {most:g}"] * (most < float("inf"))
            raise argparse.ArgumentTypeError(f'"{text}" is not a number {" and ".join(bounds)}'.rstrip())
        return value

    return read
