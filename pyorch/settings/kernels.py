"""With which kernels the processor multiplies experts, and so in which order their matrices lie in memory."""

from __future__ import annotations

# As the file has them, for llama.cpp's plain kernels and those of pyorch; with the rows of groups interleaved, for the
# kernels that llama.cpp uses by default, and those of pyorch; the same by llama.cpp's kernels alone. auto: plain or
# repacked, by what costs the processor less.
AUTO, PLAIN, REPACKED, STOCK = LAYOUTS = ("auto", "plain", "repacked", "stock")


def kernels(given: str) -> str:
    """One of LAYOUTS. TypeError for what is not text, ValueError for other text."""
    if not isinstance(given, str):
        raise TypeError(given)
    return LAYOUTS[LAYOUTS.index(given)]
