"""Calibration: runs text through a model, losslessly, and measures values that predictions need."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.errors import PyorchError
from pyorch.llama import cores
from pyorch.llama.context import Context
from pyorch.llama.model import Model, load
from pyorch.runtime.disk import measure_bandwidth
from pyorch.settings.prefetch import NONE, Prefetch
from pyorch.sidecars.predictor import DefaultVectors, PredictorFile
from pyorch.traces.data import read_documents
from pyorch.traces.recorder import Recorder, measure_compute, trace_header
from pyorch.traces.recording import Recording
from pyorch.traces.replay import ReplaySettings, replay
from pyorch.traces.routers import hidden_outputs

_PIECE = 512  # tokens computed together, each piece without earlier ones

# Every tenth piece is held out, up to this many tokens, to compare prefetch distances.
_HELD_OUT = 10
_TRIAL_TOKENS = 2048

_DISK_SECONDS = 1.0
_BUDGET = 0.4  # of the experts, for the comparison of distances
_DISTANCES = (1, 2, 3, 4)
_SAME = 0.005  # smaller gains do not count, because prefetching farther ahead wastes more

OnProgress = Callable[[str, int, int], None]  # "calibrating" or "trying distances", done, total (0: unknown)


@dataclass(frozen=True)
class Trial:
    """The replayed time per token at a prefetch distance, on held-out tokens; distance 0: no prefetch."""

    distance: int
    tpot_ms: float


@dataclass(frozen=True)
class Calibrated:
    """The results of a calibration.

    Attributes:
        default_vectors: Mean outputs of experts.
        compute_ms: Of a decoded token, without the waits for experts.
        trials: By distance; empty if too little text was held out, or the model cannot be replayed.
        why: Why there are no trials, if not for lack of text. "": no other reason.
        cut_short: The time limit ended the calibration before the data did.
    """

    default_vectors: DefaultVectors
    compute_ms: float
    trials: tuple[Trial, ...] = ()
    why: str = ""
    cut_short: bool = False

    @property
    def distance(self) -> int | None:
        """The shortest distance with nearly the least time; None without trials."""
        ahead = {trial.distance: trial.tpot_ms for trial in self.trials if trial.distance}
        return min(
            (distance for distance in ahead if ahead[distance] <= (1 + _SAME) * min(ahead.values())), default=None
        )


def calibrate(
    path: str | os.PathLike[str], data: Sequence[str | os.PathLike[str]], n_tokens: int | None = None,
    n_threads: int | None = None, on_progress: OnProgress | None = None, seconds: float | None = None,
    **load_options: object,
) -> Calibrated:
    """Measures default vectors on documents (see pyorch.traces.data), at any budget, and the best prefetch distance.

    Args:
        path: The model.
        data: Files of documents.
        n_tokens: Tokens of the data at most. None: all.
        n_threads: Threads that compute. Default: the physical cores.
        on_progress: Called after each piece and trial.
        seconds: Start no further piece after this time since the model was loaded. At least one is computed.
        load_options: Options of pyorch.load.

    Raises:
        FormatError: The data or the model cannot be read.
        PyorchError: The model is dense, or the data has no token.
    """
    n_threads = n_threads or cores.physical_cores()
    held_out: list[list[int]] = []
    n_read = n_done = 0
    cut_short = False
    # No predictor runs, so that an unusable predictor file does not prevent a new one.
    options = {"n_ctx": _PIECE, "n_threads": n_threads, **load_options, "prefetch": NONE}
    with load(path, managed=True, **options) as model:
        if model.engine is None:
            raise PyorchError(model.note or f"{os.fspath(path)}: pyorch does not manage its experts, so no output is "
                                            "seen")
        n_embd = model.llama.n_embd()
        with Context(model.llama.model, _PIECE, _PIECE, _PIECE, n_threads=n_threads) as context:
            with model.engine.calibrating():
                begin, limit = time.monotonic(), math.inf if seconds is None else seconds
                n_due = sum(map(len, _pieces(model, data))) if on_progress is not None else 0
                n_due = n_due if n_tokens is None else min(n_due, n_tokens)
                for number, piece in enumerate(_pieces(model, data), start=1):
                    piece = piece if n_tokens is None else piece[: n_tokens - n_read]
                    if not piece:
                        break
                    elapsed = time.monotonic() - begin
                    if n_done and elapsed >= limit:
                        cut_short = True
                        break
                    n_read += len(piece)
                    if number % _HELD_OUT == 0 and sum(map(len, held_out)) < _TRIAL_TOKENS:
                        held_out.append(piece)
                        continue
                    context.clear()
                    context.decode(piece)
                    n_done, last = n_done + len(piece), piece
                    if on_progress is not None:
                        on_progress("calibrating", max(n_read, int(n_due * elapsed / limit)), n_due)
            if not n_done:
                raise PyorchError(f"{', '.join(map(os.fspath, data))}: there is no text to calibrate with")
            means = {layer.il: model.engine.mean_outputs(layer.il, layer.n_in) for layer in model.map.layers}
            vectors = DefaultVectors(
                {il: hidden_outputs(model.map, il, outputs, n_embd) for il, (outputs, _) in means.items()},
                {il: counts.astype(np.int64) for il, (_, counts) in means.items()}, n_done,
            )
            compute_ms = measure_compute(model, context, last, on_progress)
            if not held_out:
                return Calibrated(vectors, compute_ms, why=f"that takes {_HELD_OUT} pieces of at most {_PIECE} tokens, "
                                  "and fewer were computed", cut_short=cut_short)
            try:
                trials = _trials(model, context, vectors, held_out, compute_ms, on_progress)
                return Calibrated(vectors, compute_ms, tuple(trials), cut_short=cut_short)
            except PyorchError as error:  # the model's routing cannot be recorded or replayed
                return Calibrated(vectors, compute_ms, why=str(error), cut_short=cut_short)


def _trials(
    model: Model, context: Context, vectors: DefaultVectors, pieces: list[list[int]], compute_ms: float,
    on_progress: OnProgress | None,
) -> Iterator[Trial]:
    recording = _record(model, context, pieces)
    info = model.map.info
    settings = ReplaySettings(
        budget=max(info.floor_bytes, int(_BUDGET * info.slots_bytes)),
        read_bandwidth=measure_bandwidth(model.map, _DISK_SECONDS).bytes_per_second,
        compute_ms=compute_ms,
        n_warm_tokens=len(recording) // 4,
    )
    file = PredictorFile(vectors)
    distances = [distance for distance in (0, *_DISTANCES) if distance < len(recording.layers)]
    for n, distance in enumerate(distances):
        if on_progress is not None:
            on_progress("trying distances", n, len(distances))
        prefetch = Prefetch("quasi-hidden", distance) if distance else Prefetch(NONE)
        tried = dataclasses.replace(settings, prefetch=prefetch)
        yield Trial(distance, replay(model.map, recording, tried, predictor_file=file).tpot_ms)


def _record(model: Model, context: Context, pieces: list[list[int]]) -> Recording:
    header = trace_header(model.map, states=True)
    recorder = Recorder(header, _PIECE)
    records = []
    model.engine.set_observer(recorder, copy=False)
    try:
        for number, piece in enumerate(pieces):
            context.clear()
            recorder.expect(len(piece))
            context.decode(piece)
            records.append(recorder.records())
            records[-1]["request"] = number
    finally:
        model.engine.set_observer(None)
    whole = np.concatenate(records)
    return Recording(header.layers, header.n_expert, whole["experts"], whole["weights"], whole["request"],
                     states=np.ascontiguousarray(whole["states"]))


def _pieces(model: Model, data: Sequence[str | os.PathLike[str]]) -> Iterator[list[int]]:
    for document in read_documents(data):
        tokens = model.llama.tokenize(document.text.encode(), add_bos=True, special=False)
        for begin in range(0, len(tokens), _PIECE):
            yield tokens[begin : begin + _PIECE]
