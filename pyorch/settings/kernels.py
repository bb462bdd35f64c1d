"""With which kernels the processor multiplies experts, and so in which order their matrices lie in memory."""

from __future__ import annotations

# auto: plain or repacked, as costs the processor less.
# plain: as the file has them.
# repacked: rows are interleaved in groups, as for the kernels that llama.cpp uses by default.
# stock: repacked, and only llama.cpp's kernels multiply.
AUTO, PLAIN, REPACKED, STOCK = LAYOUTS = ("auto", "plain", "repacked", "stock")


def kernels(given: str) -> str:
    """One of LAYOUTS. TypeError for what is not text, ValueError for other text."""
    if not isinstance(given, str):
        raise TypeError(given)
    return LAYOUTS[LAYOUTS.index(given)]
