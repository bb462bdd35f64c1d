"""How many of some selected experts the training of an estimator counts as found. A program of its own: it needs torch.

    python recall_process.py CONVERT IN.npz

CONVERT: the directory of estimator_process.py. IN: what that reads of routers, logits: float32[n, n_expert] of the
second layer, selected: int64[n, k].
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import torch


def main() -> None:
    convert, source = sys.argv[1:]
    sys.path.insert(0, convert)  # the module takes it away again
    from estimator_process import Lesson

    given = np.load(source)
    logits, selected = (torch.from_numpy(given[name])[None] for name in ("logits", "selected"))
    header = SimpleNamespace(layers=(0, 1), n_expert=logits.shape[-1], n_embd=logits.shape[-1],
                             n_expert_used=selected.shape[-1])
    print(*Lesson(header, given).hits(logits, selected).tolist())


if __name__ == "__main__":
    main()
