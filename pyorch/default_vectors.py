"""Default vectors: what each expert gives on average (Speculating Experts, section 3.1), for the quasi-hidden predictor.

`pyorch calibrate` measures them and writes the sidecar model.predictor.gguf, which is used wherever the model is
loaded with that predictor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from pyorch import sidecar
from pyorch.engine import Engine
from pyorch.errors import FormatError
from pyorch.modelmap import ModelMap

KIND = "predictor"
VERSION = 1


@dataclass(frozen=True)
class DefaultVectors:
    """Of the layers with routed experts, by il.

    vectors: float32[n_expert, n_embd], the mean output of each expert over the tokens that selected it, before the
    weight; 0 for one that none selected. counts: how many did, int64[n_expert].
    """

    vectors: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]
    n_tokens: int

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, whole or not at all. PyorchError if it cannot be written."""
        arrays = {f"blk.{il}.default_vectors": array for il, array in self.vectors.items()}
        arrays |= {f"blk.{il}.counts": array for il, array in self.counts.items()}
        sidecar.write(path, KIND, VERSION, model_map, {"n_tokens": self.n_tokens}, arrays)

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_map: ModelMap) -> DefaultVectors:
        """Raises FormatError for a sidecar that is damaged, or of another model or version."""
        metadata, arrays = sidecar.read(path, KIND, VERSION, model_map)
        n_embd = model_map.metadata_int(f"{model_map.info.arch}.embedding_length")
        vectors, counts = {}, {}
        for layer in model_map.layers:
            found, used = arrays.get(f"blk.{layer.il}.default_vectors"), arrays.get(f"blk.{layer.il}.counts")
            if found is None or used is None or found.shape != (layer.n_expert, n_embd) or used.shape != (layer.n_expert,):
                raise FormatError(f"{os.fspath(path)}: layer {layer.il} has no default vectors of {layer.n_expert} experts "
                                  f"with {n_embd} values")
            if not np.isfinite(found).all():
                raise FormatError(f"{os.fspath(path)}: the default vectors of layer {layer.il} are not all numbers")
            vectors[layer.il], counts[layer.il] = np.array(found, np.float32), np.array(used, np.int64)
        return cls(vectors, counts, int(metadata.get("n_tokens", 0)))

    def apply(self, engine: Engine) -> None:
        for il, vectors in self.vectors.items():
            engine.set_default_vectors(il, vectors)
