"""A server of its own process: computes experts for others until its input ends. Prints its port.

python peer_process.py MODEL BUDGET TOKEN
"""

from __future__ import annotations

import sys

import pyorch
from pyorch.sidecars.container import fingerprint

if __name__ == "__main__":
    path, budget, token = sys.argv[1:]
    with pyorch.load(path, budget=budget, n_ctx=64, n_threads=1) as model:
        print(model.engine.listen(token, fingerprint(model.map)), flush=True)
        sys.stdin.read()
        print(model.engine.served().slots, flush=True)
