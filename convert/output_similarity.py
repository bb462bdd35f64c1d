"""Compares the outputs of experts on the router inputs of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.convert.expert_outputs import LayerExperts
from pyorch.traces.file import Trace

# An expert that fewer samples selected is compared on all samples.
MIN_SAMPLES = 8

# Memory that one layer's comparison keeps, twice: for the hidden states and the products of outputs.
WORK_BYTES = 512 << 20

SLICE_BYTES = 64 << 20  # of outputs that are multiplied at once


class RouterInputs:
    """The trace's sample of router inputs, and the routers' selections for them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        indices, self._inputs = trace.inputs
        self._experts = trace.records["experts"][indices]

    def __len__(self) -> int:
        return len(self._inputs)

    def layer(self, il: int, n_expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns router inputs float16[n, n_embd] and selected experts bool[n, n_expert]."""
        index = self._trace.layer_index(il)
        selected = np.zeros((len(self), n_expert), bool)
        np.put_along_axis(selected, self._experts[:, index].astype(np.int64), True, axis=1)
        return self._inputs[:, index], selected


@dataclass(frozen=True)
class OutputSimilarity:
    """How well the output of expert j replaces the output of expert i, each [i, j].

    Over the samples that selected i; over all samples if fewer than MIN_SAMPLES did.
    """

    cosine: np.ndarray  # float32[n_expert, n_expert], mean of cos(o_i, o_j)
    relative_error: np.ndarray  # float32[n_expert, n_expert], mean of |o_j - o_i| / |o_i|
    samples: np.ndarray  # int64[n_expert], that selected i


def compare(experts: LayerExperts, inputs: np.ndarray, selected: np.ndarray) -> OutputSimilarity:
    """Compares the outputs of all pairs of experts of a layer.

    If the work space does not suffice, fewer samples are used, spread evenly.

    Args:
        experts: The experts.
        inputs: float16 or float32[n, n_embd], router inputs.
        selected: bool[n, n_expert], the router's selections for them.
    """
    n_expert = experts.n_expert
    kept = _fitting(len(inputs), n_expert, experts.hidden(0, inputs[:1].astype(np.float32)).shape[1])
    inputs, selected = np.asarray(inputs[kept], np.float32), selected[kept]
    hidden = np.stack([experts.hidden(expert, inputs) for expert in range(n_expert)])
    n_embd = inputs.shape[1]
    step = max(1, SLICE_BYTES // (4 * n_expert * len(inputs)))
    products = np.zeros((len(inputs), n_expert, n_expert), np.float32)  # <o_i, o_j> of each sample
    for start in range(0, n_embd, step):
        rows = slice(start, min(start + step, n_embd))
        outputs = np.stack([experts.down(expert, hidden[expert], rows) for expert in range(n_expert)], axis=1)
        products += outputs @ outputs.transpose(0, 2, 1)
    return similarity_of(products, selected)


def similarity_of(products: np.ndarray, selected: np.ndarray) -> OutputSimilarity:
    """Computes the similarity from the products <o_i, o_j> float32[n, n_expert, n_expert] of n samples."""
    n_expert = selected.shape[1]
    samples = selected.sum(axis=0)
    cosine, error = np.zeros((2, n_expert, n_expert), np.float32)
    for i in range(n_expert):
        of = products[selected[:, i] if samples[i] >= MIN_SAMPLES else slice(None)]
        squares = np.diagonal(of, axis1=1, axis2=2).astype(np.float64)  # [samples, j]
        dots, own = of[:, i].astype(np.float64), squares[:, i, None]
        cosine[i] = _ratio(dots, np.sqrt(squares * own)).mean(axis=0)
        error[i] = np.sqrt(_ratio(np.maximum(squares - 2 * dots + own, 0), own)).mean(axis=0)
    return OutputSimilarity(cosine, error, samples)


def _ratio(value: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Returns value / of, and 0 for an output of 0."""
    return np.divide(value, of, out=np.zeros(np.broadcast_shapes(value.shape, of.shape)), where=of > 0)


def _fitting(n: int, n_expert: int, n_ff: int) -> np.ndarray:
    most = max(MIN_SAMPLES, WORK_BYTES // (4 * n_expert * max(n_ff, n_expert)))
    return np.arange(n) if n <= most else np.linspace(0, n - 1, most).astype(np.int64)
