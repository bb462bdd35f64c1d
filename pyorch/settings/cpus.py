"""The processors that compute."""

from __future__ import annotations

ANY, AUTO = "any", "auto"

MAX_CPUS = 1024  # CPU_SETSIZE


def cpu_numbers(listed: str) -> list[int]:
    """Returns the numbers of a list such as "0-3,8", the form that Linux uses.

    Raises:
        ValueError: The text is no such list.
    """
    numbers: set[int] = set()
    for part in listed.split(","):
        first, dash, last = part.partition("-")
        end = int(last if dash else first)
        if not 0 <= int(first) <= end < MAX_CPUS:
            raise ValueError(listed)
        numbers.update(range(int(first), end + 1))
    return sorted(numbers)


def cpu_list(given: str) -> str:
    """Returns `given` if it is "any", "auto" or a list of processors.

    Raises:
        ValueError: The text is not valid.
        TypeError: `given` is not text.
    """
    if not isinstance(given, str):
        raise TypeError(given)
    if given not in (ANY, AUTO):
        cpu_numbers(given)
    return given
