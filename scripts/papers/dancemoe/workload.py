"""What the users of a server ask for: when requests arrive, how long they are, and which experts their tokens use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.traces.file import DECODE, Trace

N_OUTPUT = 20  # tokens that count as decoded where the trace has none (DanceMoE, section IV)

_LEAST_SHARE = 1e-12  # of any expert: a token needs k different ones


@dataclass(frozen=True)
class Recorded:
    """The requests of a trace. experts: uint16[n_tokens, n_layers, k], request after request; starts: int64[n + 1],
    where each begins; n_output: int64[n], how many of its last tokens are decoded, one in a step."""

    experts: np.ndarray
    starts: np.ndarray
    n_output: np.ndarray
    n_expert: int

    def __len__(self) -> int:
        return len(self.n_output)

    def request(self, i: int) -> np.ndarray:
        """uint16[n_tokens, n_layers, k]"""
        return self.experts[self.starts[i] : self.starts[i + 1]]

    def of_layers(self, columns: list[int]) -> Recorded:
        """Only these layers, by their places in the arrays."""
        whole = columns == list(range(self.experts.shape[1]))
        return self if whole else replace(self, experts=self.experts[:, columns])

    @cached_property
    def uses(self) -> np.ndarray:
        """How often each expert is used: float64[n_layers, n_expert]."""
        return count_uses(self.experts, self.n_expert)


def count_uses(experts: np.ndarray, n_expert: int) -> np.ndarray:
    """float64[n_layers, n_expert], of integer[n_tokens, n_layers, k]."""
    n_layers = experts.shape[1]
    cells = experts.astype(np.int64) + n_expert * np.arange(n_layers)[:, None]
    return np.bincount(cells.ravel(), minlength=n_layers * n_expert).reshape(n_layers, n_expert).astype(np.float64)


def read_requests(trace: Trace, n_output: int | None = None) -> Recorded:
    """n_output: how many of the last tokens of each request are decoded; by default those that the trace recorded so,
    and N_OUTPUT of a trace without such. At least one token is left as the prompt.

    Raises FormatError for a trace without tokens, or with experts that its model has not.
    """
    if not len(trace):
        raise FormatError(f"{trace.path} holds no tokens")
    records = trace.records
    numbers = np.asarray(records["request"])
    order = np.lexsort((records["position"], numbers))
    experts = np.asarray(records["experts"])[order]
    if experts.max() >= trace.header.n_expert:
        raise FormatError(f"{trace.path} is damaged: it names expert {experts.max()} of {trace.header.n_expert}")
    _, first, length = np.unique(numbers[order], return_index=True, return_counts=True)
    decoded = np.asarray(records["phase"])[order] == DECODE
    if n_output is not None:
        n_decoded = np.full(len(first), n_output)
    elif decoded.any():
        n_decoded = np.add.reduceat(decoded.astype(np.int64), first)
    else:
        n_decoded = np.full(len(first), N_OUTPUT)
    return Recorded(experts, np.append(first, len(order)), np.minimum(n_decoded, length - 1), trace.header.n_expert)


class Source(Protocol):
    """Of the requests of a server."""

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        """The i-th that arrives: experts, uint16[n_tokens, n_layers, k], and how many of the tokens are decoded."""
        ...


class Replay:
    """The requests of a trace, as they were recorded, again and again; from one on that `rng` chooses."""

    def __init__(self, recorded: Recorded, rng: np.random.Generator) -> None:
        self._recorded = recorded
        self._first = int(rng.integers(len(recorded)))

    def number(self, i: int) -> int:
        """Which recorded request the i-th is."""
        return (self._first + i) % len(self._recorded)

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        i = self.number(i)
        return self._recorded.request(i), int(self._recorded.n_output[i])


class Fitted:
    """Requests that are made up: as long as recorded ones, their experts drawn from distributions fitted to these.

    Of each layer a request has shares of experts that are Dirichlet distributed around those of all requests, with a
    concentration that makes them differ between requests as much as recorded ones do. A token uses each expert with a
    probability in proportion to its share, at most 1.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.shares = recorded.uses / recorded.uses.sum(axis=1, keepdims=True)
        self.concentration = fit_concentration(recorded)

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        recorded = self._recorded
        length = int(rng.integers(len(recorded)))
        n_tokens = int(recorded.starts[length + 1] - recorded.starts[length])
        finite = np.isfinite(self.concentration)[:, None]
        drawn = rng.standard_gamma(np.where(finite, self.concentration[:, None], 1.0) * self.shares)
        shares = np.where(finite, drawn / np.maximum(drawn.sum(axis=1, keepdims=True), _LEAST_SHARE), self.shares)
        return draw_experts(rng, shares, n_tokens, recorded.experts.shape[2]), int(recorded.n_output[length])


