"""The division of memory among forms of experts with the shortest waits (ZipMoE, Algorithm 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.errors import PyorchError
from pyorch.planning.makespan import MISSED, POOLS, Delays, hit_patterns, makespan
from pyorch.planning.ranks import inclusion_of_batch, selection_probabilities, take_one

STEP = 0.05
LEAST_STEP = 0.01  # all divisions are in memory: 177,000 in this step, and 1000 times as many in a tenth of it

# Divisions with other forms than whole experts count as this much longer, in a replay and by estimate; so one is taken
# only if it gains more. In runs without prefetching they gain as much as replays show. Prefetching, the default, hides
# reads of whole experts behind computing, but hides no decoding if all cores compute: a division with 0.89 of the waits
# decoded 1.20 times as fast without prefetching, and 0.91 times with it (docs/measurements/packs.md).
HANDICAP = 1.4

_CHUNK = 1 << 20  # probabilities of patterns computed at once
_WHOLE = (1.0, 0.0, 0.0, 0.0)  # shares: all memory for whole experts
_FINALIST_COST = 1.15  # largest cost of a finalist, relative to the best
_APART = 0.15  # least difference of a pool between two finalists, as a share of the memory
_FIRST = 16  # candidates whose full cost is computed first, so that others can be given up early


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer's experts.

    Attributes:
        n_expert: Experts of the layer.
        form_bytes: Memory of one expert in each of POOLS, 0 for forms that do not exist.
        delays: The times to recover packed experts.
        plain_read: Seconds to read one expert of the model, which needs no decoding. None if only the pack has them.
    """

    n_expert: int
    form_bytes: tuple[int, int, int, int]
    delays: Delays
    plain_read: float | None


@dataclass(frozen=True)
class Split:
    """A division of memory, with its expected cost.

    Attributes:
        shares: The share of memory for each of POOLS.
        compressed: Experts are read packed. Otherwise they are read as the model has them, all memory for whole ones.
        capacities: int64[n_layers, 4], experts in each pool.
        hits: float64[n_layers, 5], the mean number of a token's experts in each pool and in none.
        makespans: float64[n_layers], mean seconds that a layer of a token waits (Algorithm 3).
        batch: Tokens of different sequences computed together.
    """

    shares: tuple[float, ...]
    compressed: bool
    capacities: np.ndarray
    hits: np.ndarray
    makespans: np.ndarray
    batch: int = 1

    @property
    def makespan(self) -> float:
        """Seconds that a token waits, or all tokens of a batch."""
        return float(self.makespans.sum())

    @property
    def is_mixed(self) -> bool:
        """Whether experts are kept in other forms than whole."""
        return self.shares != _WHOLE


@dataclass(frozen=True)
class Planned:
    """The result of the search.

    Attributes:
        best: The best division.
        packed_best: The best division with packed experts.
        plain: All memory for whole experts, read as the model has them. None if the model lacks them.
        finalists: Some of the best divisions with packed experts, different from each other.
        n_splits: The number of divisions.
        n_evaluated: Divisions whose full cost was computed; all others certainly cost more.
    """

    best: Split
    packed_best: Split
    plain: Split | None
    finalists: tuple[Split, ...]
    n_splits: int
    n_evaluated: int


