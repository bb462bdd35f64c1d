"""EnginePlan -> engine: everything that was decided is told to the library, and nothing is asked again."""

from __future__ import annotations

from pyorch.errors import PyorchError
from pyorch.llama.apply import apply_prefetch, apply_substitution, set_uses
from pyorch.llama.plan import EnginePlan
from pyorch.runtime import fatal
from pyorch.runtime.engine import Engine
from pyorch.settings.pools import Pools

_noted: set[str] = set()  # what people were told


def build(plan: EnginePlan) -> Engine | None:
    """None where llama.cpp keeps the experts, or there are none. Raises as Engine does, and for contents of sidecars
    that do not fit."""
    for sentence in plan.notes:
        if sentence and sentence not in _noted:
            _noted.add(sentence)
            fatal.notice(f"note: {sentence}")
    if plan.budget is None:
        return None
    settings = plan.settings
    engine = Engine(
        plan.map, plan.budget, settings.policy, plan.reads, settings.source, pools=plan.division.pools or Pools(),
        device=plan.device, device_misses=plan.device_misses, device_bytes=plan.device_bytes, plain=plan.plain,
        direct_io=settings.direct_io, device_ahead=settings.device_ahead,
    )
    try:
        set_uses(engine, plan.map, plan.uses)
        if plan.history is not None:
            engine.set_history(plan.history)
        if plan.learned_from is not None:
            from pyorch.sidecars import eviction  # see pyorch.sidecars.beside

            eviction.read(plan.learned_from, engine, plan.map)
        apply_prefetch(plan.prefetch, engine, plan.sidecars)
        engine.set_speculation("decode" if settings.speculate else "none")
        for layer in plan.map.layers:
            if plan.ghosts is not None:
                plan.ghosts.apply(engine, layer.il)
            apply_substitution(engine, layer.il, settings.substitution, plan.buddies, placed=plan.placed)
    except PyorchError:
        engine.close()
        raise
    return engine
