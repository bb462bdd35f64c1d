"""How the memory of a model with a compressed pack is divided where nobody says it: by its plan, or by one made now."""

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
from pyorch.sidecars.plan import Machine, Reserve, default_path, new_planner

# Of a disk that nobody has measured: a model for which that is not worth a second is read soon, however fast.
_BYTES_PER_SECOND = 1e9

_DECODE_SECONDS = 0.1

# Bytes a second, of a pack that is so damaged that nothing was decoded: it does not pay.
_NEVER = 1.0


class PoolPlanner:
    """Of one model whose compressed pack is attached, which it does not need any more once it is made.

    A plan says how the budget is divided that it was made for. Others are planned anew by what it was made of, and so
    are all where the pack is of another codec now. Where no plan lies beside the model, routing is that of the requests
    that its expert maps hold, and the machine is measured, for a tenth of a second. Where nobody played them, other
    forms than whole experts are taken only if they are expected to gain more than HANDICAP. Where nothing is known of
    the routing, all memory is for whole experts: other forms pay where experts are used alike, and that is not to be
    assumed.

    Raises FormatError for a plan that is damaged or another model's, and without a compressed pack.
    """

    def __init__(self, sidecars: Sidecars, settings: Settings) -> None:
        model_map, plan = sidecars.map, sidecars.plan
        self.origin = default_path(model_map.path).name  # of the division, for people
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
        self._found: dict[int, Planned] = {}  # by budget: a plan of the engine asks again with each fact

    def best(self, budget: int) -> Split:
        """Of so many bytes; where they are those of the plan, what was best when it was played."""
        plan = self._plan
        if plan is None or plan.budget != budget:
            return self._search(budget).best
        return self._of_plan() if plan.compressed else self._planner.plain(budget)

    def packed_best(self, budget: int) -> Split:
        """The same, of those that read experts from the pack."""
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
    """For a tenth of a second, but for a disk that nobody has measured yet."""
    reads_for(model_map, settings.reads, settings.direct_io)
    disk = kept_bandwidth(model_map)
    return Machine(disk.bytes_per_second if disk else _BYTES_PER_SECOND,
                   measure_recovery(model_map, _DECODE_SECONDS) or _NEVER,
                   recovery_threads(settings.n_threads or cores.physical_cores()))


def planner_of(model_map: ModelMap, settings: Settings) -> PoolPlanner | None:
    """Of a model with the pack that is attached, if any; None where that is not compressed."""
    return PoolPlanner(Sidecars(model_map), settings) if packs.part_sizes(model_map) is not None else None
