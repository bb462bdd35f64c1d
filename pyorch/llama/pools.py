"""Divides the memory of a model with a compressed pack: by its plan, or by a plan made now."""

from __future__ import annotations

from pyorch.llama import cores
from pyorch.planning.makespan import POOLS
from pyorch.planning.planner import HANDICAP, STEP, Planned, Split
from pyorch.planning.ranks import even_inclusion
from pyorch.runtime.decompression import measure_recovery, recovery_threads
from pyorch.runtime.disk import kept_bandwidth, reads_for
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.memory_plan import Machine, Reserve, default_path, new_planner

# Of an unmeasured disk: a model that is too small to measure it is read soon at any speed.
_BYTES_PER_SECOND = 1e9

_DECODE_SECONDS = 0.1

# Bytes a second of a pack so damaged that nothing was decoded, so it is never used.
_NEVER = 1.0


class PoolPlanner:
    """Plans the memory of one model whose compressed pack is attached.

    - **With a plan next to the model**: its own budget is divided as the plan says. For another budget, or if the pack
      has another codec now, the division is planned anew from the plan's measurements.
    - **Without a plan**: the routing comes from the requests in the model's expert maps, and the machine is measured
      for a tenth of a second. No replay has checked the result, so other forms than whole experts are used only if they
      are expected to gain more than HANDICAP.
    - **Without known routing**: all memory is for whole experts. Other forms gain only if experts are used evenly,
      which must not be assumed.

    The model map may be closed afterwards.

    Raises:
        FormatError: The plan is damaged or belongs to another model, or the pack is not compressed.
    """

    def __init__(self, sidecars: Sidecars, settings: Settings) -> None:
        model_map, plan = sidecars.map, sidecars.plan
        self.origin = default_path(model_map.path).name  # a text about the source of the division
        self._plan = plan if plan is not None and plan.codecs == packs.contents(model_map).codecs else None
        self._pools, self._step, self._handicap, batch = POOLS, STEP, HANDICAP, 1
        if plan is not None:
            self._pools, self._step, inclusion, batch = plan.pools, plan.step, plan.rows, plan.batch
            self._handicap = max(plan.handicap, HANDICAP)
            if self._plan is None:
                self.origin += ", planned anew: it was made for another codec"
        else:
            inclusion = sidecars.inclusion()
            self.origin = "use counts"
            if inclusion is None:
                self.origin = "nothing known of the routing"
                self._pools = "F"
                inclusion = even_inclusion([layer.n_expert for layer in model_map.decoded_layers],
                                           model_map.info.n_expert_used)
        machine = _measured(model_map, settings) if self._plan is None else self._plan.machine
        self._planner = new_planner(model_map, inclusion, machine, batch)
        self._reserve = Reserve.of(model_map)
        self.info = model_map.info  # with the pack
        self._found: dict[int, Planned] = {}  # by budget: the engine's plan asks again with each fact

    def best(self, budget: int) -> Split:
        """Returns the best division of a budget. For the plan's own budget, the best one of its replay."""
        plan = self._plan
        if plan is None or plan.budget != budget:
            return self._search(budget).best
        return self._of_plan() if plan.compressed else self._planner.plain(budget)

    def packed_best(self, budget: int) -> Split:
        """Returns the best division of a budget among those that read experts from the pack."""
        plan = self._plan
        return self._of_plan() if plan and plan.budget == budget and plan.compressed else (
            self._search(budget).packed_best)

    def _search(self, budget: int) -> Planned:
        if budget not in self._found:
            reserved = self._reserve.bytes(budget)
            self._found[budget] = self._planner.plan(budget, self._pools, self._step, reserved, self._handicap)
        return self._found[budget]

    def _of_plan(self) -> Split:
        budget = self._plan.budget
        return self._planner.cost(self._plan.shares, budget - self._reserve.bytes(budget))


def _measured(model_map: ModelMap, settings: Settings) -> Machine:
    """Measures the machine for a tenth of a second; longer if the disk is not measured yet."""
    reads_for(model_map, settings.reads, settings.direct_io)
    disk = kept_bandwidth(model_map)
    return Machine(disk.bytes_per_second if disk else _BYTES_PER_SECOND,
                   measure_recovery(model_map, _DECODE_SECONDS) or _NEVER,
                   recovery_threads(settings.n_threads or cores.physical_cores()))


def planner_of(model_map: ModelMap, settings: Settings) -> PoolPlanner | None:
    """Returns the planner of a model with an attached pack; None if there is no compressed pack."""
    return PoolPlanner(Sidecars(model_map), settings) if packs.part_sizes(model_map) is not None else None
