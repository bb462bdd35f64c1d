"""Ghosts from a trace: for each expert a mean output and a linear map of low rank of the router's input.

The samples of an expert are the router inputs x that selected it, its outputs y on them, and the squares w^2 of its
routing weights, by which an error there increases the squared error of the layer. Samples in which the expert is among
the heaviest of a token do not count, because layers wait for these experts anyway; they would otherwise count most. A
ghost of rank r is the reduced-rank ridge regression of y on x, both centered at their weighted means: with X and Y the
rows w (x - mean) and w (y - mean), and the singular value decomposition X = Q S R, the matrix of rank r with the least
|Y - X B^T|^2 + lambda |B|^2 is the projection of the one of full rank, B = Y^T Q diag(S / (S^2 + lambda)) R, on the
first r right singular vectors of diag(S / sqrt(S^2 + lambda)) Q^T Y. With fewer samples than inputs, Q S R has as many
rows as there are samples, which is the dual form.

Cross-validation chooses lambda of a layer, and the rows of each expert of the model. Each expert first gets its mean.
Then the bytes go to the rows that reduce the error most for their size, weighted by how often the expert is absent from
a cache of half of the experts (Che's approximation, from the uses in the trace).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pyorch.convert import expert_outputs
from pyorch.convert.expert_outputs import LayerExperts
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.ghosts import Ghosts, LayerGhosts, row_bytes
from pyorch.sizes import Amount, as_option, format_bytes
from pyorch.traces.file import Trace
from pyorch.traces.routers import expert_inputs
from pyorch.traces.routing_statistics import activation_counts, renormalized

SHARE = Amount(share=0.03)  # of the experts' bytes

MOST_ROWS = 64  # of a ghost, which must be small
_FOLDS = 5
LEAST_SAMPLES = 4  # an expert with fewer is fitted on the samples of other experts
_MOST_SAMPLES = 1024  # of one expert
_JUDGES = 4  # one of so many experts takes part in the choice of lambda
_RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # lambda, as multiples of the mean square of X's singular values

OnProgress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True)
class Settings:
    """The sizes of ghosts.

    Attributes:
        n_bytes: Of all ghosts.
        rank: Of each ghost, if useful. None: the rows that n_bytes allow are given to the experts that gain most.
        sacred: A token's experts of the highest weights, so many, need no ghost.

    Raises:
        PyorchError: A value is invalid.
    """

    n_bytes: Amount = SHARE
    rank: int | None = None
    sacred: int = 2

    def __post_init__(self) -> None:
        if self.rank is not None and not 0 <= self.rank <= MOST_ROWS:
            raise PyorchError(f"rank {self.rank} is not from 0 to {MOST_ROWS}")
        if self.sacred < 0:
            raise PyorchError(f"sacred {self.sacred} is below 0")


@dataclass(frozen=True)
class LayerReport:
    """The share of a layer's squared expert outputs, weighted, that ghosts do not predict, on held-out samples.

    Attributes:
        n_ghosts: Experts with a ghost.
        mean_rank: Of these ghosts.
        ridge: lambda.
        left_by_means: The share with means alone.
        left: The share with ghosts.
    """

    il: int
    n_expert: int
    n_ghosts: int
    mean_rank: float
    ridge: float
    left_by_means: float
    left: float


@dataclass(frozen=True)
class Built:
    """Ghosts, and their report."""

    ghosts: Ghosts
    layers: tuple[LayerReport, ...]
    expert_bytes: int


@dataclass(frozen=True)
class Samples:
    """Samples of one expert. inputs: float[n, n_in]; outputs: float[n, n_out]; weights: float[n], of squared errors."""

    inputs: np.ndarray
    outputs: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, which: np.ndarray) -> Samples:
        return Samples(self.inputs[which], self.outputs[which], self.weights[which])

    @property
    def energy(self) -> float:
        """Returns the weighted sum of the squared outputs."""
        return float(self.weights @ (self.outputs**2).sum(axis=1))


class Regression:
    """The ridge regression of one expert's outputs on its inputs, of any lambda and rank. REQUIRES: a sample."""

    def __init__(self, samples: Samples) -> None:
        weights = samples.weights / samples.weights.sum()
        self._x_mean, self._y_mean = weights @ samples.inputs, weights @ samples.outputs
        roots = np.sqrt(weights)[:, None]
        q, self._s, self._r = _thin_svd(roots * (samples.inputs - self._x_mean))
        self._qy = q.T @ (roots * (samples.outputs - self._y_mean))

    def ridge(self, strength: float) -> float:
        """Returns lambda, given as a multiple of the mean square of the inputs' singular values."""
        return strength * float((self._s**2).mean()) if len(self._s) else 0.0

    def directions(self, ridge: float) -> np.ndarray:
        """Returns float[n_out, r]: orthonormal directions in which the outputs are predicted best."""
        gains = self._s / np.sqrt(self._s**2 + ridge)
        return _thin_svd(gains[:, None] * self._qy)[2].T

    def map(self, ridge: float, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns mean float[n_out], down float[r, n_in] and up float[r, n_out], r at most rank.

        y is about mean + up^T down x.
        """
        up = self.directions(ridge)[:, :rank]
        down = (up.T @ self._qy.T) * (self._s / (self._s**2 + ridge)) @ self._r
        return self._y_mean - up @ (down @ self._x_mean), down, up.T

    def left(self, held_out: Samples, ridges: list[float]) -> np.ndarray:
        """Returns float[len(ridges)]: the weighted sum of squares that maps of full rank leave of other samples."""
        foretold = (held_out.inputs - self._x_mean) @ self._r.T
        y = held_out.outputs - self._y_mean
        maps = (self._qy * (self._s / (self._s**2 + ridge))[:, None] for ridge in ridges)
        return np.array([held_out.weights @ ((y - foretold @ b) ** 2).sum(axis=1) for b in maps])

    def left_by_rank(self, held_out: Samples, ridge: float, most: int) -> np.ndarray:
        """Returns float[most + 1]: the same for maps of rank 0, 1, ... Impossible ranks leave the same as the last."""
        p = self.directions(ridge)[:, :most]
        b = self._qy * (self._s / (self._s**2 + ridge))[:, None]
        foretold = (held_out.inputs - self._x_mean) @ self._r.T @ (b @ p)
        y = held_out.outputs - self._y_mean
        true = y @ p
        steps = held_out.weights @ (foretold**2 - 2 * foretold * true)
        left = held_out.weights @ (y**2).sum(axis=1) + np.concatenate([[0.0], np.cumsum(steps)])
        return np.concatenate([left, np.full(most + 1 - len(left), left[-1])])


def _thin_svd(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the singular value decomposition, without singular values near 0.

    Uses the smaller matrix of products, which is several times as fast, and exact enough with a ridge.
    """
    wide = a.shape[0] <= a.shape[1]
    squares, vectors = np.linalg.eigh(a @ a.T if wide else a.T @ a)
    kept = (squares > max(float(squares.max(initial=0)), 1e-60) * 1e-10).nonzero()[0][::-1]
    s, vectors = np.sqrt(squares[kept]), vectors[:, kept]
    return (vectors, s, (vectors / s).T @ a) if wide else (a @ (vectors / s), s, vectors.T)


def folds(samples: Samples) -> Iterator[tuple[Samples, Samples]]:
    """Yields samples to fit on, and samples to hold out. Each sample is held out once."""
    n = min(_FOLDS, len(samples))
    fold = np.random.default_rng(0).permutation(len(samples)) % n
    for held_out in range(n):
        yield samples[fold != held_out], samples[fold == held_out]


def build(
    model_map: ModelMap, trace: Trace, settings: Settings = Settings(), on_progress: OnProgress | None = None
) -> Built:
    """Fits the ghosts of a model to its outputs on the router inputs that a trace sampled.

    Raises:
        FormatError: The trace belongs to another model, or is damaged.
        PyorchError: The trace has no router inputs, pyorch does not know how the experts compute, or the bytes are too
            few.
    """
    _check(model_map, trace)
    report = on_progress or (lambda *_: None)
    n_experts = sum(layer.n_expert for layer in model_map.layers)
    fits = []
    done = 0
    for layer in model_map.layers:
        fit = LayerFit(model_map, trace, layer.il, settings.sacred)
        for _ in fit.steps():
            done += 1
            report("fitting", done // 2, n_experts)  # each expert is visited twice
        fits.append(fit)
    expert_bytes = sum(layer.n_expert * layer.expert_bytes for layer in model_map.layers)
    if settings.rank is not None:
        for fit in fits:
            allowed = fit.left[:, : settings.rank + 1]
            fit.ranks = np.where(allowed.min(axis=1) < fit.energies, allowed.argmin(axis=1), -1)
    else:
        divide(fits, settings.n_bytes.of(expert_bytes))
    layers = {}
    for done, fit in enumerate(fits):
        report("writing down", done, len(fits))
        layers[fit.il] = fit.ghosts()
    ghosts = Ghosts(layers, len(trace.inputs[0]), settings.sacred)
    return Built(ghosts, tuple(fit.report() for fit in fits), expert_bytes)


@dataclass(frozen=True)
class _Chosen:
    """The samples to fit an expert on. rows: int64[n] of the router inputs; weights: as in Samples."""

    rows: np.ndarray
    weights: np.ndarray

    def samples(self, inputs: np.ndarray, outputs: np.ndarray) -> Samples:
        """Returns the samples. inputs: of all rows; outputs: of the chosen ones."""
        return Samples(inputs[self.rows].astype(np.float64), outputs.astype(np.float64), self.weights)


class LayerFit:
    """The fit of one layer: the unpredicted share of its experts' outputs by rank, then its ghosts.

    Outputs are kept while the layer is computed, and computed again for the ghosts, because the outputs of all layers
    take many times the memory of ghosts.
    """

    def __init__(self, model_map: ModelMap, trace: Trace, il: int, sacred: int) -> None:
        self.il = il
        self._experts = LayerExperts(model_map, il)
        index = trace.layer_index(il)
        records, inputs = trace.inputs
        self._trace_inputs = expert_inputs(model_map, il, inputs[:, index])
        chosen = trace.records[records]
        experts = chosen["experts"][:, index].astype(np.int64)
        if experts.max() >= self.n_expert:
            raise FormatError(f"{trace.path} is damaged: it names expert {experts.max()} of {self.n_expert}")
        probs = renormalized(chosen["probs"][:, index])
        if not (np.isfinite(self._trace_inputs).all() and np.isfinite(probs).all()):
            raise FormatError(f"{trace.path} does not hold numbers only, in block {il}: record it again")
        order = np.argsort(-probs, axis=1, kind="stable")
        self.weights = np.zeros((len(records), self.n_expert))
        np.put_along_axis(self.weights, experts, probs, axis=1)
        self._sacred = np.zeros(self.weights.shape, bool)
        np.put_along_axis(self._sacred, np.take_along_axis(experts, order[:, :sacred], axis=1), True, axis=1)
        self.samples: list[_Chosen] = []
        self._n_in, self._n_out = self._trace_inputs.shape[1], 0
        self.ridge = 0.0  # as a multiple
        self.left = np.zeros((self.n_expert, 0))  # [n_expert, rank + 1], as a share of the layer's squared output
        self.ranks = np.full(self.n_expert, -1)
        self.absence = absence(activation_counts(trace.records["experts"][:, index], self.n_expert) / len(trace))

    @property
    def n_expert(self) -> int:
        return self._experts.n_expert

    @property
    def base_bytes(self) -> int:
        return self.n_expert * row_bytes(self._n_out)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self._n_in) + row_bytes(self._n_out)

    def steps(self) -> Iterator[None]:
        """Visits all experts twice."""
        inputs = np.asarray(self._trace_inputs, np.float32)
        outputs: list[np.ndarray] = []  # by expert, of its chosen rows
        output = np.zeros((len(inputs), 0))  # of the layer, for inputs with samples of all their experts
        missing = (self.weights > 0).sum(axis=1)
        left = np.zeros(len(_RIDGES))
        lights = self.weights[(self.weights > 0) & ~self._sacred]
        rare = float(np.square(lights if len(lights) else self.weights[self.weights > 0]).mean())
        for expert in range(self.n_expert):
            selected = self.weights[:, expert].nonzero()[0]
            few = len(selected) < LEAST_SAMPLES
            candidates = np.arange(len(inputs)) if few else selected
            rows = _spread(candidates)
            weights = self.weights[rows, expert]
            given = self._experts.outputs(expert, inputs[rows])
            if not output.size:
                self._n_out = given.shape[1]
                output = np.zeros((len(inputs), self._n_out))
            if not few:
                output[rows] += weights[:, None] * given
                missing[rows] -= 1
            light = ~self._sacred[rows, expert]
            kept = light if not few and light.sum() >= LEAST_SAMPLES else slice(None)
            # A sample represents omitted ones; all samples of a rare expert represent its few selections.
            stands_for = np.full(len(rows), rare * (len(selected) + 0.5) / len(rows)) if few else (
                weights**2 * (len(candidates) / len(rows)))
            chosen = _Chosen(rows[kept], stands_for[kept])
            self.samples.append(chosen)
            outputs.append(given[kept])
            samples = chosen.samples(inputs, given[kept])
            judges = len(samples) > 1 and expert % _JUDGES == 0
            for fitted, held_out in folds(samples) if judges else ():
                regression = Regression(fitted)
                left += regression.left(held_out, [regression.ridge(strength) for strength in _RIDGES])
            yield
        self.ridge = _RIDGES[int(left.argmin())]
        most = min(MOST_ROWS, self._n_in, self._n_out)
        whole = missing == 0 if (missing == 0).any() else slice(None)
        squared = max(float((output[whole] ** 2).sum(axis=1).mean()), np.finfo(np.float32).tiny)
        self.left = np.zeros((self.n_expert, most + 1))
        self.energies = np.zeros(self.n_expert)
        for expert, chosen in enumerate(self.samples):
            samples = chosen.samples(inputs, outputs[expert])
            self.energies[expert] = samples.energy
            for fitted, held_out in folds(samples) if len(samples) > 1 else ():
                regression = Regression(fitted)
                self.left[expert] += regression.left_by_rank(held_out, regression.ridge(self.ridge), most)
            if len(samples) < 2:
                self.left[expert] = samples.energy
            yield
        self.left /= squared
        self.energies /= squared
        self._norms = np.array([chosen.weights.sum() for chosen in self.samples])

    def leaves(self, expert: int, rank: int) -> float:
        """Returns the unpredicted share of the weighted squares of its samples; rank -1: without a ghost."""
        return self.energies[expert] if rank < 0 else self.left[expert, rank]

    def ghosts(self) -> LayerGhosts:
        inputs, n_in, n_out = np.asarray(self._trace_inputs, np.float32), self._n_in, self._n_out
        mean = np.zeros((self.n_expert, n_out), np.float32)
        downs, ups = [np.zeros((0, n_in), np.float32)], [np.zeros((0, n_out), np.float32)]
        ranks = self.ranks.astype(np.int32)
        for expert, chosen in enumerate(self.samples):
            if ranks[expert] < 0:
                continue
            regression = Regression(chosen.samples(inputs, self._experts.outputs(expert, inputs[chosen.rows])))
            mean[expert], down, up = regression.map(regression.ridge(self.ridge), int(ranks[expert]))
            ranks[expert] = len(down)
            # Equal sizes on both sides, so that 16 bits have room for either.
            sizes = np.sqrt(np.linalg.norm(down, axis=1, keepdims=True))
            scale = np.where(sizes > 0, sizes, 1)
            downs.append((down / scale).astype(np.float32))
            ups.append((up * scale).astype(np.float32))
        norms = np.maximum(self._norms, np.finfo(np.float32).tiny)
        left = np.array([self.leaves(expert, int(rank)) for expert, rank in enumerate(self.ranks)])
        return LayerGhosts(ranks, mean, np.concatenate(downs), np.concatenate(ups),
                           np.maximum(left / norms, 0).astype(np.float32), (self.energies / norms).astype(np.float32))

    def report(self) -> LayerReport:
        has = self.ranks >= 0
        left = sum(self.leaves(expert, int(rank)) for expert, rank in enumerate(self.ranks))
        all_of_it = max(float(self.energies.sum()), np.finfo(np.float32).tiny)
        by_means = float(np.minimum(self.left[:, 0], self.energies).sum())
        return LayerReport(self.il, self.n_expert, int(has.sum()), float(self.ranks[has].mean()) if has.any() else 0.0,
                           self.ridge, by_means / all_of_it, float(left) / all_of_it)


def absence(uses: np.ndarray, rate: float = 0.5) -> np.ndarray:
    """Returns how often each expert is absent from a cache with a share `rate` of the experts: float64[n_expert].

    Che, Tung and Wang, "Hierarchical Web caching systems", 2002, eq. 5: exp(-u T) of its uses u for a token, with the T
    that fits the cache.
    """
    used = uses[uses > 0]
    if not len(used) or len(used) <= rate * len(uses):  # all used experts have room
        return np.where(uses > 0, np.exp(-1.0), 1.0)
    low, high = 0.0, 1.0
    while (1 - np.exp(-uses * high)).mean() < rate:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-uses * middle)).mean() < rate else (low, middle)
    return np.exp(-uses * high)


