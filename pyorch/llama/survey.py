"""A survey answers the questions of a plan: it asks the system, times disks and devices, and reads sidecars."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as llama

from pyorch import files
from pyorch.errors import FormatError, PyorchError
from pyorch.llama import cores, measure, memory, warm
from pyorch.llama.apply import find_buddies, find_ghosts, speculative
from pyorch.llama.device_parameters import devices_of, header_of, set_placement
from pyorch.llama.device_placement import Placement
from pyorch.llama.division import NARROW_UBATCH, MemoryLimit
from pyorch.llama.engine_plan import Contents, EnginePlan, plan
from pyorch.llama.facts import Facts, Header, Request, settle
from pyorch.llama.layouts import LayoutRates
from pyorch.runtime.devices import Device, find_devices, rates_of
from pyorch.runtime.disk import reads_for
from pyorch.runtime.layouts import layout_rates
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.kernels import STOCK
from pyorch.settings.reads import Reads
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.beside import Sidecars

if TYPE_CHECKING:
    import numpy as np

    from pyorch.llama.pools import PoolPlanner
    from pyorch.sidecars.eviction import Kept
    from pyorch.sidecars.history import ExpertMaps


def make_plan(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, placed: bool = False,
    context: llama.llama_context_params | None = None,
) -> EnginePlan:
    """Plans the engine of a model that llama.cpp is about to load with these parameters. Changes nothing.

    Args:
        settings: The user's settings.
        model_map: The model.
        params: With which llama.cpp loads the model.
        placed: Other servers compute experts.
        context: The first context, if the caller knows it.

    Raises:
        BudgetError: The budget is below the floor, or the model does not fit under the memory limit.
        FormatError: A sidecar that is needed is damaged or belongs to another model.
        PyorchError: A device does not exist, or the model lacks data that the settings need.
    """
    survey = Survey(settings, model_map, params, context or _first_context(settings, model_map))
    request = Request(params.n_gpu_layers, bool(params.use_extra_bufts),
                      survey.context.n_ctx or model_map.trained_ctx, survey.context.n_ubatch, placed)
    return settle(partial(plan, settings), Facts(header_of(model_map), request), survey)


def _first_context(settings: Settings, model_map: ModelMap) -> llama.llama_context_params:
    """Returns the context that the settings ask for; load() makes the same."""
    context = llama.llama_context_default_params()
    context.n_ctx = settings.n_ctx or model_map.default_ctx
    context.n_ubatch = settings.n_ubatch or min(NARROW_UBATCH, context.n_batch)
    return context


class Survey:
    """Measures facts of one model for its plan. Each method answers the question of its name (pyorch.llama.facts).

    Methods raise FormatError if a sidecar that is needed is damaged or belongs to another model.
    """

    def __init__(
        self, settings: Settings, model_map: ModelMap, params: llama.llama_model_params,
        context: llama.llama_context_params,
    ) -> None:
        self.context = context
        self._settings, self._map, self._params = settings, model_map, params
        self._maps = {False: model_map}  # True: with the pack
        self._sidecars: dict[bool, Sidecars] = {}
        self._n_threads = settings.n_threads or cores.physical_cores()

    def tuned(self) -> tuple[Substitution, str]:
        """Returns the substitution and the budget of the tuned setting that the settings name."""
        from pyorch.sidecars.tuned_setting import read_tuned  # see pyorch.sidecars.beside

        found = read_tuned(self._settings.tuned, self._map)
        return found.substitution, found.budget

    def has_holes(self) -> bool:
        """Returns whether most bytes of the model were never written."""
        return files.has_holes(self._map.shards)

    def memory(self) -> MemoryLimit:
        return memory.memory_limit()

    def devices(self, name: str) -> tuple[Device, ...]:
        """Returns the devices of a setting. PyorchError: one does not exist."""
        return tuple(find_devices(name))

    def device_memory(self, device: Device) -> tuple[int, int]:
        return device.memory()

    def rates(self, device: Device) -> list[float] | str:
        """Returns rates_of() a device, or the reason why it cannot be measured."""
        try:
            return rates_of(device, self._map, self._n_threads)
        except PyorchError as error:
            return str(error)

    def sizes(self, placement: Placement) -> measure.ContextSizes:
        """Returns the bytes of the first context. BudgetError: llama.cpp refuses it."""
        params = llama.llama_model_params.from_buffer_copy(self._params)
        set_placement(params, placement)
        return measure.sizes_of(self._map, params, self.context, devices_of(placement))

    def pack(self, plain: bool, share: bool) -> tuple[Header | None, str, bool]:
        """Attaches the pack.

        Args:
            plain, share: See require() in pyorch.sidecars.packs.

        Returns:
            The header of the model with its pack, None without a usable pack; the reason why a pack is refused; and
            whether it has a share of the experts.

        Raises:
            FormatError: A slim model lacks its pack.
        """
        if not self._map.info.slim and "experts" not in self._map.sidecars():
            return None, "", False
        from pyorch.sidecars import packs  # see pyorch.sidecars.beside

        found = self._maps[True] = ModelMap(self._map.path)
        stock = self._settings.kernels == STOCK
        if found.info.slim:
            packs.require(found, plain, share, stock)
        refusal = packs.attach(found, plain, stock)
        return header_of(found) if found.pack is not None else None, refusal, packs.share_of(found) is not None

    def planner(self) -> PoolPlanner | None:
        """Returns the planner of memory for the forms of the pack's experts. None if the pack is not compressed."""
        from pyorch.llama.pools import planner_of

        return planner_of(self._maps[True], self._settings)

    def is_native(self) -> bool:
        """Returns whether the pack has experts in the order of this processor's kernels."""
        from pyorch.sidecars.packs import is_native

        return is_native(self._maps[True])

    def layout_rates(self, il: int, role: int) -> LayoutRates | str:
        """Returns the rates of an expert's matrix, measured once on this machine, or why it cannot be measured."""
        try:
            repacking, one, several, repacked_one, repacked_several, n_inputs = layout_rates(self._map, il, role)
        except PyorchError as error:  # too little memory, which must not prevent the start
            return str(error)
        return LayoutRates(repacking, (one, several), (repacked_one, repacked_several), n_inputs)

    def forms(self) -> tuple[bool, bool]:
        """Returns whether experts of the pack have several forms, and whether a codec such as nibble made them."""
        from pyorch.sidecars import packs

        return packs.part_sizes(self._maps[True]) is not None, bool(packs.contents(self._maps[True]).codecs)

    def reads(self, packed: bool) -> Reads:
        """Returns the way to read the disk of the experts. packed: they are read from the pack."""
        return reads_for(self._maps[packed], self._settings.reads, self._settings.direct_io)

    def sidecars(self, packed: bool) -> Sidecars:
        return self._sidecars.setdefault(packed, Sidecars(self._maps[packed]))

    def contents(self, substitution: Substitution | None, packed: bool) -> Contents:
        """Reads the files next to the model that an engine needs."""
        settings, model_map, sidecars = self._settings, self._maps[packed], self.sidecars(packed)
        kept, refusal = self._kept(model_map)
        return Contents(
            buddies=find_buddies(substitution, settings.buddies, sidecars),
            ghosts=find_ghosts(substitution, sidecars),
            prefetch=speculative(settings.prefetch, sidecars) if settings.speculate else settings.prefetch,
            history=self._history(model_map),
            kept=kept,
            uses=_uses(model_map, sidecars),
            refusal=refusal,
        )

    def _history(self, model_map: ModelMap) -> ExpertMaps | None:
        """Reads the expert maps that the settings name; the default file only if a predictor searches it."""
        path = self._settings.maps
        if path is None or not os.path.exists(path):
            return None
        from pyorch.sidecars.history import ExpertMaps

        return ExpertMaps.read(path, model_map)

    def _kept(self, model_map: ModelMap) -> tuple[Kept | None, str]:
        """Reads the experts and learned values of the last run; and why they are refused."""
        from pyorch.sidecars import eviction  # see pyorch.sidecars.beside

        path = warm.kept_in(model_map, self._settings)
        if path is None or not path.exists():
            return None, ""
        try:
            return eviction.read(path, model_map), ""
        except FormatError as error:
            return None, f"{error}; memory begins without what was kept of the last time"


def _uses(model_map: ModelMap, sidecars: Sidecars) -> np.ndarray | None:
    """Returns the counts with which ranks of experts for the pack's pools begin."""
    if model_map.pack is None:
        return None
    from pyorch.sidecars.packs import part_sizes

    return sidecars.uses() if part_sizes(model_map) is not None else None
