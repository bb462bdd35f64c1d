"""What computing takes on servers that are up: coefficients of costs.py, fitted to requests that nobody else disturbs.

A probe is one request to one server. llama-server says how long its steps took, counters of all servers what they did
for it. Of what peers computed the time is known by itself, so a message, an expert and a row are told apart there, by
messages of different lengths. Taken from a request's time with what it waited for answers and reads, that leaves the
dense part: a layer, and a token in it. Errors count as shares of the time, for short and long requests alike.

A step outside the layers cannot be told from its layers, all steps having as many: it is a part of `layer`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.cluster.coefficients import ServerCosts
from pyorch.cluster.members import Counters

# Tokens of the prompt, and those decoded behind the first, of each request that is sent. The longest fits any context.
_PROBES = ((2, 16), (8, 0), (24, 0), (64, 0), (160, 0), (320, 0))
_ROUNDS = 3  # of all of them; the first, in which buffers are made and pages come, does not count
_SECONDS = 60.0  # after which no further round begins, for one server


@dataclass(frozen=True)
class Work:
    """Of a server, in so many seconds of computing. steps: 0 of what it did for others; tokens: of all steps. messages:
    that it answered; 0 of requests of its own users. experts: uses of an expert, by any number of rows at once."""

    seconds: float
    steps: int
    tokens: int
    messages: int
    experts: int
    rows: int


class Works:
    """What servers did for probes, one after another.

    probe: sends a request to a server, of so many tokens of a prompt and so many decoded behind the first; returns
    seconds that its steps took, and layers with experts. counters: of all servers, now.
    """

    def __init__(
        self, names: Sequence[str], probe: Callable[[str, int, int], tuple[float, int]],
        counters: Callable[[], Mapping[str, Counters]],
    ) -> None:
        self._probe, self._counters = probe, counters
        self._n_layers = 1
        self.own: dict[str, list[Work]] = {name: [] for name in names}
        self.for_others: dict[str, list[Work]] = {name: [] for name in names}

    def measure(self, name: str) -> None:
        """Sends the probes of one server, while nobody else asks."""
        begin = time.monotonic()
        for number in range(_ROUNDS):
            if number > 1 and time.monotonic() > begin + _SECONDS:
                return
            for n_tokens, n_output in _PROBES:
                before = self._counters()
                seconds, self._n_layers = self._probe(name, n_tokens, n_output)
                after = self._counters()
                if number:
                    self._add(name, seconds, 1 + n_output, n_tokens + n_output, before, after)

    def fit(self, name: str, known: ServerCosts) -> ServerCosts:
        """Costs of a server: `known`, with those coefficients that its work tells."""
        return fit(self.own[name], self.for_others[name], self._n_layers, known)

    def _add(
        self, name: str, seconds: float, steps: int, tokens: int, before: Mapping[str, Counters],
        after: Mapping[str, Counters],
    ) -> None:
        for other in self.own:
            def gained(field: str) -> int:
                return getattr(after[other], field) - getattr(before[other], field)

            experts = gained("hits") + gained("misses")
            if other == name:
                computing = seconds - 1e-9 * (gained("waited_ns") + gained("stalled_ns"))
                rows = gained("activations") - gained("sent") + gained("fallback")
                work = Work(computing, steps, tokens, 0, experts, rows)
            else:
                work = Work(1e-9 * gained("served_ns"), 0, 0, gained("served_messages"), experts, gained("served"))
            if work.seconds > 0:
                (self.own if other == name else self.for_others)[other].append(work)


def fit(own: Sequence[Work], for_others: Sequence[Work], n_layers: int, known: ServerCosts) -> ServerCosts:
    """Costs of a server: `known`, with those coefficients that can be told from its work.

    own: of requests of its users, without waiting. for_others: what it computed meanwhile for requests to other
    servers; none where it never did: then rows are counted with tokens.
    """
    expert = row = 0.0
    if for_others:
        message, expert, row = _fitted(for_others, [[work.messages, work.experts, work.rows] for work in for_others])
        dense = [[work.steps * n_layers, work.tokens * n_layers] for work in own]
        rest = [max(0.0, work.seconds - expert * work.experts - row * work.rows) for work in own]
        layer, token = _fitted(own, dense, rest)
    else:
        message = known.message
        layer, token, expert = _fitted(own, [[work.steps * n_layers, work.tokens * n_layers, work.experts]
                                             for work in own])
    return ServerCosts(0.0, layer, token, expert, row, message, known.disk_latency, known.disk_bytes_per_second)


def _fitted(
    works: Sequence[Work], columns: Sequence[Sequence[float]], seconds: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Coefficients of the columns, none below 0, whose sums differ least from the seconds, as shares of the work's.

    They are few: of all choices of those that are not 0 the best is taken.
    """
    weights = 1 / np.array([work.seconds for work in works])
    matrix = np.array(columns, np.float64) * weights[:, None]
    wanted = (np.array([work.seconds for work in works] if seconds is None else seconds)) * weights
    n = matrix.shape[1]
    best, least = np.zeros(n), float((wanted**2).sum())
    for size in range(1, n + 1):
        for chosen in map(list, itertools.combinations(range(n), size)):
            found = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(((matrix[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(n), error
                best[chosen] = found
    return tuple(best.tolist())
