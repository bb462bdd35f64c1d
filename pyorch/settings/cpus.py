"""Which processors compute."""

from __future__ import annotations

ANY, AUTO = "any", "auto"

MAX_CPUS = 1024  # CPU_SETSIZE


def cpu_numbers(listed: str) -> list[int]:
    """Of "0-3,8", as the kernel writes it, too. ValueError for anything else."""
    numbers: set[int] = set()
    for part in listed.split(","):
        first, dash, last = part.partition("-")
        end = int(last if dash else first)
        if not 0 <= int(first) <= end < MAX_CPUS:
            raise ValueError(listed)
        numbers.update(range(int(first), end + 1))
    return sorted(numbers)


def cpu_list(given: str) -> str:
    """any, auto, or such a list. ValueError for other text, TypeError for anything that is not text."""
    if not isinstance(given, str):
        raise TypeError(given)
    if given not in (ANY, AUTO):
        cpu_numbers(given)
    return given
