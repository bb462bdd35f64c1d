"""Ghosts: what estimates the output of an absent expert, in the sidecar model.ghosts.gguf.

`pyorch ghosts` fits them (pyorch.convert.ghosts) and writes the file; here they are read, checked and given to an
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
    """Of so many numbers in an engine (CompactMatrix of native/src/prediction): 8 bits each, and a scale of 16 bits for
    32 of them; 16 bits where they are no whole blocks."""
    return n // 32 * 34 if n % 32 == 0 else 2 * n


@dataclass(frozen=True)
class LayerGhosts:
    """The ghosts of one layer: of the router's input x, an expert gives about mean + up^T (down x), of its own rows.

    Rows of down and up are those of expert 0, then those of expert 1, and so on. Those of a file stay as it has them,
    in float16: an engine makes a copy of its own.
    """

    rank: np.ndarray  # int32[n_expert], -1: the expert has no ghost
    mean: np.ndarray  # float32 or float16[n_expert, n_out], as are down and up
    down: np.ndarray  # [sum of the ranks, n_in]
    up: np.ndarray  # [sum of the ranks, n_out]
    error: np.ndarray  # float32[n_expert], the mean square of what the ghost misses, on inputs that it was not fitted
    #                    on, as a share of the layer's mean squared output; of an expert that has the whole weight of
    #                    a token
    energy: np.ndarray  # float32[n_expert], the mean square of the expert's output, likewise


@dataclass(frozen=True)
class Ghosts:
    """The ghosts of a model: its layers with routed experts, by their il. n_inputs: that they were fitted on.

    sacred: so many of a token's experts, those of the highest weight, they were not fitted to stand for.
    """

    layers: dict[int, LayerGhosts]
    n_inputs: int
    sacred: int

    @property
    def n_bytes(self) -> int:
        """Of memory, in an engine."""
        return sum(len(part) * row_bytes(part.shape[1]) for layer in self.layers.values()
                   for part in (layer.mean, layer.down, layer.up))

    def apply(self, engine: Engine, il: int) -> None:
        """Gives those of a layer to an engine, which uses them where a substitution says so. PyorchError for
        others'."""
        layer = self.layers[il]
        engine.set_ghosts(il, layer.rank, layer.mean, layer.down, layer.up)

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, whole or not at all. Raises PyorchError if it cannot be written."""
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
        """Reads and checks a sidecar. Raises FormatError, also for ghosts that cannot be this model's."""
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
