"""What divisions of memory between forms of experts give on recorded routing: played by the table that runs models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyorch.planning.planner import HANDICAP, Split
from pyorch.planning.ranks import fading_uses, use_counts
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import NONE, Prefetch
from pyorch.sidecars.plan import Machine
from pyorch.traces.recording import Recording
from pyorch.traces.replay import ReplaySettings, replay

FINALISTS = 6  # divisions of the planner that are played when one is to be chosen

# Layers of tokens that are played of each division: some tenths of a second.
_CHOICE_PASSES = 24_000


@dataclass(frozen=True)
class Played:
    """hits: of the experts of a token, or of a batch of them, in a layer those in each of F, C, S and E, and in none,
    on average. wait_ms: what these tokens waited for."""

    hits: tuple[float, float, float, float, float]
    wait_ms: float


class Player:
    """Plays divisions of a budget on a recording, behind others that are known.

    Args:
        packed: the map of a model with its compressed pack attached; plain: one without.
        known: what is used before the recording begins: ranks begin with it.
        machine: whose disk and cores are simulated. Nothing is computed: a token takes what it waits for.
        batch: requests of the recording that are decoded together.
    """

    def __init__(
        self, packed: ModelMap, plain: ModelMap, known: Recording, recording: Recording, budget: int, machine: Machine,
        batch: int = 1,
    ) -> None:
        self._maps = {True: packed, False: plain}
        self._recording, self._budget, self._machine, self._batch = recording, budget, machine, batch
        self._uses = fading_uses(use_counts(known.experts, known.n_expert), len(known))

    def play(self, split: Split, policy: str | None = None) -> Played:
        """policy: of eviction; None: the default of the library."""
        settings = ReplaySettings(
            policy, Prefetch(NONE), self._budget, self._machine.bytes_per_second, compute_ms=0.0, route_share=0.0,
            batch=self._batch, pools=Pools(*split.shares) if split.compressed else Pools(),
            decode_bandwidth=self._machine.decoded_per_second, n_decoders=self._machine.n_workers,
        )
        result = replay(self._maps[split.compressed], self._recording, settings, uses=self._uses)
        stats, n_passes = result.stats, result.stats.layer_passes
        parts = (stats.compressed_hits, stats.sm_hits, stats.e_hits)
        hits = (stats.hits, *parts, stats.misses - sum(parts))
        return Played(tuple(n / n_passes for n in hits), result.stall_ms)


@dataclass(frozen=True)
class Choice:
    """best: of the divisions that were played. divided: of those with more than whole experts the one that waits least,
    None where there were none. handicap: how much longer these took than expected, on average, as a share of the same
    of whole experts; None where there were none. n_played: divisions; n_tokens: that each was played on."""

    best: Split
    divided: Split | None
    handicap: float | None
    n_played: int
    n_tokens: int


def choose(
    splits: Sequence[Split], packed: ModelMap, plain: ModelMap, recording: Recording, budget: int, machine: Machine,
    handicap: float = HANDICAP, batch: int = 1,
) -> Choice:
    """The division that waits least when the end of a recording is played, behind the rest; the first of equals.

    handicap: what divisions with more than whole experts are taken to wait, as a share of what they do when played.
    """
    n_tokens = min(max(1, len(recording) // 4), batch * (1 + _CHOICE_PASSES // len(recording.layers)))
    known, played = recording.divided(len(recording) - n_tokens, batch)
    player = Player(packed, plain, known if len(known) else played, played, budget, machine, batch)
    waits = [player.play(split).wait_ms for split in splits]
    best = splits[int(np.argmin([wait * (handicap if split.is_mixed else 1) for wait, split in zip(waits, splits)]))]
    divided = min((i for i, split in enumerate(splits) if split.is_mixed), key=lambda i: waits[i], default=None)

    def longer(mixed: bool) -> float:
        """Than expected."""
        ratios = [wait / (1000 * split.makespan) for wait, split in zip(waits, splits)
                  if split.compressed and split.is_mixed == mixed and split.makespan > 0]
        return float(np.mean(ratios)) if ratios else 0.0

    return Choice(best, None if divided is None else splits[divided],
                  longer(True) / longer(False) if longer(False) else None, len(waits), len(played))
