"""The requests of a server's users: their arrivals and lengths, and the experts that their tokens use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.traces.file import DECODE, Trace

N_OUTPUT = 20  # decoded tokens of a request if the trace records none (DanceMoE, section IV)

_LEAST_SHARE = 1e-12  # of any expert: positive, so that a token finds k different ones


@dataclass(frozen=True)
class Recorded:
    """The requests of a trace.

    Attributes:
        experts: uint16[n_tokens, n_layers, k], request after request.
        starts: int64[n + 1], the first token of each request.
        n_output: int64[n], the number of each request's last tokens that are decoded, one in a step.
    """

    experts: np.ndarray
    starts: np.ndarray
    n_output: np.ndarray
    n_expert: int

    def __len__(self) -> int:
        return len(self.n_output)

    def request(self, i: int) -> np.ndarray:
        """Returns a request's experts, uint16[n_tokens, n_layers, k]."""
        return self.experts[self.starts[i] : self.starts[i + 1]]

    def of_layers(self, columns: list[int]) -> Recorded:
        """Returns the same requests with only these layers, given by their columns in the arrays."""
        whole = columns == list(range(self.experts.shape[1]))
        return self if whole else replace(self, experts=self.experts[:, columns])

    @cached_property
    def uses(self) -> np.ndarray:
        """Returns the number of uses of each expert: float64[n_layers, n_expert]."""
        return count_uses(self.experts, self.n_expert)


def count_uses(experts: np.ndarray, n_expert: int) -> np.ndarray:
    """Returns the uses, float64[n_layers, n_expert], of integer[n_tokens, n_layers, k]."""
    n_layers = experts.shape[1]
    cells = experts.astype(np.int64) + n_expert * np.arange(n_layers)[:, None]
    return np.bincount(cells.ravel(), minlength=n_layers * n_expert).reshape(n_layers, n_expert).astype(np.float64)


def read_requests(trace: Trace, n_output: int | None = None) -> Recorded:
    """Reads the requests of a trace.

    Args:
        trace: The trace.
        n_output: Number of each request's last tokens that are decoded. At least one token stays in the prompt. By
            default the trace decides; if it records no decoded tokens, the number is N_OUTPUT.

    Raises:
        FormatError: The trace has no tokens, or an expert that its model does not have.
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
    """A source of a server's requests."""

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        """Returns the i-th request to arrive: experts, uint16[n_tokens, n_layers, k], and its decoded tokens."""
        ...


class Replay:
    """Repeats the recorded requests of a trace in their order. `rng` chooses the first one."""

    def __init__(self, recorded: Recorded, rng: np.random.Generator) -> None:
        self._recorded = recorded
        self._first = int(rng.integers(len(recorded)))

    def number(self, i: int) -> int:
        """Returns the recorded number of the i-th request."""
        return (self._first + i) % len(self._recorded)

    def request(self, rng: np.random.Generator, i: int) -> tuple[np.ndarray, int]:
        i = self.number(i)
        return self._recorded.request(i), int(self._recorded.n_output[i])


class Fitted:
    """Draws requests: lengths from recorded requests, experts from distributions fitted to them.

    In each layer a request's shares of experts are Dirichlet distributed around the shares of all requests. The
    concentration makes them differ between requests as much as in the recorded requests. A token uses each expert with
    a probability in proportion to its share, at most 1.
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
    """Fits a Dirichlet distribution of the requests' shares and returns its concentration, float64[n_layers].

    It is infinite if requests differ no more than tokens do.

    The fit uses moments. The counts of a request of n uses are Dirichlet-multinomial. Their mean squared distance from
    the mean shares, divided by that of a multinomial, is therefore 1 + (n - 1) / (1 + concentration).
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
    """Draws different experts for each token: uint16[n_tokens, n_layers, n_used].

    A token uses an expert with probability n_used * share, at most 1; the excess goes to the other experts. Systematic
    sampling gives exactly these probabilities. `shares` is float64[n_layers, n_expert].
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
    """Returns probabilities in proportion to shares, at most 1, with the sum n_used in each row."""
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
    """Draws a Poisson process of `rate` requests per second: float64[n], ascending, in seconds below duration."""
    times = np.empty(0)
    while not len(times) or times[-1] < duration:
        gaps = rng.exponential(1 / rate, max(16, int(rate * duration)))
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
    return times[times < duration]


@dataclass(frozen=True)
class Arrivals:
    """Arrivals: poisson:0.2 is requests per second of each server; poisson:5s is the mean time between two."""

    rate: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Parses the text of an option. PyorchError: the text is not valid."""
        kind, _, value = text.strip().partition(":")
        try:
            number = float(value.removesuffix("s"))
            rate = 1 / number if value.endswith("s") else number
        except (ValueError, ZeroDivisionError):
            rate = 0.0
        if kind != "poisson" or not 1e-9 < rate < 1e9:
            raise PyorchError(f'arrivals "{text}" are not understood: use poisson:0.2 for 0.2 requests a second, '
                              "or poisson:5s for one in 5 seconds")
        return cls(rate, text.strip())
