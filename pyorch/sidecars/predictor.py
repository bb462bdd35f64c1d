"""The sidecar model.predictor.gguf: the data of predictors.

`pyorch calibrate` measures the default vectors and writes it; `pyorch train-predictor` adds an estimator.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from pyorch.errors import FormatError
from pyorch.library.numerics import np
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "predictor"
VERSION = 2


@dataclass(frozen=True)
class DefaultVectors:
    """The mean outputs of experts (Speculating Experts, section 3.1), by il of the layer.

    Attributes:
        vectors: float32[n_expert, n_embd], mean output of each expert over the tokens that selected it, before the
            weight; 0 for an expert without tokens.
        counts: int64[n_expert], the number of these tokens.
    """

    vectors: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]
    n_tokens: int


@dataclass(frozen=True)
class Estimator:
    """The network of pyorch_estimator, which corrects the router logits of the layer after each of n_layers layers.

    All arrays are float32. Weights are [n_out, n_in]; the head is [n_layers, n_expert, n_latent].
    """

    in_weight: np.ndarray
    in_bias: np.ndarray
    position: np.ndarray
    up_weight: np.ndarray
    up_bias: np.ndarray
    down_weight: np.ndarray
    down_bias: np.ndarray
    norm_weight: np.ndarray
    norm_bias: np.ndarray
    head_weight: np.ndarray
    head_bias: np.ndarray

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the required shapes of the arrays, from the first two dimensions of some."""
        (n_latent, n_embd), n_hidden = self.in_weight.shape, len(self.up_bias)
        n_layers, n_expert = self.head_bias.shape
        return {
            "in_weight": (n_latent, n_embd), "in_bias": (n_latent,), "position": (n_layers, n_latent),
            "up_weight": (n_hidden, n_latent), "up_bias": (n_hidden,),
            "down_weight": (n_latent, n_hidden), "down_bias": (n_latent,),
            "norm_weight": (n_latent,), "norm_bias": (n_latent,),
            "head_weight": (n_layers, n_expert, n_latent), "head_bias": (n_layers, n_expert),
        }

    def arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def n_parameters(self) -> int:
        return sum(array.size for array in self.arrays().values())


