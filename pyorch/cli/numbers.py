"""Types of options that are numbers, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """Whole numbers from the least to the most."""
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            bounds = f"of {least} or more" if most == float("inf") else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f'"{text}" is not a whole number {bounds}')
        return number

    return read


def number(
    least: float = float("-inf"), most: float = float("inf"), above: float = float("-inf")
) -> Callable[[str], float]:
    """Numbers from the least to the most, and above a bound."""
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (least <= value <= most and value > above):
            bounds = [f"above {above:g}"] * (above > float("-inf"))
            bounds += [f"of {least:g} or more"] * (least > float("-inf"))
            bounds += [f"of at most {most:g}"] * (most < float("inf"))
            raise argparse.ArgumentTypeError(f'"{text}" is not a number {" and ".join(bounds)}'.rstrip())
        return value

    return read
