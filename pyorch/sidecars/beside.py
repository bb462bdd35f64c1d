"""What lies beside a model: its sidecars, each read once, when something first asks for it."""

from __future__ import annotations

from functools import cached_property

from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import eviction
from pyorch.sidecars.buddies import Buddies
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.predictor import PredictorFile


class Sidecars:
    """Of one model. Whatever is read raises FormatError where it is damaged or another model's."""

    def __init__(self, model_map: ModelMap) -> None:
        self.map = model_map
        self._paths = model_map.sidecars()

    @cached_property
    def predictor(self) -> PredictorFile:
        """What predictors are made with; without a file, nothing."""
        path = self._paths.get("predictor")
        return PredictorFile.read(path, self.map) if path is not None else PredictorFile()

    @cached_property
    def buddies(self) -> Buddies | None:
        """The buddy lists, None where there are none."""
        path = self._paths.get("buddies")
        return Buddies.read(path, self.map) if path is not None else None

    def read_learned(self, engine: Engine) -> None:
        """Lets an engine that evicts by what it learns begin with what is beside the model, if there is anything."""
        path = self._paths.get("eviction")
        if path is not None:
            eviction.read(path, engine, self.map)

    def new_maps(self, distance: int) -> ExpertMaps:
        """The expert maps, an empty store where there are none. Read anew: an engine adds to its own."""
        path = self._paths.get("maps")
        return (
            ExpertMaps.read(path, self.map) if path is not None else ExpertMaps.for_model(self.map, distance=distance)
        )
