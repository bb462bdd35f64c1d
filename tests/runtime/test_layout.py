"""The order in which kernels want a matrix: named by the map, made in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap


def test_a_matrix_is_repacked_as_the_same_bytes_in_groups_of_rows(small_moe_q4: Path) -> None:
    with ModelMap(small_moe_q4) as model_map:
        layer = model_map.layers[0]
        if layer.roles[0].layout == "plain":
            pytest.skip("this processor has no such kernels for Q4_0")
        assert layer.roles[0].layout.startswith("q4_0-repacked-")
        place = model_map.expert_range(layer.il, 3, 0)
        matrix = bytearray(small_moe_q4.read_bytes()[place.offset:place.offset + place.size])
        repacked = bytearray(matrix)
        model_map.repack(layer.il, 0, repacked)
        assert repacked != matrix
        # A group of rows begins with the scales of their first blocks, 2 bytes each; how many rows, the processor
        # decides.
        row_bytes = place.size // _n_out(model_map, layer.il)
        scales = b"".join(bytes(matrix[row * row_bytes:row * row_bytes + 2]) for row in range(16))
        assert any(repacked.startswith(scales[:2 * n_rows]) for n_rows in (4, 8, 16))
        with pytest.raises(PyorchError, match=f"has {place.size} bytes, not {place.size - 1}"):
            model_map.repack(layer.il, 0, repacked[:-1])


def test_a_matrix_that_has_no_other_layout_is_refused(small_moe_f32: Path) -> None:
    with ModelMap(small_moe_f32) as model_map:
        layer = model_map.layers[0]
        assert {role.layout for role in layer.roles} == {"plain"}
        with pytest.raises(PyorchError, match="plain: there is nothing to repack"):
            model_map.repack(layer.il, 0, bytearray(model_map.expert_range(layer.il, 0, 0).size))


def _n_out(model_map: ModelMap, il: int) -> int:
    """Rows of an up or gate matrix: the width of an expert."""
    return model_map.hparam("expert_feed_forward_length")
