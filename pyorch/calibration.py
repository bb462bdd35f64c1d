"""Calibration: runs text through a model, losslessly, and measures what predictions are made with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pyorch import memory
from pyorch.context import Context
from pyorch.data import read_documents
from pyorch.default_vectors import DefaultVectors
from pyorch.errors import PyorchError
from pyorch.model import Model, load

_PIECE = 512  # tokens that are computed together, from nothing but themselves

OnProgress = Callable[[str, int, int], None]  # "calibrating", tokens done, of at most


def calibrate(
    path: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]],
    n_tokens: int | None = None,
    n_threads: int | None = None,
    on_progress: OnProgress | None = None,
    **load_options: object,
) -> DefaultVectors:
    """Measures them on documents (see pyorch.data), at any budget.

    Args:
        n_tokens: of the data at most, None for all.

    Raises PyorchError for a dense model, or data without a token; FormatError for what cannot be read.
    """
    n_threads = n_threads or memory.physical_cores()
    done = 0
    with load(path, **{"n_ctx": _PIECE, "n_threads": n_threads, **load_options}) as model:
        if model.engine is None:
            raise PyorchError(model.note or f"{os.fspath(path)}: nothing manages its experts, so no output is seen")
        n_embd = model.llama.n_embd()
        with Context(model.llama.model, _PIECE, _PIECE, _PIECE, n_threads=n_threads) as context, model.engine.calibrating():
            for piece in _pieces(model, data):
                piece = piece if n_tokens is None else piece[: n_tokens - done]
                if not piece:
                    break
                context.clear()
                context.decode(piece)
                done += len(piece)
                if on_progress is not None:
                    on_progress("calibrating", done, n_tokens or 0)
        if not done:
            raise PyorchError(f"{', '.join(map(os.fspath, data))}: there is no text to calibrate with")
        means = {il: model.engine.mean_outputs(il, n_embd) for il in model.layers}
    vectors = {il: vectors for il, (vectors, _) in means.items()}
    return DefaultVectors(vectors, {il: counts.astype(np.int64) for il, (_, counts) in means.items()}, done)


def _pieces(model: Model, data: Sequence[str | os.PathLike[str]]) -> Iterator[list[int]]:
    for document in read_documents(data):
        tokens = model.llama.tokenize(document.text.encode(), add_bos=True, special=False)
        for begin in range(0, len(tokens), _PIECE):
            yield tokens[begin : begin + _PIECE]
