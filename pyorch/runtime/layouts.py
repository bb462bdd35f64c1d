"""Measures how fast this processor multiplies experts, by the order of their matrices, and how fast it repacks them."""

from __future__ import annotations

import math

from pyorch.library.bindings import check, ffi, lib, string
from pyorch.runtime import kept
from pyorch.runtime.model_map import ModelMap

_DIGITS = 3  # significant digits of a stored rate


def layout_rates(model_map: ModelMap, il: int, role: int) -> list[float]:
    """Returns the stored rates of a matrix, or measures and stores them.

    Returns:
        Nanoseconds of a core per byte, the fields of pyorch_layout_rates in order, and last n_inputs.

    Raises:
        PyorchError: The matrix is never repacked.
    """
    layer = next(layer for layer in model_map.layers if layer.il == il)
    matrix = layer.roles[role]
    name = kept.name_of("layouts", [string(lib.pyorch_version()), kept.processor(), matrix.type, matrix.n_in,
                                    matrix.layout, layer.expert_bytes])
    rates = kept.read(name)
    if (not isinstance(rates, list) or len(rates) != 6
            or not all(type(rate) is float and 0 < rate < math.inf for rate in rates)):
        of = ffi.new("pyorch_layout_rates *")
        check(lib.pyorch_measure_layouts(model_map.handle, il, role, of))
        measured = (of.repacking, *of.plain, *of.repacked, of.n_inputs)
        rates = [float(f"{rate:.{_DIGITS}g}") for rate in measured]
        kept.keep(name, rates)
    return rates
