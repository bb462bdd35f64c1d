"""Baseline predictors: their forecasts for a recording, which a replay's oracle gets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyorch.runtime.model_map import ModelMap
from pyorch.traces.file import Trace
from pyorch.traces.recording import Recording, Schedule
from pyorch.traces.replay import Forecasts
from pyorch.traces.routers import read_router

# The experts that the layer used for the previous token; all of its experts (DeepSpeed-Inference); its router, applied
# to the router input of an earlier layer (Mixtral-Offloading); the experts of the most similar past request
# (MoE-Infinity).
COMPARED = "previous-token", "layer-all", "next-router", "activation-matrix"

N_REQUESTS = 100  # in MoE-Infinity's memory


class Compared:
    """The baseline predictors for one model. past: the requests that activation-matrix begins with."""

    def __init__(self, model_map: ModelMap, past: Trace) -> None:
        self.map, self.past = model_map, past

    def forecasts(self, name: str) -> Forecasts:
        """Returns the forecasts of one of COMPARED, for replay()."""
        return {"previous-token": previous_token, "layer-all": layer_all, "next-router": self.next_router,
                "activation-matrix": self.activation_matrix}[name]

    def next_router(self, recording: Recording, schedule: Schedule, distance: int) -> np.ndarray:
        """Forecasts twice as many experts as a token uses. Prompts of one token are forecast too."""
        made = _nothing(recording, distance, 2 * recording.experts.shape[2])
        routers = [read_router(self.map, il) for il in recording.layers]
        told = np.concatenate([tokens for tokens, decoded in _ubatches(schedule) if decoded or len(tokens) == 1])
        for of, router in enumerate(routers):
            states = recording.states[told, of]
            scale = 1 / np.sqrt((states.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + router.eps)
            inputs = (states * scale * router.norm).astype(np.float32) if router.norm is not None else states
            for ahead in range(1, min(distance, len(routers) - 1 - of) + 1):
                to = routers[of + ahead]
                logits = inputs @ to.gate.T + (to.bias if to.bias is not None else 0)
                made[told, of + ahead, ahead - 1] = _likeliest(logits, made.shape[-1])
        return made

    def activation_matrix(self, recording: Recording, schedule: Schedule, distance: int) -> np.ndarray:
        """Forecasts twice as many experts as a token uses, of the request with the most similar counts so far.

        While none is known, of this request itself. All tokens that are decoded together count as one request's.
        """
        n_layers, n_expert = len(recording.layers), recording.n_expert
        made = _nothing(recording, distance, 2 * recording.experts.shape[2])
        known = Requests(n_layers, n_expert)
        for counts in request_counts(self.past):
            known.add(counts)
        counts, begun = np.zeros((n_layers, n_expert)), set()
        for tokens, decoded in _ubatches(schedule):
            if not begun.issuperset(requests := set(recording.request[tokens].tolist())):
                begun |= requests
                known.add(counts)
                counts = np.zeros_like(counts)
            for of in range(-1, n_layers):
                if of >= 0:
                    np.add.at(counts[of], recording.experts[tokens, of].ravel(), 1)
                first, last = (0, distance) if of < 0 else (of + distance, of + distance + 1)
                named = range(first, min(last, n_layers))
                if decoded and named:
                    alike = known.nearest(counts)
                    likely = counts if alike is None else known.all[alike]
                    for layer in named:
                        experts = _likeliest(likely[layer], made.shape[-1])
                        made[tokens, layer, layer - of - 1] = np.where(likely[layer][experts] > 0, experts, -1)
        return made


class Requests:
    """The counts of uses of each expert by past requests: all is float64[n, n_layers, n_expert].

    Similarity is the cosine of the matrices, each row divided by its sum, in the layers that the present request has
    used.
    """

    def __init__(self, n_layers: int, n_expert: int) -> None:
        self.all = np.empty((0, n_layers, n_expert))
        self._shares = np.empty((0, n_layers, n_expert))

    def add(self, counts: np.ndarray) -> None:
        """Adds a request that has uses. If there are too many, removes the most similar one."""
        if not counts.any():
            return
        if len(self.all) < N_REQUESTS:
            self.all = np.concatenate([self.all, counts[None]])
            self._shares = np.concatenate([self._shares, _shares(counts)[None]])
        else:
            at = self.nearest(counts) or 0
            self.all[at], self._shares[at] = counts, _shares(counts)

    def nearest(self, counts: np.ndarray) -> int | None:
        """Returns the nearest request; None if this request, or every other one in its layers, is unknown."""
        seen = counts.any(axis=1)
        own, others = _shares(counts)[seen], self._shares[:, seen]
        norms = np.sqrt((own**2).sum() * (others**2).sum(axis=(1, 2)))
        if not norms.any():
            return None
        dots = np.tensordot(others, own, 2)
        return int(np.divide(dots, norms, out=np.full(len(dots), -1.0), where=norms > 0).argmax())


def previous_token(recording: Recording, schedule: Schedule, distance: int) -> np.ndarray:
    """Forecasts the experts of the tokens that were decoded before these."""
    made = _nothing(recording, distance, recording.experts.shape[2])
    before = np.empty(0, np.int64)
    for tokens, decoded in _ubatches(schedule):
        if decoded:
            n = min(len(tokens), len(before))
            made[tokens[:n], :, distance - 1] = recording.experts[before[:n]]
            before = tokens
    return made


def layer_all(recording: Recording, schedule: Schedule, distance: int) -> np.ndarray:
    made = _nothing(recording, distance, recording.n_expert)
    for tokens, decoded in _ubatches(schedule):
        if decoded:
            made[tokens[0], :, distance - 1] = np.arange(recording.n_expert)
    return made


def request_counts(trace: Trace) -> Iterator[np.ndarray]:
    """Yields the counts of each request, float64[n_layers, n_expert]: its uses of each expert."""
    n_layers, n_expert = len(trace.header.layers), trace.header.n_expert
    for request in np.unique(trace.records["request"]):
        counts = np.zeros((n_layers, n_expert))
        for row, experts in zip(counts, trace.records["experts"][trace.records["request"] == request].swapaxes(0, 1)):
            row += np.bincount(experts.ravel(), minlength=n_expert)
        yield counts


def _ubatches(schedule: Schedule) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields tokens, and whether they are decoded."""
    for begin, end, decoded in zip(schedule.begin, schedule.begin[1:], schedule.decode):
        yield schedule.order[begin:end], bool(decoded)


def _nothing(recording: Recording, distance: int, n: int) -> np.ndarray:
    return np.full((len(recording), len(recording.layers), distance, min(n, recording.n_expert)), -1, np.int16)


def _likeliest(values: np.ndarray, n: int) -> np.ndarray:
    return np.argsort(-values, axis=-1, kind="stable")[..., :n]


def _shares(counts: np.ndarray) -> np.ndarray:
    sums = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, sums, out=np.zeros(counts.shape), where=sums > 0)
