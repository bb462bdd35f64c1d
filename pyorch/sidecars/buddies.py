"""Buddy lists: for each expert, the experts of its layer that can replace it (BuddyMoE, section 3).

`pyorch buddies` (pyorch.convert.buddies) writes the sidecar model.buddies.gguf. This module reads, checks and shortens
it.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import numpy as np

from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "buddies"
VERSION = 1
N_PERCENTILES = 101  # 0 to 100

# q is stored in float32, so a sum of q may miss alpha by rounding; it then counts as reached.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class LayerBuddies:
    """The buddies of the experts of one layer, the most similar first. A row belongs to the replaced expert."""

    il: int
    ids: np.ndarray  # int32[n_expert, k_max], -1 after the end of a list
    q: np.ndarray  # float32[n_expert, k_max], the score, normalized over all peers (eq. 4); 0 after the end
    activations: np.ndarray  # int64[n_expert], tokens of the trace that selected the expert
    tae_percentiles: np.ndarray  # float32[101] of the Token Activating Entropy (eq. 1)
    margin_percentiles: np.ndarray  # float32[101] of the margin between the two largest probabilities

    @property
    def lengths(self) -> np.ndarray:
        """int64[n_expert]: the number of buddies of each expert."""
        return (self.ids >= 0).sum(axis=1)

    def prefix_lengths(self, cft_alpha: float) -> np.ndarray:
        """Returns int64[n_expert]: the fewest buddies whose q sums up to cft_alpha, or all (eq. 5).

        It is at least 1 for an expert with any buddy.
        """
        reached = np.cumsum(self.q, axis=1, dtype=np.float64) >= cft_alpha - _ROUNDING
        wanted = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, self.ids.shape[1])
        return np.minimum(np.maximum(wanted, 1), self.lengths)

    def cut(self, cft_alpha: float, k: int | None = None) -> LayerBuddies:
        """Returns the lists for cft_alpha (eq. 6), with at most k buddies."""
        width = self.ids.shape[1] if k is None else min(k, self.ids.shape[1])
        kept = np.arange(width) < self.prefix_lengths(cft_alpha)[:, None]
        return dataclasses.replace(
            self,
            ids=np.where(kept, self.ids[:, :width], np.int32(-1)),
            q=np.where(kept, self.q[:, :width], np.float32(0)),
        )


@dataclass(frozen=True)
class Buddies:
    """The buddies of a model, by the il of its layers with routed experts.

    The stored lists hold up to k_max buddies for every alpha; LayerBuddies.cut() shortens them.
    """

    layers: dict[int, LayerBuddies]
    alpha: dict[int, float]  # cumulative frequency threshold of each layer (eq. 5)
    n_tokens: int  # of the trace

    @property
    def activations(self) -> dict[int, np.ndarray]:
        """int64[n_expert] of each layer: tokens of the trace that selected the expert."""
        return {il: layer.activations for il, layer in self.layers.items()}

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, completely or not at all.

        Raises:
            PyorchError: It cannot be written.
        """
        arrays = {f"blk.{il}.{name}": getattr(layer, name) for il, layer in self.layers.items() for name in _ARRAYS}
        metadata = {"layers": list(self.layers), "alpha": [float(self.alpha[il]) for il in self.layers],
                    "n_tokens": self.n_tokens}
        container.write(path, KIND, VERSION, model_map, metadata, arrays)

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_map: ModelMap) -> Buddies:
        """Reads and checks a sidecar.

        Raises:
            FormatError: It is damaged, or its lists cannot belong to this model.
        """
        file = container.Sidecar(path, KIND, VERSION, model_map)
        file.check_layers(model_map.layers)
        alpha, n_tokens = (file.metadata.get(name) for name in ("alpha", "n_tokens"))
        file.check(isinstance(alpha, list) and len(alpha) == len(model_map.layers)
                   and all(isinstance(value, float) and 0 < value <= 1 for value in alpha),
                   f"there is no alpha in (0, 1] for each layer, but {alpha}")
        file.check(isinstance(n_tokens, int), "it does not say what its lists were made from")
        layers = {layer.il: _layer(file, layer.il, layer.n_expert) for layer in model_map.layers}
        return cls(layers, dict(zip(layers, alpha)), n_tokens)


_ARRAYS = ("ids", "q", "activations", "tae_percentiles", "margin_percentiles")


def _layer(file: container.Sidecar, il: int, n_expert: int) -> LayerBuddies:
    """Reads one layer.

    Raises:
        FormatError: An array has another shape, or a list is impossible; the sentence names the first such expert.
    """
    ids = file.of_layer(il, "ids", np.int32, n_expert, None)

    def floats(name: str, *shape: int, nan: bool = False) -> np.ndarray:
        return np.array(file.of_layer(il, name, np.float32, *shape, nan=nan))

    layer = LayerBuddies(
        il, np.array(ids), floats("q", *ids.shape, nan=True),
        np.array(file.of_layer(il, "activations", np.int64, n_expert)), floats("tae_percentiles", N_PERCENTILES),
        floats("margin_percentiles", N_PERCENTILES),
    )
    q = layer.q
    ended = ids == -1

    def refuse(wrong: np.ndarray, what: str) -> None:
        rows = np.flatnonzero(wrong.any(axis=1))
        if len(rows):
            raise FormatError(f"{file.path}: the buddies of expert {rows[0]} of layer {il} {what}")

    refuse((ids < -1) | (ids >= n_expert), f"are not all numbers from 0 to {n_expert - 1}")
    refuse(ended[:, :-1] & ~ended[:, 1:], "go on after the end of the list")
    refuse(ids == np.arange(n_expert)[:, None], "hold the expert itself")
    ordered = np.sort(ids, axis=1)
    refuse((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0), "hold an expert twice")
    refuse(~np.isfinite(q) | (q < 0), "have a score q that is not a number of 0 or more")
    refuse(ended & (q != 0), "have a score q after the end of the list")
    refuse(q[:, 1:] > q[:, :-1], "are not sorted by their score q")
    refuse(q.sum(axis=1, dtype=np.float64, keepdims=True) > 1 + 1e-4, "have scores q that sum up to more than 1")
    percentiles = np.stack([layer.tae_percentiles, layer.margin_percentiles])
    file.check((np.diff(percentiles) >= 0).all(), f"the percentiles of layer {il} are not in ascending order")
    file.check((layer.activations >= 0).all(), f"the activations of layer {il} are not all 0 or more")
    return layer
