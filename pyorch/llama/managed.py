"""Models whose experts are looked after: what is known of each, by its llama_model *."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as llama

from pyorch.llama.apply import speculative
from pyorch.runtime.devices import Device
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO
from pyorch.settings.device import DeviceMisses
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.settings import Settings
from pyorch.sidecars.beside import Sidecars

if TYPE_CHECKING:
    from pyorch.llama.pools import PoolPlanner
    from pyorch.planning.planner import Split
    from pyorch.sidecars.buddies import Buddies


@dataclass
class ManagedModel:
    """A loaded model: its map, and its engine unless it is dense or llama.cpp keeps its experts."""

    path: str
    map: ModelMap
    settings: Settings
    params: llama.llama_model_params
    engine: Engine | None = None
    device: Device | None = None  # its dense weights are there, and experts, as far as there is room
    device_misses: DeviceMisses = DeviceMisses()  # with the rates that it goes by
    device_list: Any = None  # what params point to
    device_planned: bool = False  # how much of its memory experts get
    buddies: Buddies | None = None
    speculating: bool = False  # layers execute what is forecast for them
    pool_planner: PoolPlanner | None = None  # of a compressed pack, where the settings do not divide its memory
    pools: Pools | None = None  # how its memory is divided now
    division: Split | None = None  # the same, and what is expected of it; None where nobody planned it
    pack_pays: bool = True  # False: a compressed pack lies there, and experts are sooner read from the model
    placed: bool = False  # other servers compute experts for it
    contexts: dict[int, int] = field(default_factory=dict)  # llama_context *: bytes, under the automatic budget
    pid: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """Another process loaded the model, whose threads this one lacks: whatever waits for them waits for ever."""
        return self.pid != os.getpid()

    @functools.cached_property
    def sidecars(self) -> Sidecars:
        return Sidecars(self.map)

    @property
    def prefetch(self) -> Prefetch:
        """What the model was loaded with."""
        settings = self.settings
        return speculative(settings.prefetch, self.sidecars) if settings.speculate else settings.prefetch

    @property
    def pools_from(self) -> str:
        """Who divided the memory of compressed experts: "given", a plan, or what is known; why their pack is not used;
        "" where there is none."""
        if self.pools is None:
            return "" if self.pack_pays else "the compressed pack is not used: the model is read sooner"
        return "given" if self.pool_planner is None else self.pool_planner.origin

    def save(self) -> None:
        """Writes what was learned where the settings say. PyorchError if it cannot be written."""
        if self.engine is None:
            return
        if self.settings.maps is not None and self.engine.history:
            self.engine.history.write(self.settings.maps, self.map)
        if self.settings.learned is not None:
            from pyorch.sidecars import eviction  # see pyorch.sidecars.beside

            eviction.write(self.settings.learned, self.engine, self.map)

    @property
    def automatic(self) -> bool:
        return self.engine is not None and self.settings.budget == AUTO


models: dict[int, ManagedModel] = {}  # by llama_model *
# Of models and of the contexts in it. Reentrant, and loops run over copies: the garbage collector may free
# a model at any moment.
lock = threading.RLock()


def find(model: int) -> ManagedModel | None:
    """What is known of a llama_model *; None if it was loaded without settings in force."""
    return models.get(model)


def is_forked(model: int) -> bool:
    """Whether another process loaded this managed llama_model *."""
    managed = models.get(model)
    return managed is not None and managed.forked
