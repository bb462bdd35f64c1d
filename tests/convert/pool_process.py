"""What becomes of tokens in the memory that training draws from. A program of its own: it needs torch.

    python pool_process.py CONVERT

CONVERT: the directory of estimator_process.py.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import torch


def main() -> None:
    sys.path.insert(0, sys.argv[1])  # the module takes it away again
    from estimator_process import BATCH, Pool

    lesson = SimpleNamespace(token_bytes=8, device="cpu", tensors=lambda numbers: [torch.from_numpy(numbers.copy())])
    pool = Pool(lesson, 8 * 3 * BATCH, np.random.default_rng(0))
    pool.add(np.arange(2 * BATCH))
    assert len(pool) == 2 * BATCH and not pool.is_full
    drawn = torch.cat([pool.draw()[0] for _ in range(2)])
    assert sorted(drawn.tolist()) == list(range(2 * BATCH)), "each token comes once"
    pool.add(np.arange(2 * BATCH, 10 * BATCH))
    assert pool.is_full and len(pool) == 3 * BATCH, "memory is bounded"
    (kept,) = pool.rows(slice(None))
    assert len(set(kept.tolist())) == 3 * BATCH, "no token is there twice"
    assert (kept >= 2 * BATCH).sum() > BATCH, "late tokens take the places of early ones"


if __name__ == "__main__":
    main()
