"""When experts arrive in a cache whose time is simulated: so that what is evaluated does not depend on the machine.

Whether an expert that is on its way counts as absent decides what a lossy setting computes. Here it is decided by a
clock of its own: a layer of a token takes one unit of it, reads come one after another through a disk that takes as
long as it is told, and a layer waits for what it demands. The residency table, its eviction and what is deferred are
those of a run. Guesses are not simulated: a run finds somewhat more experts there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyorch.errors import PyorchError
from pyorch.llama.model import Model


@dataclass(frozen=True)
class Arrival:
    """read_time: of an expert, in layers of a token. seed: 0: every read takes that; else from half to one and a half
    of it, as drawn. PyorchError for what cannot be."""

    read_time: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.read_time) and self.read_time >= 0):
            raise PyorchError(f"--read-time {self.read_time:g} is not a number of layers from 0 on")
        if not 0 <= self.seed < 1 << 64:
            raise PyorchError(f"--read-seed {self.seed} is not from 0 to 2^64 - 1")

    def simulate(self, model: Model, residents: Mapping[int, np.ndarray] | None = None) -> None:
        """From now on absent experts of a model are those of a cache with its budget. residents: il to bool[n_expert],
        with what it begins; None: it is empty."""
        if model.engine is None:
            return
        model.engine.simulate_cache(self.read_time, self.seed)
        for il, mask in (residents or {}).items():
            model.engine.fill_simulated_cache(il, mask.nonzero()[0])
