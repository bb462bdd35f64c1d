"""The time that a layer waits until all experts of a token can be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The forms of experts, each with its own pool, in the order of ranks: whole; compressed (all planes, packed); the
# packed planes of signs and mantissas (SM); the packed planes of exponents (E).
POOLS = "FCSE"
MISSED = len(POOLS)  # the index after the pools: experts in no pool


@dataclass(frozen=True)
class Delays:
    """The seconds to recover one matrix of an expert.

    Attributes:
        sm_read: Reads its signs and mantissas (u).
        e_read: Reads one shard of its exponents (v).
        decode: Decompresses one shard and merges it with its signs and mantissas (c).
        n_workers: Workers that decode at once (L).
        n_shards: Shards of a matrix (K).
        n_matrices: Matrices of an expert (n).
    """

    sm_read: float
    e_read: float
    decode: float
    n_workers: int
    n_shards: int
    n_matrices: int


def makespan(delays: Delays, hits: np.ndarray) -> np.ndarray:
    """Returns the seconds from a router's decision until its experts can be computed (Algorithm 3).

    This is the longer of two times: all reads, one after another; and all decoding divided among the workers, plus the
    read of a shard that must be read before it is decoded.

    Args:
        delays: The times of one matrix.
        hits: [..., 5], the numbers of a token's experts in each of POOLS, and in none.
    """
    hits = np.asarray(hits)
    full, compressed, sm, e, missed = np.moveaxis(hits, -1, 0)
    n, shards = delays.n_matrices, delays.n_matrices * delays.n_shards
    read_e = shards * delays.e_read * (sm + missed)
    reads = n * delays.sm_read * (e + missed) + read_e
    decodes = shards * delays.decode * (compressed + sm + e + missed)
    return np.maximum(reads, (read_e + decodes) / delays.n_workers)


def hit_patterns(n_used: int, pools: Sequence[int]) -> np.ndarray:
    """Returns all ways in which n_used experts fall into some pools and into none: integer[n, 5], other pools 0."""
    if not pools:
        return np.array([[0] * MISSED + [n_used]])
    patterns = []
    for n in range(n_used + 1):
        rest = hit_patterns(n_used - n, pools[1:])
        rest[:, pools[0]] = n
        patterns.append(rest)
    return np.concatenate(patterns)
