"""The kernels that multiply experts, which need the matrices in a certain order in memory."""

from __future__ import annotations

# auto: plain or repacked, the one with less processor time.
# plain: the order of the file.
# repacked: rows interleaved in groups, as llama.cpp's default kernels need them.
# stock: repacked, with llama.cpp's kernels only.
AUTO, PLAIN, REPACKED, STOCK = LAYOUTS = ("auto", "plain", "repacked", "stock")


def kernels(given: str) -> str:
    """Returns `given` if it is one of LAYOUTS.

    Raises:
        TypeError: `given` is not text.
        ValueError: The text is not one of LAYOUTS.
    """
    if not isinstance(given, str):
        raise TypeError(given)
    return LAYOUTS[LAYOUTS.index(given)]