class Planner:
    """Plans for one model on one machine.

    Args:
        inclusion: float64[n_layers, n_expert], a token's probabilities by rank (pyorch.planning.ranks).
        n_used: Experts of a token in a layer.
        layers: One for each row of `inclusion`.
        least_full: Bytes reserved for whole experts; the shares divide the rest.
        batch: Tokens of different sequences decoded together. An expert that several of them need is recovered once.
            The number of their experts varies, so the makespan of mean hits is a lower bound of the mean wait.

    Raises:
        PyorchError: The probabilities are not valid.
    """

    def __init__(
        self, inclusion: np.ndarray, n_used: int, layers: Sequence[LayerCosts], least_full: int = 0, batch: int = 1
    ) -> None:
        assert len(inclusion) == len(layers)
        self.n_used, self.layers, self.least_full, self.batch = n_used, tuple(layers), least_full, batch
        self.inclusion = inclusion if batch == 1 else inclusion_of_batch(inclusion, batch)
        self.q = selection_probabilities(inclusion, n_used) if batch == 1 else None

    def plan(
        self, budget: int, pools: str = POOLS, step: float = STEP, reserved: int = 0, handicap: float = 1.0,
        n_finalists: int = 0,
    ) -> Planned:
        """Returns the best division of a budget among some of POOLS.

        All candidates are ordered by a lower bound of their cost, the makespan of mean hits: makespan() is convex, so
        the mean is no less (Jensen). Then layers are computed one after the other. A candidate is given up when its
        cost so far, plus its bound for the other layers, exceeds the full cost of another one.

        Args:
            budget: Bytes.
            pools: The pools to use.
            step: The step of the shares.
            reserved: Bytes of the budget through which packed experts are read, in no pool.
            handicap: The factor of the cost of divisions that do not only have whole experts.
            n_finalists: The largest number of finalists.

        Raises:
            PyorchError: The pools are unknown, or the step is not from LEAST_STEP to 1.
        """
        shares = _grid(pools, step)
        capacities = self._capacities(shares, budget - reserved)
        ends = self._ends(capacities)
        _, distinct = np.unique(ends.reshape(len(ends), -1), axis=0, return_index=True)
        distinct = np.sort(distinct)  # of equal divisions, the one with most in the first pools
        shares, capacities, ends = shares[distinct], capacities[distinct], ends[distinct]
        bounds = self._bounds(ends)
        costs, makespans = bounds.sum(axis=1), bounds
        if self.batch == 1:
            patterns = self._patterns(map(POOLS.index, pools))
            order = np.argsort(costs, kind="stable")
            first, others = order[:_FIRST], order[_FIRST:]
            costs, makespans = np.full(len(ends), np.inf), bounds.copy()
            costs[first], makespans[first] = self._exact(ends[first], bounds[first], patterns, np.inf)
            if len(others):
                limit = costs.min() * (_FINALIST_COST if n_finalists else 1)
                costs[others], makespans[others] = self._exact(ends[others], bounds[others], patterns, limit)

        def split(i: int) -> Split:
            return Split(tuple(float(share) for share in shares[i]), True, capacities[i],
                         mean_hits(self.inclusion, ends[i]), makespans[i], self.batch)

        packed, cost = split(int(np.argmin(costs))), float(costs.min())
        if packed.is_mixed:
            cost *= handicap
            if "F" in pools and (whole := self.cost(_WHOLE, budget - reserved)).makespan <= cost:
                packed, cost = whole, whole.makespan
        plain = self.plain(budget)
        finalists = tuple(map(split, _apart(shares, costs, n_finalists)))
        return Planned(packed if plain is None or cost < plain.makespan else plain, packed, plain, finalists,
                       len(ends), int(np.isfinite(costs).sum()))

    def cost(self, shares: Sequence[float], budget: int) -> Split:
        """Returns a given division of a budget with its cost. shares: one for each of POOLS."""
        capacities = self._capacities(np.array([shares], np.float64), budget)
        ends = self._ends(capacities)
        makespans = self._bounds(ends)
        if self.batch == 1:
            patterns = self._patterns(pool for pool, share in enumerate(shares) if share)
            _, makespans = self._exact(ends, np.zeros((1, len(self.layers))), patterns, np.inf)
        return Split(tuple(shares), True, capacities[0], mean_hits(self.inclusion, ends[0]), makespans[0], self.batch)

    def plain(self, budget: int) -> Split | None:
        """Returns the division with all memory for whole experts of the model; None if the model lacks them."""
        if any(layer.plain_read is None for layer in self.layers):
            return None
        capacities = self._capacities(np.array([_WHOLE]), budget)[0]
        hits = mean_hits(self.inclusion, self._ends(capacities))
        reads = np.array([layer.plain_read for layer in self.layers])
        return Split(_WHOLE, False, capacities, hits, reads * hits[:, -1], self.batch)

    def _bounds(self, ends: np.ndarray) -> np.ndarray:
        """Returns float64[n_splits, n_layers], the makespans of mean hits."""
        return np.stack([makespan(layer.delays, hits) for layer, hits
                         in zip(self.layers, np.moveaxis(mean_hits(self.inclusion, ends), 1, 0))], axis=1)

    def _patterns(self, pools: Iterable[int]) -> np.ndarray:
        return hit_patterns(self.n_used, sorted({*pools, 0} if self.least_full else set(pools)))

    def _capacities(self, shares: np.ndarray, budget: int) -> np.ndarray:
        """Returns int64[n_splits, n_layers, 4], experts. Each layer has memory in proportion to all its whole experts.

        Memory for a form is divided among the layers that have this form.
        """
        sizes = np.array([layer.form_bytes for layer in self.layers], np.float64)
        n_expert = np.array([layer.n_expert for layer in self.layers])
        wholes = np.where(sizes > 0, (n_expert * sizes[:, 0])[:, None], 0)
        of_layer = budget * wholes / np.maximum(wholes.sum(axis=0), 1)
        sizes[sizes == 0] = np.inf
        full = np.maximum(shares[:, :1], min(1.0, self.least_full / budget))
        others = shares[:, 1:].sum(axis=1, keepdims=True)
        rest = np.divide(1 - full, others, out=np.zeros_like(full), where=others > 0)
        given = np.concatenate([np.where(others > 0, full, 1), rest * shares[:, 1:]], axis=1)
        if self.batch > 1:  # experts in use at one moment come in addition, and have no rank
            given[:, :1] = np.where(others > 0, np.maximum(0.0, full - self.least_full / budget), 1)
        # A share of 7 experts of 0.999999999 is one expert.
        capacities = np.floor(given[:, None, :] * of_layer / sizes + 1e-9).astype(np.int64)
        return np.minimum(capacities, n_expert[:, None])

    def _ends(self, capacities: np.ndarray) -> np.ndarray:
        n_expert = np.array([layer.n_expert for layer in self.layers])
        return np.minimum(np.cumsum(capacities, axis=-1), n_expert[:, None])

    def _exact(
        self, ends: np.ndarray, bounds: np.ndarray, patterns: np.ndarray, limit: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean costs of splits, inf for those above the limit, and makespans by layer."""
        makespans = bounds.copy()
        alive = np.flatnonzero(bounds.sum(axis=1) <= limit)
        rows = max(1, _CHUNK // len(patterns))
        for i, layer in enumerate(self.layers):
            if not len(alive):
                break
            counts = interval_counts(self.q[i], self.n_used)
            delays = makespan(layer.delays, patterns)
            same, inverse = np.unique(ends[alive, i], axis=0, return_inverse=True)
            means = np.concatenate([pattern_probabilities(counts, same[at : at + rows], patterns) @ delays
                                    for at in range(0, len(same), rows)])
            makespans[alive, i] = means[inverse.ravel()]
            alive = alive[makespans[alive].sum(axis=1) <= limit]
        costs = np.full(len(ends), np.inf)
        costs[alive] = makespans[alive].sum(axis=1)
        return costs, makespans


def _apart(shares: np.ndarray, costs: np.ndarray, n: int) -> list[int]:
    """Returns the best of shares [n_splits, 4] with finite costs, each different from the ones before."""
    chosen: list[int] = []
    for i in np.argsort(costs, kind="stable"):
        if len(chosen) == n or not np.isfinite(costs[i]):
            break
        if all(np.abs(shares[i] - shares[other]).max() > _APART - 1e-9 for other in chosen):
            chosen.append(int(i))
    return chosen


def _grid(pools: str, step: float) -> np.ndarray:
    """Returns float64[n_splits, 4]: all shares of some pools in steps, with the sum 1, first pools first."""
    if not pools or set(pools) - set(POOLS) or len(set(pools)) < len(pools):
        raise PyorchError(f'pools "{pools}" are not understood: name some of {", ".join(POOLS)}, each once')
    if not LEAST_STEP <= step <= 1:
        raise PyorchError(f"a step of {step:g} is none of the memory: use one from {LEAST_STEP:g} to 1")
    n_steps = max(1, round(1 / step))
    active = sorted(map(POOLS.index, pools))
    # The last pool gets the rest.
    patterns = hit_patterns(n_steps, active[:-1]).astype(np.float64)
    patterns[:, active[-1]] += patterns[:, -1]
    return patterns[::-1, :-1] / n_steps


# Numbers of a token's experts in each pool, if pools hold experts by rank.


def interval_counts(q: np.ndarray, n_used: int) -> np.ndarray:
    """Returns how many experts independent draws take of each interval of ranks, up to n_used (Algorithm 2, one layer).

    Args:
        q: float64[n_expert], selection probabilities by rank.

    Returns:
        float64[n_expert + 1, n_expert + 1, n_used + 1]: at [i, j, h] the probability of h of the ranks i to j - 1.
        For j < i it is 0.
    """
    n_expert = len(q)
    counts = np.zeros((n_expert + 1, n_expert + 1, n_used + 1))
    counts[np.arange(n_expert + 1), np.arange(n_expert + 1), 0] = 1
    for j in range(n_expert):
        take_one(counts[: j + 1, j], q[j], counts[: j + 1, j + 1])
    return counts


def pattern_probabilities(counts: np.ndarray, ends: np.ndarray, patterns: np.ndarray) -> np.ndarray:
    """Returns Pr(pattern | n_used experts in all), float64[n_splits, n_patterns] (section 3.4).

    Args:
        counts: The result of interval_counts().
        ends: integer[n_splits, 4], the rank after the last one of each pool; pools follow each other.
        patterns: The result of hit_patterns().
    """
    n_expert, n_used = counts.shape[1] - 1, counts.shape[2] - 1
    begins = np.concatenate([np.zeros((len(ends), 1), ends.dtype), ends], axis=1)
    ends = np.concatenate([ends, np.full((len(ends), 1), n_expert)], axis=1)
    joint = None
    for pool in range(MISSED + 1):
        if not patterns[:, pool].any():
            continue  # the interval is empty
        of_pool = counts[begins[:, pool], ends[:, pool]][:, patterns[:, pool]]
        joint = of_pool if joint is None else joint * of_pool
    return joint / counts[0, n_expert, n_used]


def mean_hits(inclusion: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the mean numbers of a token's experts in each pool and in none, float64[..., n_layers, 5].

    Args:
        inclusion: float64[n_layers, n_expert], by rank.
        ends: integer[..., n_layers, 4], as above.
    """
    up_to = np.concatenate([np.zeros((len(inclusion), 1)), np.cumsum(inclusion, axis=1)], axis=1)
    at = up_to[np.arange(len(inclusion))[:, None], ends]
    first, last = np.zeros((*ends.shape[:-1], 1)), np.broadcast_to(up_to[:, -1:], (*ends.shape[:-1], 1))
    return np.diff(np.concatenate([first, at, last], axis=-1), axis=-1)
