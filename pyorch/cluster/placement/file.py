"""Placements as files: JSON with the model that they are for.

Beside the fields of every JSON file of pyorch (kind, version, model, fingerprint) a placement has

    "algorithm": "dance", "layers": [0, 1, ...], "n_experts": [64, 64, ...],
    "servers": [{"name": "clinic", "experts": [[[3, 17, ...]], ...]}, ...]

layers: block numbers; n_experts: of each. experts: for each layer, and for each device of the server, the experts that
it holds.
"""

from __future__ import annotations

import os

from pyorch.cluster.placement.placement import Placement
from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import json_file

KIND = "pyorch placement"
VERSION = 1


def write_placement(path: str | os.PathLike[str], placement: Placement, model_map: ModelMap) -> None:
    """Writes it, whole or not at all. PyorchError where it cannot."""
    json_file.write(path, KIND, VERSION, model_map, placement.to_fields())


def read_placement(path: str | os.PathLike[str], model_map: ModelMap) -> Placement:
    """Raises FormatError: no such file, no placement, of another version or model, or damaged."""
    value = json_file.read(path, KIND, VERSION, model_map, command="place")
    layers = model_map.decoded_layers
    expected = [layer.il for layer in layers], [layer.n_expert for layer in layers]
    try:
        if (value.get("layers"), value.get("n_experts")) != expected:  # before memory is taken for so many
            raise ValueError("other layers")
        placement = Placement.from_fields(value)
    except ValueError:
        raise FormatError(f"{path} is damaged: place again") from None
    return placement
