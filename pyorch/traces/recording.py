"""Recordings: a routing to replay, of a trace or made up, and the ubatches in which it is played."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.history import token_embeddings
from pyorch.traces.file import PREFILL, Trace

UBATCH = 512  # tokens of a prompt that are computed at once


@dataclass(frozen=True)
class Schedule:
    """Ubatches, in the order in which they are played.

    Ubatch u has the tokens order[begin[u]] to order[begin[u + 1] - 1] of a recording; decode: one of each sequence.
    """

    begin: np.ndarray  # int64[n + 1]
    order: np.ndarray  # int64[begin[n]]
    decode: np.ndarray  # uint8[n]


class Recording:
    """A routing, token by token: those of one request in order, and its requests one after the other.

    Args:
        layers: block numbers il. experts: uint16[n, L, k], the likeliest first. weights: float32[n, L, k], of their
            outputs. request: uint32[n]. phase: uint8[n], as in a trace; None: all are decoded.
        probs: float32[n, L, n_expert], distributions of the routers. states: float32[n, L, n_embd], of which the
            routers' inputs are the normalization. embeddings: float32[n, n_embd]. Each may be None. The last two may
            be functions that make the array when something asks for it.
    """

    def __init__(
        self, layers: tuple[int, ...], n_expert: int, experts: np.ndarray, weights: np.ndarray, request: np.ndarray,
        phase: np.ndarray | None = None, probs: np.ndarray | None = None,
        states: np.ndarray | Callable[[], np.ndarray] | None = None,
        embeddings: np.ndarray | Callable[[], np.ndarray] | None = None,
    ) -> None:
        self.layers, self.n_expert = layers, n_expert
        self.experts = np.ascontiguousarray(experts, np.uint16)
        self.weights = np.ascontiguousarray(weights, np.float32)
        self.request = np.ascontiguousarray(request, np.uint32)
        self.phase = np.ones(len(experts), np.uint8) if phase is None else np.asarray(phase, np.uint8)
        self.probs = None if probs is None else np.ascontiguousarray(probs, np.float32)
        self._states, self._embeddings = states, embeddings

    @classmethod
    def from_trace(cls, trace: Trace, model_map: ModelMap) -> Recording:
        """Raises FormatError for a trace of another model, PyorchError for one without tokens.

        Weights are those of the trace where it has states; else probabilities, with the sum 1.
        """
        header, records = trace.header, trace.records
        trace.check(model_map)
        order = np.lexsort((records["position"], records["request"]))
        if (np.diff(order) == 1).all():
            order = slice(None)  # spares copies

        def column(name: str) -> np.ndarray:
            return np.ascontiguousarray(records[name][order])

        if header.states:
            weights = column("weights")
        else:
            weights = column("probs")
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
        probs = None
        if header.router == "full":
            probs = column("router").astype(np.float32)
            probs /= probs.sum(axis=-1, keepdims=True)
        return cls(
            header.layers, header.n_expert, column("experts"), weights, column("request"), column("phase"), probs,
            (lambda: column("states")) if header.states else None, lambda: token_embeddings(model_map, column("token")),
        )

    def part(self, tokens: Any = slice(None), layers: tuple[int, ...] | None = None) -> Recording:
        """Some of its tokens, or of its layers: experts and their weights."""
        at = slice(None) if layers is None else [self.layers.index(il) for il in layers]
        return Recording(layers or self.layers, self.n_expert, self.experts[tokens][:, at],
                         self.weights[tokens][:, at], self.request[tokens], self.phase[tokens])

    def divided(self, n_first: int, batch: int = 1) -> tuple[Recording, Recording]:
        """The first n_first tokens or a few fewer, and the rest: of so many requests that are decoded together."""
        if batch == 1:
            return self.part(slice(n_first)), self.part(slice(n_first, None))
        schedule = self.schedule(batch)
        at = schedule.begin[np.searchsorted(schedule.begin, n_first, "right") - 1]
        return self.part(np.sort(schedule.order[:at])), self.part(np.sort(schedule.order[at:]))

    def __len__(self) -> int:
        """Tokens."""
        return len(self.experts)

    @property
    def has_states(self) -> bool:
        return self._states is not None

    @cached_property
    def states(self) -> np.ndarray | None:
        return _made(self._states)

    @cached_property
    def embeddings(self) -> np.ndarray | None:
        return _made(self._embeddings)

    @property
    def n_requests(self) -> int:
        return 1 + int(np.count_nonzero(np.diff(self.request)))

    def schedule(self, batch: int = 1, as_decode: bool = True) -> Schedule:
        """Ubatches: a prompt's tokens together, at most 512; then one token of each of up to `batch` requests.

        When a request ends the next one takes its place. as_decode: prompts too are played token by token.
        """
        ends = np.flatnonzero(np.diff(self.request)) + 1
        waiting = deque(np.split(np.arange(len(self)), ends))
        running: list[deque[int]] = []
        ubatches: list[tuple[list[int], bool]] = []
        while waiting or running:
            while waiting and len(running) < batch:
                tokens = waiting.popleft()
                prompt = np.zeros(len(tokens), bool) if as_decode else self.phase[tokens] == PREFILL
                head = tokens[prompt].tolist()
                ubatches += [(head[i : i + UBATCH], False) for i in range(0, len(head), UBATCH)]
                if not prompt.all():
                    running.append(deque(tokens[~prompt].tolist()))
            if running:
                ubatches.append(([request.popleft() for request in running], True))
                running = [request for request in running if request]
        sizes = [len(tokens) for tokens, _ in ubatches]
        return Schedule(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.array([token for tokens, _ in ubatches for token in tokens], np.int64),
            np.array([decode for _, decode in ubatches], np.uint8),
        )


def decoded_recording(trace: Trace, model_map: ModelMap) -> Recording:
    """Of the layers that a decode passes.

    Raises FormatError for a trace of another model, without one of the layers, or damaged; PyorchError without tokens.
    """
    trace.check(model_map, decoded=True)
    wanted = tuple(layer.il for layer in model_map.decoded_layers)
    recording = Recording.from_trace(trace, model_map).part(layers=wanted)
    for layer, last in zip(model_map.decoded_layers, recording.experts.max(axis=(0, 2))):
        if last >= layer.n_expert:
            raise FormatError(
                f"{trace.path} is damaged: it names expert {last} of {layer.n_expert} in layer {layer.il}")
    return recording


def _made(array):
    return array() if callable(array) else array
