"""Measures divisions of memory between forms of experts: replays recorded routing through the residency table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.planning.planner import HANDICAP, Split
from pyorch.planning.ranks import fading_uses, use_counts
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import NONE, Prefetch
from pyorch.sidecars.memory_plan import Machine
from pyorch.traces.recording import Recording
from pyorch.traces.replay import ReplaySettings, replay

FINALISTS = 6  # divisions of the planner that are replayed to choose one

# Layers times tokens that are replayed for each division: some tenths of a second.
_CHOICE_PASSES = 24_000


@dataclass(frozen=True)
class Choice:
    """The result of choose().

    Attributes:
        best: The best of the replayed divisions.
        divided: The division that waits least among those with more than whole experts. None: there was none.
        handicap: How much more the waits of divided memory exceed their forecast than the waits of whole experts do,
            on average. None: there was no division of one kind.
        n_played: Replayed divisions.
        n_tokens: Tokens that each was replayed on.
    """

    best: Split
    divided: Split | None
    handicap: float | None
    n_played: int
    n_tokens: int


def choose(
    splits: Sequence[Split], packed: ModelMap, plain: ModelMap, recording: Recording, budget: int, machine: Machine,
    handicap: float = HANDICAP, batch: int = 1, compute_ms: float = 0.0,
) -> Choice:
    """Returns the division that waits least when the end of a recording is replayed; of equal ones, the first.

    Args:
        packed: The map of the model with its compressed pack attached.
        plain: The map of the model without a compressed pack.
        machine: Its disk and cores are simulated.
        handicap: Multiplies the replayed wait of divisions with more than whole experts.
        batch: Requests of the recording that are decoded together.
        compute_ms: Computing of a token. It hides reads and decoding of matrices that are not needed yet.
    """
    n_tokens = min(max(1, len(recording) // 4), batch * (1 + _CHOICE_PASSES // len(recording.layers)))
    known, played = recording.divided(len(recording) - n_tokens, batch)
    before = known if len(known) else played
    uses = fading_uses(use_counts(before.experts, before.n_expert), len(before))  # the ranks at the start

    def wait_ms(split: Split, computing: float) -> float:
        settings = ReplaySettings(
            None, Prefetch(NONE), budget, machine.bytes_per_second, compute_ms=computing, batch=batch,
            pools=Pools(*split.shares) if split.compressed else Pools(),
            decode_bandwidth=machine.decoded_per_second, n_decoders=machine.n_workers,
        )
        return replay(packed if split.compressed else plain, played, settings, uses=uses).stall_ms

    waits = [wait_ms(split, compute_ms) for split in splits]
    best = splits[int(np.argmin([wait * (handicap if split.is_mixed else 1) for wait, split in zip(waits, splits)]))]
    divided = min((i for i, split in enumerate(splits) if split.is_mixed), key=lambda i: waits[i], default=None)

    # The expected wait ignores computing, so the handicap compares it with waits that no computing hides.
    bare = [wait_ms(split, 0) for split in splits] if compute_ms else waits

    def longer(mixed: bool) -> float:
        """Returns the mean of replayed over expected waits."""
        ratios = [wait / (1000 * split.makespan) for wait, split in zip(bare, splits)
                  if split.compressed and split.is_mixed == mixed and split.makespan > 0]
        return float(np.mean(ratios)) if ratios else 0.0

    return Choice(best, None if divided is None else splits[divided],
                  longer(True) / longer(False) if longer(False) else None, len(waits), len(played))
