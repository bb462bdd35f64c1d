"""The sidecar model.predictor.gguf: what predictions of experts are made with, used wherever the model is loaded.

`pyorch calibrate` measures the default vectors and writes it, `pyorch train-predictor` adds an estimator.
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
    """What each expert gives on average (Speculating Experts, section 3.1), by il of its layer.

    vectors: float32[n_expert, n_embd], the mean output of each expert over the tokens that selected it, before the
    weight; 0 for one that none selected. counts: how many did, int64[n_expert].
    """

    vectors: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]
    n_tokens: int

    def apply(self, engine: Engine) -> None:
        for il, vectors in self.vectors.items():
            engine.set_default_vectors(il, vectors)


@dataclass(frozen=True)
class Estimator:
    """The network of pyorch_estimator: corrects the router logits of the layer after each of n_layers layers.

    All float32. Weights are [n_out, n_in], those of the head [n_layers, n_expert, n_latent].
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
        """What the arrays' shapes have to be, by the first two dimensions of some."""
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

    def apply(self, engine: Engine) -> None:
        """PyorchError for an estimator of another model."""
        engine.set_estimator(self.arrays())


@dataclass(frozen=True)
class PredictorFile:
    """What a sidecar holds; parts that it does not hold are None.

    hybrid: by il, whether the estimator guesses the layer better than quasi-hidden states. distance: layers ahead
    that pay. curve: float32[n, 2] of the estimator's training: the tokens that it had been trained on, each use
    counted, and its recall on those that were held out, the mean of the layers. compute_ms: of a decoded token, beside
    the waits for experts, on the machine that calibrated.
    """

    default_vectors: DefaultVectors | None = None
    estimator: Estimator | None = None
    hybrid: dict[int, bool] | None = None
    distance: int | None = None
    curve: np.ndarray | None = None
    compute_ms: float | None = None

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, whole or not at all. PyorchError if it cannot be written."""
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
        """Raises FormatError for a sidecar that is damaged, or of another model or version."""
        metadata, arrays = container.read(path, KIND, VERSION, model_map)
        n_embd = model_map.hparam("embedding_length")
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise FormatError(f"{os.fspath(path)}: {name} does not hold numbers only")
        hybrid = metadata.get("hybrid")
        if hybrid is not None:
            if not isinstance(hybrid, list):
                raise FormatError(
                    f"{os.fspath(path)}: it does not choose a predictor for each layer, but says {hybrid!r}"
                )
            if len(hybrid) != len(model_map.layers):
                raise FormatError(f"{os.fspath(path)}: it chooses predictors for {len(hybrid)} layers, the model has "
                                  f"{len(model_map.layers)} with experts")
            hybrid = {layer.il: bool(estimated) for layer, estimated in zip(model_map.layers, hybrid)}
        distance, n_tokens = metadata.get("distance"), metadata.get("n_tokens", 0)
        if distance is not None and not (isinstance(distance, int) and 1 <= distance <= len(model_map.layers)):
            raise FormatError(f"{os.fspath(path)}: a prefetch distance of {distance!r} layers cannot be")
        if not isinstance(n_tokens, int) or n_tokens < 0:
            raise FormatError(f"{os.fspath(path)}: default vectors of {n_tokens!r} tokens cannot be")
        compute_ms = metadata.get("compute_ms")
        if compute_ms is not None and not (isinstance(compute_ms, (int, float)) and 0 < compute_ms < float("inf")):
            raise FormatError(f"{os.fspath(path)}: a compute time of {compute_ms!r} ms cannot be")
        curve = arrays.get("estimator.curve")
        if curve is not None and (curve.ndim != 2 or curve.shape[1] != 2):
            raise FormatError(f"{os.fspath(path)}: the course of the estimator's training is no list of pairs")
        return cls(
            _default_vectors(path, model_map, arrays, n_tokens, n_embd),
            _estimator(path, model_map, arrays, n_embd), hybrid, distance, curve,
            compute_ms,
        )

    def apply(self, engine: Engine) -> None:
        """Gives the engine what predictors are made with. PyorchError if it does not fit."""
        if self.default_vectors is not None:
            self.default_vectors.apply(engine)
        if self.estimator is not None:
            self.estimator.apply(engine)
        if self.hybrid is not None:
            engine.set_hybrid([self.hybrid[il] for il in engine.n_expert])


def _default_vectors(
    path: str | os.PathLike[str], model_map: ModelMap, arrays: dict[str, np.ndarray], n_tokens: int, n_embd: int
) -> DefaultVectors | None:
    if not any(name.endswith(".default_vectors") for name in arrays):
        return None
    vectors, counts = {}, {}
    for layer in model_map.layers:
        found, used = arrays.get(f"blk.{layer.il}.default_vectors"), arrays.get(f"blk.{layer.il}.counts")
        if found is None or used is None or found.shape != (layer.n_expert, n_embd) or used.shape != (layer.n_expert,):
            raise FormatError(f"{os.fspath(path)}: layer {layer.il} has no default vectors of {layer.n_expert} experts "
                              f"with {n_embd} values")
        vectors[layer.il], counts[layer.il] = np.asarray(found, np.float32), np.asarray(used, np.int64)
    return DefaultVectors(vectors, counts, n_tokens)


def _estimator(
    path: str | os.PathLike[str], model_map: ModelMap, arrays: dict[str, np.ndarray], n_embd: int
) -> Estimator | None:
    names = [field.name for field in dataclasses.fields(Estimator)]
    found = {
        name: np.asarray(arrays[f"estimator.{name}"], np.float32) for name in names if f"estimator.{name}" in arrays
    }
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
        raise FormatError(f"{os.fspath(path)}: the estimator's matrices do not fit together or not the model: "
                          "train it again with pyorch train-predictor")
    return estimator
