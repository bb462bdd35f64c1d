"""Ghosts: estimates of absent experts' outputs, in the sidecar model.ghosts.gguf.

`pyorch ghosts` (pyorch.convert.ghosts) fits and writes them. This module reads and checks them, and passes them to an
engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "ghosts"
VERSION = 1


def row_bytes(n: int) -> int:
    """Returns the bytes of a row of n numbers in an engine (CompactMatrix of native/src/prediction).

    Each number has 8 bits, and 32 numbers share a scale of 16 bits. A row that is no whole blocks has 16 bits a number.
    """
    return n // 32 * 34 if n % 32 == 0 else 2 * n


@dataclass(frozen=True)
class LayerGhosts:
    """The ghosts of one layer: for the router's input x, an expert's output is about mean + up^T (down x).

    down and up contain the rows of expert 0, then those of expert 1, and so on. They stay in the file's float16; an
    engine makes its own copy.
    """

    rank: np.ndarray  # int32[n_expert], -1: the expert has no ghost
    mean: np.ndarray  # float32 or float16[n_expert, n_out], as are down and up
    down: np.ndarray  # [sum of the ranks, n_in]
    up: np.ndarray  # [sum of the ranks, n_out]
    error: np.ndarray  # float32[n_expert], mean square of the ghost's error on inputs outside of the fit, as a share of
    #                    the layer's mean squared output, for an expert with the whole weight of a token
    energy: np.ndarray  # float32[n_expert], mean square of the expert's output, relative to the same


@dataclass(frozen=True)
class Ghosts:
    """The ghosts of a model, by the il of its layers with routed experts. n_inputs: the inputs of the fit.

    sacred: they were fitted not to replace this many of a token's heaviest experts.
    """

    layers: dict[int, LayerGhosts]
    n_inputs: int
    sacred: int

    @property
    def n_bytes(self) -> int:
        """Bytes of memory in an engine."""
        return sum(len(part) * row_bytes(part.shape[1]) for layer in self.layers.values()
                   for part in (layer.mean, layer.down, layer.up))

    def apply(self, engine: Engine, il: int) -> None:
        """Passes the ghosts of a layer to an engine, which uses them if a substitution says so.

        Raises:
            PyorchError: They do not fit the engine's layer.
        """
        layer = self.layers[il]
        engine.set_ghosts(il, layer.rank, layer.mean, layer.down, layer.up)

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, completely or not at all.

        Raises:
            PyorchError: It cannot be written.
        """
        arrays = {}
        for il, layer in self.layers.items():
            for name, dtype in _ARRAYS.items():
                values = getattr(layer, name)
                if values.size:
                    limit = np.finfo(dtype).max if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max
                    arrays[f"blk.{il}.{name}"] = np.clip(values, -limit, limit).astype(dtype)
        metadata = {"layers": list(self.layers), "n_inputs": self.n_inputs, "sacred": self.sacred}
        container.write(path, KIND, VERSION, model_map, metadata, arrays)

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_map: ModelMap) -> Ghosts:
        """Reads and checks a sidecar.

        Raises:
            FormatError: It is damaged, or cannot belong to this model.
        """
        file = container.Sidecar(path, KIND, VERSION, model_map)
        file.check_layers(model_map.layers)
        fitted = [file.metadata.get(name) for name in ("n_inputs", "sacred")]
        file.check(all(isinstance(n, int) for n in fitted), "it does not say what its ghosts were fitted on")
        return cls({layer.il: _layer(file, layer.il, layer.n_expert) for layer in model_map.layers}, *fitted)


_ARRAYS: dict[str, Any] = {"rank": np.int32, "mean": np.float16, "down": np.float16, "up": np.float16,
                           "error": np.float32, "energy": np.float32}


def _layer(file: container.Sidecar, il: int, n_expert: int) -> LayerGhosts:
    rank = file.of_layer(il, "rank", np.int32, n_expert)
    file.check((rank >= -1).all(), f"layer {il} has no ranks of {n_expert} ghosts")
    n_rows = int(np.maximum(rank, 0).sum(dtype=np.int64))
    mean = file.of_layer(il, "mean", np.float16, n_expert, None)
    n_out = mean.shape[1]
    down = up = np.zeros((0, n_out), np.float16)  # a file holds no empty arrays
    if n_rows:
        down = file.of_layer(il, "down", np.float16, n_rows, None)
        up = file.of_layer(il, "up", np.float16, n_rows, n_out)
    error, energy = (file.of_layer(il, name, np.float32, n_expert) for name in ("error", "energy"))
    file.check((error >= 0).all() and (energy >= 0).all(), f"the errors of layer {il} are not all 0 or more")
    return LayerGhosts(np.array(rank), mean, down, up, np.array(error), np.array(energy))