@dataclass(frozen=True)
class PredictorFile:
    """The content of a sidecar. Missing parts are None.

    Attributes:
        hybrid: By il, whether the estimator predicts the layer better than quasi-hidden states.
        distance: The best prefetch distance in layers.
        curve: float32[n, 2] of the estimator's training: tokens trained on, each use counted, and recall on held-out
            tokens, the mean of the layers.
        compute_ms: Time of a decoded token without waits for experts, on the machine that calibrated.
    """

    default_vectors: DefaultVectors | None = None
    estimator: Estimator | None = None
    hybrid: dict[int, bool] | None = None
    distance: int | None = None
    curve: np.ndarray | None = None
    compute_ms: float | None = None

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, completely or not at all.

        Raises:
            PyorchError: It cannot be written.
        """
        metadata: container.Metadata = {}
        arrays: dict[str, np.ndarray] = {}
        if self.default_vectors is not None:
            metadata["n_tokens"] = self.default_vectors.n_tokens
            arrays |= {f"blk.{il}.default_vectors": array for il, array in self.default_vectors.vectors.items()}
            arrays |= {f"blk.{il}.counts": array for il, array in self.default_vectors.counts.items()}
        if self.estimator is not None:
            arrays |= {f"estimator.{name}": array for name, array in self.estimator.arrays().items()}
        if self.curve is not None:
            arrays["estimator.curve"] = self.curve
        if self.hybrid is not None:
            metadata["hybrid"] = [self.hybrid[layer.il] for layer in model_map.layers]
        if self.distance is not None:
            metadata["distance"] = self.distance
        if self.compute_ms is not None:
            metadata["compute_ms"] = float(self.compute_ms)
        container.write(path, KIND, VERSION, model_map, metadata, arrays)

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_map: ModelMap) -> PredictorFile:
        """Reads a sidecar.

        Raises:
            FormatError: It is damaged, or of another model or version.
        """
        file = container.Sidecar(path, KIND, VERSION, model_map)
        for name, values in file.arrays.items():
            file.check(np.isfinite(values).all(), f"{name} does not hold numbers only")
        metadata, n_layers = file.metadata, len(model_map.layers)
        hybrid, distance, compute_ms = (metadata.get(name) for name in ("hybrid", "distance", "compute_ms"))
        n_tokens, curve = metadata.get("n_tokens", 0), file.arrays.get("estimator.curve")
        file.check(hybrid is None or (isinstance(hybrid, list) and len(hybrid) == n_layers),
                   f"it does not choose a predictor for each of {n_layers} layers with experts, but says {hybrid!r}")
        file.check(distance is None or (isinstance(distance, int) and 1 <= distance <= n_layers),
                   f"a prefetch distance of {distance!r} layers cannot be")
        file.check(isinstance(n_tokens, int) and n_tokens >= 0, f"default vectors of {n_tokens!r} tokens cannot be")
        file.check(compute_ms is None or (isinstance(compute_ms, (int, float)) and 0 < compute_ms < float("inf")),
                   f"a compute time of {compute_ms!r} ms cannot be")
        file.check(curve is None or (curve.ndim == 2 and curve.shape[1] == 2),
                   "the course of the estimator's training is no list of pairs")
        if hybrid is not None:
            hybrid = {layer.il: bool(estimated) for layer, estimated in zip(model_map.layers, hybrid)}
        n_embd = model_map.hparam("embedding_length")
        return cls(_default_vectors(file, model_map, n_tokens, n_embd), _estimator(file, model_map, n_embd), hybrid,
                   distance, curve, compute_ms)

    def apply(self, engine: Engine) -> None:
        """Passes the data of predictors to the engine.

        Raises:
            PyorchError: They do not fit.
        """
        if self.default_vectors is not None:
            for il, vectors in self.default_vectors.vectors.items():
                engine.set_default_vectors(il, vectors)
        if self.estimator is not None:
            engine.set_estimator(self.estimator.arrays())
        if self.hybrid is not None:
            engine.set_hybrid([self.hybrid[il] for il in engine.n_expert])


def _default_vectors(
    file: container.Sidecar, model_map: ModelMap, n_tokens: int, n_embd: int
) -> DefaultVectors | None:
    if not any(name.endswith(".default_vectors") for name in file.arrays):
        return None
    vectors, counts = {}, {}
    for layer in model_map.layers:
        found, used = (file.arrays.get(f"blk.{layer.il}.{name}") for name in ("default_vectors", "counts"))
        file.check(found is not None and used is not None and found.shape == (layer.n_expert, n_embd)
                   and used.shape == (layer.n_expert,),
                   f"layer {layer.il} has no default vectors of {layer.n_expert} experts with {n_embd} values")
        vectors[layer.il], counts[layer.il] = np.asarray(found, np.float32), np.asarray(used, np.int64)
    return DefaultVectors(vectors, counts, n_tokens)


def _estimator(file: container.Sidecar, model_map: ModelMap, n_embd: int) -> Estimator | None:
    found = {name: np.asarray(file.arrays[f"estimator.{name}"], np.float32)
             for name in Estimator.__dataclass_fields__ if f"estimator.{name}" in file.arrays}
    if not found:
        return None
    try:
        estimator = Estimator(**found)
        fits = all(getattr(estimator, name).shape == shape for name, shape in estimator.shapes().items())
        n_layers, n_expert = estimator.head_bias.shape
    except (TypeError, ValueError):
        fits = False
    if (not fits or estimator.in_weight.shape[1] != n_embd or n_layers >= len(model_map.layers)
            or any(layer.n_expert != n_expert for layer in model_map.layers[1 : n_layers + 1])):
        raise FormatError(f"{file.path}: the estimator's matrices do not fit together or not the model: "
                          "train it again with pyorch train-predictor")
    return estimator
