"""How experts are read: by whom, with how many requests at once, and of which size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.sizes import Amount, GiB, KiB

READERS = ("auto", "io_uring", "threads")  # in the order of the library's pyorch_reader
MAX_DEPTH = 512

_SMALLEST, _LARGEST = 4 * KiB, 1 * GiB


@dataclass(frozen=True)
class Reads:
    """reader: one of READERS; auto: io_uring where the kernel has and allows it, else threads.

    depth: requests under way at once. request_bytes: of one at most; 0: what suits the depth, and of both as the disk
    was measured to need.
    """

    reader: str = "auto"
    depth: int = 0
    request_bytes: int = 0

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise PyorchError(f'the reader "{self.reader}" is not one of {", ".join(READERS)}')
        if not (1 if self.request_bytes else 0) <= self.depth <= MAX_DEPTH:
            raise self._wrong_depth(self.depth)
        if self.request_bytes and not _SMALLEST <= self.request_bytes <= _LARGEST:
            raise PyorchError(f"a request has {self.request_bytes} bytes, which must be from 4KiB to 1GiB")

    @classmethod
    def parse(cls, text: str | Reads) -> Reads:
        """From the name of a reader with, optionally, depth and size: "io_uring", "io_uring:8", "threads:2:4MiB"."""
        if isinstance(text, Reads):
            return text
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
        reader, *numbers = text.split(":")
        try:
            if len(numbers) > 2:
                raise ValueError(text)
            kinds: tuple[Callable[[str], int], ...] = (int, _size)
            values = [kind(number) for kind, number in zip(kinds, numbers)]
            if values and values[0] == 0:  # what is measured is left out
                raise cls._wrong_depth(0)
            return cls(reader, *values)
        except ValueError:
            raise PyorchError(f'reads "{text}" is not READER, or READER:DEPTH:SIZE such as io_uring:8:512KiB') from None

    @staticmethod
    def _wrong_depth(depth: int) -> PyorchError:
        return PyorchError(f"reads have a depth of {depth}, which must be from 1 to {MAX_DEPTH}")

    def __str__(self) -> str:
        """What parse() reads, as short as may be."""
        if self.request_bytes:
            return f"{self.reader}:{self.depth}:{self.request_bytes}"
        return f"{self.reader}:{self.depth}" if self.depth else self.reader


def _size(text: str) -> int:
    amount = Amount.parse(text)
    if amount.n_bytes is None:
        raise ValueError(text)
    return amount.n_bytes