def fit_concentration(recorded: Recorded) -> np.ndarray:
    """Concentration of a Dirichlet distribution of the requests' shares: float64[n_layers], infinite where requests
    differ no more than tokens do.

    By moments: the counts of a request of n uses are Dirichlet-multinomial, so their squared distances from the mean
    shares, over what they are for a multinomial, are 1 + (n - 1) / (1 + concentration) in the mean.
    """
    lengths = np.diff(recorded.starts)
    k = recorded.experts.shape[2]
    shares = recorded.uses / recorded.uses.sum(axis=1, keepdims=True)
    spread = 1 - (shares**2).sum(axis=1)  # of one draw
    over = np.zeros(len(shares))
    for i, n_tokens in enumerate(lengths):
        n = k * n_tokens
        own = count_uses(recorded.request(i), recorded.n_expert) / n
        over += n * (((own - shares) ** 2).sum(axis=1) - spread / n)
    wanted = spread * (lengths * k - 1).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.clip(over / wanted, 0, 1)
        return np.where(correlation > 0, 1 / np.maximum(correlation, 1e-9) - 1, np.inf)


def draw_experts(rng: np.random.Generator, shares: np.ndarray, n_tokens: int, n_used: int) -> np.ndarray:
    """Different experts of each token: uint16[n_tokens, n_layers, n_used].

    Each is used with probability n_used * share, at most 1 (those beyond go to the others): systematic sampling, which
    has these probabilities exactly. shares: float64[n_layers, n_expert].
    """
    n_layers, n_expert = shares.shape
    inclusion = _inclusion(shares, n_used)
    order = np.argsort(rng.random(shares.shape), axis=1)  # neighbours exclude each other
    ends = np.cumsum(np.take_along_axis(inclusion, order, axis=1), axis=1)
    ends *= n_used / ends[:, -1:]
    points = rng.random((n_layers, n_tokens, 1)) + np.arange(n_used)
    experts = np.empty((n_tokens, n_layers, n_used), np.uint16)
    for layer in range(n_layers):
        places = np.searchsorted(ends[layer], points[layer], "right")
        experts[:, layer] = order[layer, np.minimum(places, n_expert - 1)]
    return experts


def _inclusion(shares: np.ndarray, n_used: int) -> np.ndarray:
    """In proportion to shares, at most 1, with the sum n_used in each row."""
    shares = np.maximum(shares, _LEAST_SHARE)
    certain = np.zeros(shares.shape, bool)
    while True:
        rest = np.where(certain, 0, shares)
        scale = (n_used - certain.sum(axis=1)) / np.maximum(rest.sum(axis=1), _LEAST_SHARE)
        inclusion = np.where(certain, 1.0, rest * scale[:, None])
        beyond = inclusion > 1
        if not beyond.any():
            return inclusion
        certain |= beyond


def arrival_times(rng: np.random.Generator, rate: float, duration: float) -> np.ndarray:
    """Of a Poisson process with `rate` requests a second: float64[n], ascending, below the duration in seconds."""
    times = np.empty(0)
    while not len(times) or times[-1] < duration:
        gaps = rng.exponential(1 / rate, max(16, int(rate * duration)))
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
    return times[times < duration]


@dataclass(frozen=True)
class Arrivals:
    """poisson:0.2 (requests a second of each server) or poisson:5s (between two, in the mean)."""

    rate: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """PyorchError for anything else."""
        kind, _, value = text.strip().partition(":")
        try:
            number = float(value.removesuffix("s"))
            rate = 1 / number if value.endswith("s") else number
        except (ValueError, ZeroDivisionError):
            rate = 0.0
        if kind != "poisson" or not 1e-9 < rate < 1e9:
            raise PyorchError(f'arrivals "{text}" are not understood: use poisson:0.2 for so many requests a second, '
                              "or poisson:5s for one in 5 seconds")
        return cls(rate, text.strip())
