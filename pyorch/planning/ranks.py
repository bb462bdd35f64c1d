"""Experts by rank: how often a token needs the most used expert, the next one, and so on, whichever they are.

The popular experts change from text to text; how unevenly experts are used changes little. So a layer is described by
inclusion probabilities by rank (ZipMoE, section 3.4), and tokens by the distribution of largest entropy with these
probabilities: each token takes n_used experts, a set S with a probability in proportion to the product of weights w_r
over S (appendix D). With selection probabilities q_r = w_r / (1 + w_r), this is n_expert independent draws, given that
they take n_used experts in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyorch.errors import PyorchError

HALF_LIFE = 128.0  # tokens, as for the ranks by which the runtime chooses forms (residency/pools.cpp)

_TOLERANCE = 1e-9  # of an inclusion probability
_MAX_ITERATIONS = 2000

# The used share of a step of the fit. Draws of a fixed number of experts are negatively correlated, so a step leaves
# 1 - _STEP * x of the error, with x from 0 to 2 (Gershgorin); x is near 1 for many experts.
_STEP = 0.75


def inclusion_by_rank(experts: np.ndarray, n_expert: int, half_life: float = HALF_LIFE) -> np.ndarray:
    """Returns inclusion probabilities by rank f_r, float64[n_layers, n_expert], the most used first.

    The sum of a row is n_used. Before each token, the experts of a layer are ranked by their fading uses so far; then
    the ranks of the token's experts are counted. A cache in the order of frequencies would meet exactly these ranks, so
    they use no knowledge of the future.

    Args:
        experts: integer[n_tokens, n_layers, n_used], in the order of use. Experts of a token in a layer are distinct.
        n_expert: Experts of a layer.
        half_life: Tokens after which a use counts half.

    Raises:
        PyorchError: There are no tokens.
    """
    n_tokens, n_layers, n_used = experts.shape
    if not n_tokens:
        raise PyorchError("there are no tokens to rank experts by")
    experts = experts.astype(np.int64)
    layers = np.arange(n_layers)[:, None]
    frequency = np.zeros((n_layers, n_expert))
    counts = np.zeros((n_layers, n_expert))
    ahead = np.arange(n_expert)
    growth, use = 2.0 ** (1 / half_life), 1.0
    for chosen in experts:
        own = frequency[layers, chosen]
        more = frequency[:, None, :] > own[:, :, None]
        # Among equally frequent experts, the lower number is first.
        tied = (frequency[:, None, :] == own[:, :, None]) & (ahead < chosen[:, :, None])
        counts[layers, (more | tied).sum(axis=2)] += 1
        # Later uses count more, which equals fading all earlier ones.
        frequency[layers, chosen] += use
        use *= growth
        if use > 1e100:
            frequency /= use
            use = 1.0
    return smoothed(counts, n_tokens, n_used)


def inclusion_of_counts(counts: np.ndarray, n_used: int) -> np.ndarray:
    """Returns the same from use counts [n_layers, n_expert] alone: experts ranked by all their uses.

    Raises:
        PyorchError: A layer was never used, or counts are not finite, or negative.
    """
    counts = np.sort(np.asarray(counts, np.float64), axis=1)[:, ::-1]
    n_tokens = counts.sum(axis=1, keepdims=True) / n_used
    if not np.isfinite(counts).all() or counts.min() < 0 or n_tokens.min() <= 0:
        raise PyorchError("use counts by which experts are ranked are numbers from 0 on, some of them above")
    return smoothed(counts, n_tokens, n_used)


def inclusion_of_batch(inclusion: np.ndarray, n: int) -> np.ndarray:
    """Returns inclusion probabilities by rank for n tokens together: 1 - (1 - f_r)^n, because they draw independently.

    Tokens of different sequences share only popular experts, which the ranks already contain.
    """
    return 1 - (1 - inclusion) ** n


def fading_uses(counts: np.ndarray, n_tokens: int) -> np.ndarray:
    """Returns the faded use counts at the end of n_tokens, if uses are spread evenly; the shape of the counts."""
    return counts / n_tokens * (1 - 2 ** (-n_tokens / HALF_LIFE)) / (1 - 2 ** (-1 / HALF_LIFE))


def use_counts(experts: np.ndarray, n_expert: int) -> np.ndarray:
    """Returns the uses of each expert, int64[n_layers, n_expert]. experts: integer[n_tokens, n_layers, n_used]."""
    return np.stack([np.bincount(experts[:, layer].ravel(), minlength=n_expert) for layer in range(experts.shape[1])])


def even_inclusion(n_experts: Sequence[int], n_used: int) -> np.ndarray:
    """Returns the assumption without any knowledge: all experts of a layer are used equally.

    Rows of layers with fewer experts end with zeros, as everywhere.
    """
    n_expert = np.array(n_experts)[:, None]
    return np.where(np.arange(n_expert.max()) < n_expert, n_used / n_expert, 0)


def smoothed(counts: np.ndarray, n_tokens: np.ndarray | int, n_used: int) -> np.ndarray:
    """Returns probabilities of counts, as if one more token had used all ranks evenly, so that none is 0 or 1.

    The sum of a row stays n_used. Ranks are sorted: the k-th most frequent has the k-th highest probability.
    """
    even = n_used / counts.shape[1]
    return np.sort(np.minimum((counts + even) / (n_tokens + 1), 1.0), axis=1)[:, ::-1]


def selection_probabilities(inclusion: np.ndarray, n_used: int) -> np.ndarray:
    """Returns the selection probabilities q_r, float64[n_layers, n_expert], that give inclusion probabilities f_r.

    By iterative proportional fitting (eq. 24), on odds: w_r is multiplied by the odds of f_r over the odds that the
    present weights give. This also converges fast for experts that are nearly always taken. Weights are kept at the
    scale at which the draws take n_used experts on average, so that no polynomial of them overflows.

    Args:
        inclusion: In [0, 1], with the sum n_used in each row. 0 or 1: the expert is never or always taken.
        n_used: Experts of a token.

    Raises:
        PyorchError: Rows have another sum, or the fit does not converge.
    """
    inclusion = np.asarray(inclusion, np.float64)
    n_expert = inclusion.shape[1]
    if (not np.isfinite(inclusion).all() or inclusion.min() < 0 or inclusion.max() > 1 + _TOLERANCE
            or np.abs(inclusion.sum(axis=1) - n_used).max() > 1e-6 * n_used):
        raise PyorchError(f"inclusion probabilities are from 0 to 1, and the sum of a layer's is {n_used}")
    # The fit excludes certain ranks: no finite odds give them.
    certain = inclusion >= 1 - _TOLERANCE
    never = inclusion <= 0
    free = ~(certain | never)
    with np.errstate(divide="ignore"):
        target = np.log(inclusion) - np.log1p(-np.minimum(inclusion, 1))
    log_w = np.where(free, target, np.where(certain, np.inf, -np.inf))
    for _ in range(_MAX_ITERATIONS):
        q = _scaled(log_w, free, inclusion)
        reached = inclusion_probabilities(q, n_used)
        error = np.abs(reached - inclusion).max()
        if error < _TOLERANCE or not free.any():
            return q
        with np.errstate(divide="ignore", invalid="ignore"):
            log_w = np.where(free, log_w + _STEP * (target - np.log(reached) + np.log1p(-reached)), log_w)
    raise PyorchError(f"selection probabilities of {n_used} of {n_expert} experts were not found: after "
                      f"{_MAX_ITERATIONS} steps an inclusion probability is {error:.1g} off")


def inclusion_probabilities(q: np.ndarray, n_used: int) -> np.ndarray:
    """Returns inclusion probabilities f_r, float64[n_layers, n_expert], from selection probabilities.

    f_r = q_r Pr(the others take n_used - 1) / Pr(all take n_used): eq. 24, with the elementary symmetric polynomials
    of eq. 23 divided by the product of (1 + w_r), which makes probabilities of them.
    """
    n_layers, n_expert = q.shape
    before = np.zeros((n_expert + 1, n_layers, n_used + 1))  # [i]: draws of ranks below i
    before[0, :, 0] = 1
    behind = np.zeros((n_expert + 1, n_layers, n_used + 1))  # [i]: draws of ranks from i on
    behind[n_expert, :, 0] = 1
    for i in range(n_expert):
        take_one(before[i], q[:, i, None], before[i + 1])
        take_one(behind[n_expert - i], q[:, n_expert - 1 - i, None], behind[n_expert - 1 - i])
    others = (before[:-1, :, :n_used] * behind[1:, :, n_used - 1 :: -1]).sum(axis=2)
    return q * others.T / before[-1, :, n_used, None]


def take_one(counts: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
    """One step of Algorithm 2: adds an expert, drawn with q, to the distribution [..., k + 1] of the number drawn."""
    np.multiply(counts, 1 - q, out=out)
    out[..., 1:] += counts[..., :-1] * q


def _scaled(log_w: np.ndarray, free: np.ndarray, inclusion: np.ndarray) -> np.ndarray:
    """Returns selection probabilities of weights, scaled so that their sum is that of the inclusion probabilities."""
    wanted = np.where(free, inclusion, 0).sum(axis=1)
    shift = np.zeros((len(log_w), 1))
    for _ in range(60):
        q = np.where(free, _sigmoid(log_w + shift), log_w > 0)
        free_q = np.where(free, q, 0)
        slope = (free_q * (1 - free_q)).sum(axis=1)
        miss = wanted - free_q.sum(axis=1)
        if np.abs(miss).max() < 1e-9:
            break
        # Newton's step; a larger shift than a factor e could leave the range of the slope.
        step = np.divide(miss, slope, out=np.zeros_like(miss), where=slope > 1e-300)
        shift += np.clip(step, -1, 1)[:, None]
    return q


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))
