"""How the memory of a model with a compressed pack is divided where nobody says it: by its plan, or by one made now."""

from __future__ import annotations

from pyorch.errors import BudgetError
from pyorch.llama import memory
from pyorch.planning.makespan import POOLS
from pyorch.planning.planner import STEP, Planned
from pyorch.planning.ranks import even_inclusion
from pyorch.runtime.disk import kept_bandwidth, reads_for
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.recovery import measure_recovery, recovery_threads
from pyorch.settings.budget import AUTO, Budget
from pyorch.settings.pools import Pools
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.packed_sizes import part_sizes
from pyorch.sidecars.plan import Machine, Reserve, default_path, new_planner

# Of a disk that nobody has measured: a model for which that is not worth a second is read soon, however fast.
_BYTES_PER_SECOND = 1e9

_DECODE_SECONDS = 0.1

# Bytes a second, of a pack that is so damaged that nothing was decoded: it does not pay.
_NEVER = 1.0


class PoolPlanner:
    """Of one model whose compressed pack is attached, which it does not need any more once it is made.

    Where no plan lies beside the model, routing is that of the requests that its expert maps hold, and the machine is
    measured, for a tenth of a second. Where nothing is known of the routing, all memory is for whole experts: other
    forms pay where experts are used alike, and that is not to be assumed.

    Raises FormatError for a plan that is damaged or another model's, and without a compressed pack.
    """

    def __init__(self, sidecars: Sidecars, settings: Settings) -> None:
        model_map, plan = sidecars.map, sidecars.plan
        self.origin = default_path(model_map.path).name  # of the division, for people
        if plan is not None:
            self._pools, self._step, machine, inclusion = plan.pools, plan.step, plan.machine, plan.rows
        else:
            reads_for(model_map, settings.reads, settings.direct_io)
            disk = kept_bandwidth(model_map)
            self._pools, self._step = POOLS, STEP
            machine = Machine(disk.bytes_per_second if disk else _BYTES_PER_SECOND,
                              measure_recovery(model_map, _DECODE_SECONDS) or _NEVER, recovery_threads())
            inclusion = sidecars.inclusion()
            self.origin = "use counts"
            if inclusion is None:
                self.origin = "nothing known of the routing"
                self._pools = "F"
                inclusion = even_inclusion([layer.n_expert for layer in model_map.decoded_layers],
                                           model_map.info.n_expert_used)
        self._planner = new_planner(model_map, inclusion, machine)
        self._reserve = Reserve.of(model_map)
        self.info = model_map.info  # with the pack

    def at(self, budget: int) -> Planned:
        """The best division of so many bytes."""
        return self._planner.plan(budget, self._pools, self._step, self._reserve.bytes(budget))

    def pools(self, budget: int) -> Pools:
        """The same, of those that read experts from the pack."""
        return Pools(*self.at(budget).packed_best.shares)


def planner_for(model_map: ModelMap, settings: Settings, plain: bool) -> PoolPlanner | None:
    """Of the model of a map that has no pack attached; None where no compressed pack lies beside it that can be used.

    plain: see packs.attach().
    """
    with ModelMap(model_map.path) as probe:
        if packs.attach(probe, plain) or part_sizes(probe) is None:
            return None
        return PoolPlanner(Sidecars(probe), settings)


def pays(planner: PoolPlanner, model_map: ModelMap, settings: Settings) -> bool:
    """Whether experts are sooner there from the compressed pack than from the model.

    Never where the budget is below the floor that a model has with its pack: the model alone needs less. The automatic
    budget is not known yet: it is taken for what the limit leaves beside the dense weights.
    """
    if settings.budget == AUTO:
        rest = memory.rest_bytes(memory.memory_limit(), model_map.info.dense_bytes, context_bytes=0)
        budget = Budget.parse(max(rest, 1))
    else:
        budget = settings.budget
    try:
        n_bytes = budget.resolve(planner.info)
    except BudgetError:
        return False
    return planner.at(n_bytes).best.compressed
