"""How long a layer waits until all experts of a token can be computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The forms that experts are kept in, each in a pool of its own, in the order of ranks: whole; all planes, packed; the
# packed planes of signs and mantissas (SM); the packed planes of exponents (E).
POOLS = "FCSE"
MISSED = len(POOLS)  # behind the pools: experts that are in none


@dataclass(frozen=True)
class Delays:
    """What it takes to recover one matrix of an expert, in seconds.

    sm_read: to read its signs and mantissas (u); e_read: one shard of its exponents (v); decode: to decompress one
    shard and to merge it with its signs and mantissas (c). n_workers: that decode at once (L); n_shards: of a matrix
    (K); n_matrices: of an expert (n).
    """

    sm_read: float
    e_read: float
    decode: float
    n_workers: int
    n_shards: int
    n_matrices: int


def makespan(delays: Delays, hits: np.ndarray) -> np.ndarray:
    """Seconds from a router's decision until its experts can be computed with, for counts of experts (Algorithm 3).

    The longer of two: all reads, one after another; all decoding, divided among the workers, where a shard that is
    read first takes them as long as its read, too.

    Args:
        hits: [..., 5], numbers of a token's experts that are in each of POOLS, and in none.
    """
    hits = np.asarray(hits)
    full, compressed, sm, e, missed = np.moveaxis(hits, -1, 0)
    n, shards = delays.n_matrices, delays.n_matrices * delays.n_shards
    read_e = shards * delays.e_read * (sm + missed)
    reads = n * delays.sm_read * (e + missed) + read_e
    decodes = shards * delays.decode * (compressed + sm + e + missed)
    return np.maximum(reads, (read_e + decodes) / delays.n_workers)


def hit_patterns(n_used: int, pools: Sequence[int]) -> np.ndarray:
    """All ways in which n_used experts fall into some pools and into none: integer[n, 5], other pools 0."""
    if not pools:
        return np.array([[0] * MISSED + [n_used]])
    patterns = []
    for n in range(n_used + 1):
        rest = hit_patterns(n_used - n, pools[1:])
        rest[:, pools[0]] = n
        patterns.append(rest)
    return np.concatenate(patterns)
