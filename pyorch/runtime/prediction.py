"""The part of an engine that forecasts the experts of later layers, and may compute with its forecasts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from pyorch.library.bindings import array, check, default, lib, new
from pyorch.library.choices import predictors, speculation
from pyorch.library.numerics import np
from pyorch.runtime.handle import EngineHandle
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.routers import Router, from_struct, to_struct
from pyorch.runtime.statistics import SpeculationStats, read

_WHAT_PAYS = -1.0  # as a min_precision


class History(Protocol):
    """Past iterations and requests: pyorch.sidecars.history.ExpertMaps."""

    handle: Any  # pyorch_history *

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None: ...


class PredictionCalls(EngineHandle):
    """What forecasts are made of, and what becomes of them.

    history: what was set by set_history(), None before.
    """

    history: History | None

    def set_prefetch(
        self, predictor: str, distance: int = 1, min_precision: float | None = 0.0, automatic: bool = False
    ) -> None:
        """What reads experts ahead while a layer decodes, for up to `distance` layers later; "none": nothing.

        Args:
            predictor: one of pyorch.library.choices.predictors().
            min_precision: guesses that come true less often than this, as counted while running, are not read. None:
                those are read that gain more than they cost.
            automatic: only while what guesses save is worth the processor's time of the predictions.
        """
        kind = predictors().choose(predictor, self.simulated).value
        least = _WHAT_PAYS if min_precision is None else min_precision
        check(lib.pyorch_set_prefetch(self.handle, kind, distance, least, automatic))

    def set_layer_prefetch(
        self, il: int, predictor: str, distance: int = 1, min_precision: float | None = 0.0
    ) -> None:
        """What reads experts of one layer ahead, see set_prefetch()."""
        kind = predictors().choose(predictor, self.simulated).value
        least = _WHAT_PAYS if min_precision is None else min_precision
        check(lib.pyorch_set_layer_prefetch(self.handle, il, kind, distance, least))

    def set_router(self, il: int, router: Router) -> None:
        """What predictors apply, for a simulated engine, which has no graph to take it from. Copied, as float32."""
        raw, _arrays = to_struct(router)
        check(lib.pyorch_set_router(self.handle, il, raw))

    def router(self, il: int) -> Router:
        """A copy. PyorchError where it is not known: no context was made yet, or it cannot be applied, with the
        reason."""
        raw = new("pyorch_router")
        check(lib.pyorch_get_router(self.handle, il, raw))
        return from_struct(raw)

    def apply_router(self, il: int, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What predictors take the layer's router to select for inputs float32[n_tokens, n_embd], the best first.

        Returns experts int32 and weights float32, [n_tokens, n_used]. Raises as router() does.
        """
        router = self.router(il)
        inputs = np.ascontiguousarray(inputs, np.float32).reshape(-1, router.gate.shape[1])
        experts, weights = (np.empty((len(inputs), router.n_used), dtype) for dtype in (np.int32, np.float32))
        check(lib.pyorch_apply_router(self.handle, il, array("float[]", inputs), len(inputs),
                                      array("int32_t[]", experts), array("float[]", weights)))
        return experts, weights

    def check_routers(self) -> None:
        """PyorchError where a predictor that was chosen, or speculation, applies routers and a graph has one that
        cannot be applied. Graphs are known once a context was made."""
        check(lib.pyorch_check_routers(self.handle))

    def set_default_vectors(self, il: int, vectors: np.ndarray) -> None:
        """Mean outputs of the experts of a layer, float32[n_expert, n_embd], for the quasi-hidden predictor."""
        vectors = np.ascontiguousarray(vectors, np.float32)
        check(lib.pyorch_set_default_vectors(self.handle, il, array("float[]", vectors), *vectors.shape))

    def set_estimator(self, weights: Mapping[str, np.ndarray]) -> None:
        """The arrays of pyorch_estimator, float32 (see pyorch.sidecars.predictor.Estimator).

        PyorchError if they do not fit.
        """
        arrays = {name: np.ascontiguousarray(values, np.float32) for name, values in weights.items()}
        n_latent, n_embd = arrays["in_weight"].shape
        n_layers, n_expert = arrays["head_bias"].shape
        raw = default(
            "pyorch_estimator", n_latent=n_latent, n_embd=n_embd, n_hidden=len(arrays["up_bias"]), n_layers=n_layers,
            n_expert=n_expert, **{name: array("float[]", values) for name, values in arrays.items()},
        )
        check(lib.pyorch_set_estimator(self.handle, raw))

    def set_hybrid(self, layers: Iterable[bool]) -> None:
        """Whether the hybrid predictor takes the estimator, and not quasi-hidden, by layer in the order of il."""
        mask = np.fromiter(layers, np.uint8)
        check(lib.pyorch_set_hybrid(self.handle, array("uint8_t[]", mask), mask.size))

    def estimate(self, il: int, state: np.ndarray) -> np.ndarray:
        """What the estimator adds to the router logits of the layer after il.

        state: quasi-hidden, float32[n_embd].
        """
        state = np.ascontiguousarray(state, np.float32)
        logits = np.empty(self.n_expert[il], np.float32)
        check(
            lib.pyorch_estimate(
                self.handle, il, array("float[]", state), state.size, array("float[]", logits), logits.size
            )
        )
        return logits

    def set_history(self, history: History) -> None:
        """Past iterations and requests, that predictors search and add to."""
        check(lib.pyorch_set_history(self.handle, history.handle))
        self.history = history

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Inside, the outputs of all experts are summed up, for mean_outputs()."""
        check(lib.pyorch_set_calibration(self.handle, True))
        try:
            yield
        finally:
            check(lib.pyorch_set_calibration(self.handle, False))

    def mean_outputs(self, il: int, n_embd: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the last calibrating(): float32[n_expert, n_embd], 0 for experts never used, and uint64[n_expert] uses."""
        n_expert = self.n_expert[il]
        vectors, counts = np.empty((n_expert, n_embd), np.float32), np.empty(n_expert, np.uint64)
        check(
            lib.pyorch_get_mean_outputs(
                self.handle, il, array("float[]", vectors), array("uint64_t[]", counts), n_expert, n_embd
            )
        )
        return vectors, counts

    # Lossy

    def set_speculation(self, mode: str) -> None:
        """Whether layers execute what is forecast for them one layer earlier (lossy): one of
        pyorch.library.choices.speculation()."""
        check(lib.pyorch_set_speculation(self.handle, speculation().choose(mode).value))

    def speculation_stats(self) -> SpeculationStats:
        """Zeroed by reset_stats()."""
        raw = new("pyorch_speculation_counts")
        check(lib.pyorch_get_speculation_counts(self.handle, raw))
        return read(SpeculationStats, raw)
