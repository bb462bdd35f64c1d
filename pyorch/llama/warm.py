"""Warm memory: loads experts before a layer needs them.

If the budget holds all experts, they are read at once, in the order of the file, after the layers' own loads. Otherwise
an engine begins with the experts that were resident at the end of the model's last use. A file in the user's cache
directory has them, the most used first, and the state of the eviction policy.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.errors import PyorchError
from pyorch.library.choices import LEARNED, default_policy
from pyorch.runtime import kept
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.settings import Settings

if TYPE_CHECKING:
    from pyorch.runtime.engine import Engine
    from pyorch.sidecars.eviction import Kept


def kept_in(model_map: ModelMap, settings: Settings) -> Path | None:
    """Returns the file of the cache directory. None: there is no such directory, or the settings forbid it."""
    directory = kept.directory() if settings.warm else None
    if directory is None:
        return None
    key = os.path.realpath(model_map.path), settings.policy or default_policy()
    return directory / f"{kept.name_of('warm', key)}.gguf"


def begin(engine: Engine, model_map: ModelMap, last_time: Kept | None) -> None:
    """Queues the experts for the memory, once the budget is final. Returns at once."""
    budget = engine.stats().budget_bytes
    if budget >= model_map.info.slots_bytes:
        for layer in model_map.layers:
            engine.prefetch(layer.il, range(layer.n_expert))
    elif last_time is not None:
        room = budget - model_map.info.floor_bytes  # leaves room for the layers' own loads
        slot_bytes = {layer.il: layer.slot_bytes for layer in model_map.layers}
        for il, expert in last_time.resident.tolist():
            room -= slot_bytes[il]
            if room < 0:
                break
            engine.prefetch(il, (expert,))


def keep(engine: Engine, model_map: ModelMap, settings: Settings) -> None:
    """Writes the resident experts and the policy's state if not all experts fit. Ignores errors."""
    path, stats = kept_in(model_map, settings), engine.stats()
    if path is None or not stats.hits or stats.budget_bytes >= model_map.info.slots_bytes:
        return
    from pyorch.sidecars import eviction  # see pyorch.sidecars.beside

    with contextlib.suppress(PyorchError):
        learns = (settings.policy or default_policy()) == LEARNED
        eviction.write(path, engine, model_map, engine.learned() if learns else {})
