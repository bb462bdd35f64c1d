"""The sidecars of a model, each read once, at its first use.

The reader of a kind is imported at that moment: a server without sidecars does not wait for it, nor for numpy.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyorch.library.numerics import np
from pyorch.runtime.model_map import ModelMap

if TYPE_CHECKING:
    from pyorch.sidecars.buddies import Buddies
    from pyorch.sidecars.ghosts import Ghosts
    from pyorch.sidecars.history import ExpertMaps
    from pyorch.sidecars.memory_plan import Plan
    from pyorch.sidecars.predictor import PredictorFile


class Sidecars:
    """The sidecars of one model.

    Every reader raises FormatError if the file is damaged or belongs to another model. Some callers go on without it
    (_usable_predictor in pyorch.llama.apply, _kept in pyorch.llama.survey).
    """

    def __init__(self, model_map: ModelMap) -> None:
        self.map = model_map
        self._paths = model_map.sidecars()

    def _read(self, kind: str, cls: str) -> Any:
        """Reads a sidecar with its class of pyorch.sidecars; None if there is no file."""
        path = self._paths.get(kind)
        if path is None:
            return None
        return getattr(import_module(f"pyorch.sidecars.{kind}"), cls).read(path, self.map)

    @cached_property
    def predictor(self) -> PredictorFile:
        """The data of predictors; empty without a file."""
        from pyorch.sidecars.predictor import PredictorFile

        return self._read("predictor", "PredictorFile") or PredictorFile()

    @cached_property
    def buddies(self) -> Buddies | None:
        """The buddy lists, or None."""
        return self._read("buddies", "Buddies")

    @cached_property
    def ghosts(self) -> Ghosts | None:
        """The estimates of absent experts' outputs, or None."""
        return self._read("ghosts", "Ghosts")

    @cached_property
    def plan(self) -> Plan | None:
        """The division of memory among forms of experts, or None."""
        from pyorch.sidecars.memory_plan import default_path, read_plan

        path = default_path(self.map.path)
        return read_plan(path, self.map) if path.is_file() else None

    def inclusion(self) -> np.ndarray | None:
        """How often a token needs experts by rank, float64[n_layers, n_expert] of the executed layers.

        It comes from the use counts in the expert maps; None without them, or if a layer was never used.
        """
        from pyorch.planning.ranks import inclusion_of_counts

        counts = self._uses
        return inclusion_of_counts(counts, self.map.info.n_expert_used) if counts is not None else None

    def uses(self) -> np.ndarray | None:
        """Use counts from which ranks of experts start, by expert (Engine.set_uses).

        They come from the plan's trace, else from the expert maps. None without either.
        """
        from pyorch.planning.ranks import fading_uses

        counts = self._uses if self.plan is None or not self.plan.uses else np.array(self.plan.uses)
        if counts is None:
            return None
        return fading_uses(counts, counts[0].sum() / self.map.info.n_expert_used)

    @cached_property
    def _uses(self) -> np.ndarray | None:
        from pyorch.sidecars.history import DISTANCE

        counts = self.new_maps(DISTANCE).uses.astype(np.float64)
        return counts if (counts.sum(axis=1) > 0).all() else None

    def new_maps(self, distance: int) -> ExpertMaps:
        """Returns the expert maps, or an empty store. Reads them each time: an engine adds to its own copy."""
        from pyorch.sidecars.history import ExpertMaps

        path = self._paths.get("maps")
        return (
            ExpertMaps.read(path, self.map) if path is not None else ExpertMaps.for_model(self.map, distance=distance)
        )