def divide(fits: list[LayerFit], n_bytes: int) -> None:
    """Sets the ranks of all ghosts, the steepest descents per byte first, on the lower convex hull of each curve.

    Raises:
        PyorchError: The bytes are too few.
    """
    room = n_bytes - sum(fit.base_bytes for fit in fits)
    if room < 0:
        needed = n_bytes - room
        raise PyorchError(f"{format_bytes(n_bytes)} are too few for the ghosts of this model: their means alone need "
                          f"{format_bytes(needed, round_up=True)}: allow {as_option(needed)}")
    queue: list[tuple[float, int, int, int]] = []  # gain per byte (negative), fit, expert, rank

    def offer(at: int, expert: int, rank: int) -> None:
        """Queues the best step from a rank among the steps that have room."""
        most = min(fits[at].left.shape[1] - 1, rank + room // fits[at].row_bytes)
        left = fits[at].left[expert]
        gains = (left[rank] - left[rank + 1 : most + 1]) / np.arange(1, most + 1 - rank)
        if len(gains) and gains.max() > 0:
            further = int(gains.argmax())
            gain = fits[at].absence[expert] * float(gains[further]) / fits[at].row_bytes
            heapq.heappush(queue, (-gain, at, expert, rank + 1 + further))

    for at, fit in enumerate(fits):
        fit.ranks = np.where(fit.left.min(axis=1) < fit.energies, 0, -1)
        for expert in np.flatnonzero(fit.ranks == 0):
            offer(at, int(expert), 0)
    while queue:
        _, at, expert, rank = heapq.heappop(queue)
        fit = fits[at]
        needed = (rank - int(fit.ranks[expert])) * fit.row_bytes
        if needed <= room:
            room -= needed
            fit.ranks[expert] = rank
        offer(at, expert, int(fit.ranks[expert]))
    for fit in fits:  # a mean alone may be worse than no ghost, although rows would have made it better
        worse = (fit.ranks >= 0) & (fit.left[np.arange(fit.n_expert), np.maximum(fit.ranks, 0)] >= fit.energies)
        fit.ranks[worse] = -1


def _spread(rows: np.ndarray) -> np.ndarray:
    """Returns at most _MOST_SAMPLES rows, evenly."""
    if len(rows) <= _MOST_SAMPLES:
        return rows
    return rows[np.linspace(0, len(rows) - 1, _MOST_SAMPLES).astype(np.int64)]


def _check(model_map: ModelMap, trace: Trace) -> None:
    if not model_map.layers:
        raise PyorchError(f"{model_map.path} has no routed experts, so none can have a ghost")
    trace.check(model_map)
    expert_outputs.check_known(model_map)
    if not len(trace.inputs[0]):
        raise PyorchError(f"{trace.path} has no router inputs to fit ghosts to: record it with --inputs 1000")
