"""Recordings: a routing to replay, from a trace or synthetic, and the order of its ubatches."""

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
    """Ubatches, in the order of the replay.

    Attributes:
        begin: int64[n + 1]. Ubatch u has the tokens order[begin[u]] to order[begin[u + 1] - 1] of the recording.
        order: int64[begin[n]], indices of tokens.
        decode: uint8[n], 1: the ubatch decodes one token of each sequence.
    """

    begin: np.ndarray
    order: np.ndarray
    decode: np.ndarray


class Recording:
    """A routing, token by token. The tokens of a request are consecutive and in order.

    Args:
        layers: Block numbers il.
        n_expert: Experts of a layer.
        experts: uint16[n, L, k], the most probable first.
        weights: float32[n, L, k], of the experts' outputs.
        request: uint32[n].
        phase: uint8[n], as in a trace. None: all tokens are decoded.
        probs: float32[n, L, n_expert], distributions of the routers, or None.
        states: float32[n, L, n_embd], the states that are normalized to the routers' inputs, or None. May be a
            function that makes the array at the first access.
        embeddings: float32[n, n_embd], or None. May be a function, as `states`.
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
        """Makes a recording of a trace.

        The weights are the trace's if it has states; otherwise the probabilities, scaled to a sum of 1.

        Raises:
            FormatError: The trace belongs to another model.
            PyorchError: The trace has no tokens.
        """
        header, records = trace.header, trace.records
        trace.check(model_map)
        order = np.lexsort((records["position"], records["request"]))
        if (np.diff(order) == 1).all():
            order = slice(None)  # avoids copies

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
        """Returns some of the tokens, or of the layers: only experts and their weights."""
        at = slice(None) if layers is None else [self.layers.index(il) for il in layers]
        return Recording(layers or self.layers, self.n_expert, self.experts[tokens][:, at],
                         self.weights[tokens][:, at], self.request[tokens], self.phase[tokens])

    def divided(self, n_first: int, batch: int = 1) -> tuple[Recording, Recording]:
        """Splits into at most the first n_first tokens and the rest, for `batch` requests that are decoded together."""
        if batch == 1:
            return self.part(slice(n_first)), self.part(slice(n_first, None))
        schedule = self.schedule(batch)
        at = schedule.begin[np.searchsorted(schedule.begin, n_first, "right") - 1]
        return self.part(np.sort(schedule.order[:at])), self.part(np.sort(schedule.order[at:]))

    def __len__(self) -> int:
        """Returns the number of tokens."""
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
        """Returns ubatches: a prompt's tokens, at most 512 at once; then one token of each of up to `batch` requests.

        When a request ends, the next one takes its place. as_decode: prompts too are replayed token by token.
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
    """Returns the recording of all layers that a decode computes.

    Raises:
        FormatError: The trace is damaged, belongs to another model, or lacks a layer.
        PyorchError: The trace has no tokens.
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
