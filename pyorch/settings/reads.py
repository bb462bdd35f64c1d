"""The option --reads: the reader of experts, its number of requests at once, and their size."""

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
    """How experts are read.

    Attributes:
        reader: One of READERS. "auto" takes io_uring if the kernel allows it, else threads.
        depth: Requests in flight. 0: the depth that was measured for the disk.
        request_bytes: The largest request. 0: a size that suits the depth, as measured for the disk.
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
        """Parses a reader with optional depth and size: "io_uring", "io_uring:8", "threads:2:4MiB"."""
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
            if values and values[0] == 0:  # a measured depth is left out
                raise cls._wrong_depth(0)
            return cls(reader, *values)
        except ValueError:
            raise PyorchError(f'reads "{text}" is not READER, or READER:DEPTH:SIZE such as io_uring:8:512KiB') from None

    @staticmethod
    def _wrong_depth(depth: int) -> PyorchError:
        return PyorchError(f"reads have a depth of {depth}, which must be from 1 to {MAX_DEPTH}")

    def __str__(self) -> str:
        """Returns the shortest text that parse() reads."""
        if self.request_bytes:
            return f"{self.reader}:{self.depth}:{self.request_bytes}"
        return f"{self.reader}:{self.depth}" if self.depth else self.reader


def _size(text: str) -> int:
    amount = Amount.parse(text)
    if amount.n_bytes is None:
        raise ValueError(text)
    return amount.n_bytes
