"""How the experts of a model are kept, decided before it is loaded: settings and model map -> EnginePlan.

Nothing is changed here but the map, to which a pack is attached, and the parameters with which llama.cpp loads the
model: on which device. What is decided lies in the plan; managed.py makes an engine of it and asks nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as llama

from pyorch import files
from pyorch.errors import FormatError, PyorchError
from pyorch.llama import logs, measure, memory, warm
from pyorch.llama.apply import find_buddies, find_ghosts, speculative
from pyorch.llama.device import (
    LEAST_PROMPT,
    choose,
    device_dense_bytes,
    host_dense_bytes,
    margin_bytes,
    misses_of,
    pipeline,
    prompt_tokens_of,
)
from pyorch.llama.measure import NARROW_UBATCH
from pyorch.runtime.devices import Devices
from pyorch.runtime.disk import reads_for
from pyorch.runtime.mirrors import add_mirrors
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO, RESIDENT, Budget
from pyorch.settings.device import PROCESSOR
from pyorch.settings.pools import KERNELS, Pools
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.settings.settings import Settings
from pyorch.sidecars.beside import Sidecars

if TYPE_CHECKING:
    import numpy as np

    from pyorch.llama.pools import PoolPlanner
    from pyorch.planning.planner import Split
    from pyorch.settings.substitution import Substitution
    from pyorch.sidecars.buddies import Buddies
    from pyorch.sidecars.eviction import Kept
    from pyorch.sidecars.ghosts import Ghosts
    from pyorch.sidecars.history import ExpertMaps


@dataclass(frozen=True)
class Division:
    """How the memory of a compressed pack is divided among the forms of its experts.

    pools: None where experts come from no compressed pack. origin: who divided it, "given", a plan, or what is known of
    the routing; or why a pack that lies there is not used; "" where there is none. split: what is expected of it, None
    where the settings divide the memory. planner: divides another budget, None likewise.
    """

    pools: Pools | None = None
    origin: str = ""
    split: Split | None = None
    planner: PoolPlanner | None = None

    def at(self, budget: int) -> Division:
        """The same of another budget, in bytes."""
        if self.planner is None:
            return self
        split = self.planner.packed_best(budget)
        return Division(Pools(*split.shares), self.planner.origin, split, self.planner)


@dataclass(frozen=True)
class EnginePlan:
    """What an engine is made of, and what it begins with.

    map: with the pack attached from which experts are read. settings: with those of a tuned setting. budget: bytes,
    under the automatic budget the least that works: contexts set it to what they leave; None: no engine, llama.cpp
    keeps the experts, or there are none. plain: experts are computed with as they lie in the file. device_bytes: of
    each device's memory, 0 where a context says it. device_prompt: tokens of a ubatch for which experts are brought
    there. history, kept, uses: what predictors, memory with the policy
    "learned", and ranks of experts begin with, None for nothing. placed: other servers compute experts; has_share: and
    some only they can. notes: sentences for people.
    """

    map: ModelMap
    settings: Settings
    sidecars: Sidecars
    budget: int | None
    plain: bool
    devices: Devices | None
    placed: bool
    has_share: bool = False
    division: Division = Division()
    reads: Reads = Reads()
    device_bytes: tuple[int, ...] = ()
    device_prompt: int = LEAST_PROMPT
    prefetch: Prefetch = Prefetch()
    buddies: Buddies | None = None
    ghosts: Ghosts | None = None
    history: ExpertMaps | None = None
    kept: Kept | None = None
    uses: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @property
    def automatic(self) -> bool:
        """Whether contexts set the budget to what they leave."""
        return self.budget is not None and self.settings.budget == AUTO


def make_plan(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, placed: bool = False,
    context: llama.llama_context_params | None = None,
) -> EnginePlan:
    """What these settings mean for a model that llama.cpp loads with these parameters, which then name the device.
    context: that will be made of it, None where nobody has asked for one yet.

    Raises:
        BudgetError: the budget is below the floor, or the model does not fit under the memory limit.
        FormatError: a sidecar that is needed is damaged or another model's.
        PyorchError: a device that there is not, or what the settings need and the model lacks.
    """
    if settings.tuned is not None:
        from pyorch.sidecars.tuned_setting import read_tuned  # see pyorch.sidecars.beside

        tuned = read_tuned(settings.tuned, model_map)
        settings = settings.with_tuned(tuned.substitution, tuned.budget)
    devices, of_devices = choose(settings, model_map, params, context or _first_context(settings, model_map))
    plain = not params.use_extra_bufts or devices is not None  # which take them as the file has them
    notes: tuple[str, ...] = (of_devices,)
    if files.has_holes(model_map.shards):
        notes += (f"{model_map.path} seems to be a header without weights, most of its bytes were never written: what "
                 "it answers means nothing",)
    if devices is not None and not placed and _hold_all(devices, settings, model_map, params, context):
        return EnginePlan(model_map, settings, Sidecars(model_map), None, plain, devices, placed, notes=notes)
    if devices is not None:
        settings, of_experts = _for_experts_on(devices, settings, model_map, placed)
        notes += of_experts
    division, of_pack = _use_pack(settings, model_map, params, devices, plain, placed)
    budget, of_budget = _budget(settings, model_map, params, devices)
    notes += of_pack + of_budget
    sidecars = Sidecars(model_map)
    has_share = placed and bool(model_map.info.slim) and _has_share(model_map)
    plan = EnginePlan(model_map, settings, sidecars, budget, plain, devices, placed, has_share, division, notes=notes)
    return plan if budget is None else _with_contents(plan)


def _for_experts_on(
    devices: Devices, settings: Settings, model_map: ModelMap, placed: bool
) -> tuple[Settings, tuple[str, ...]]:
    """What the settings leave to how fast both sides are, decided; and notes."""
    of_none = replace(settings, vram_budget=Budget.parse(0), device_misses=settings.device_misses or PROCESSOR)
    shares = devices.shares_memory and settings.vram_budget == AUTO
    if placed or settings.budget == RESIDENT or not model_map.layers:  # others are promised what host memory has
        return of_none if shares else settings, ()
    if shares:
        return of_none, (f"{devices.name} shares this machine's memory: it computes the dense layers, and the "
                         "processor the experts, unless --vram-budget says otherwise",)
    if settings.vram_budget != AUTO and settings.vram_budget.amount.of(100) == 0:
        return of_none, ()
    misses, note = misses_of(settings, devices, model_map)
    return replace(settings, device_misses=misses), (note,)


def _hold_all(
    devices: Devices, settings: Settings, model_map: ModelMap, params: llama.llama_model_params,
    context: llama.llama_context_params | None,
) -> bool:
    """Whether the whole model fits into the devices' memory beside a context: llama.cpp keeps it there then, where no
    layer asks the host. Not where the settings want an engine, as those that say how much experts get."""
    info = model_map.info
    if settings.managed or settings.vram_budget != AUTO or settings.lossy or settings.source is not None or info.slim:
        return False
    if any(device.shares_memory for device in devices.each):  # whose experts are the processor's
        return False
    if not model_map.layers or 0 <= params.n_gpu_layers <= info.n_layers:  # of which the processor has some
        return False
    dense = device_dense_bytes(model_map, params.n_gpu_layers, devices)
    weights = [sum(each) for each in zip(devices.expert_bytes(model_map), dense)]
    left = [device.free_bytes() - margin_bytes(device.total_bytes()) - n for device, n in zip(devices.each, weights)]
    if min(left) <= 0:
        return False
    rule = params.tensor_buft_overrides
    pipeline(params)
    sizes = measure.sizes_of(model_map, params, context or _first_context(settings, model_map), devices)
    if all(size <= of for size, of in zip(sizes.devices, left)):
        return True
    params.tensor_buft_overrides = rule
    return False


def _has_share(model_map: ModelMap) -> bool:
    from pyorch.sidecars.packs import share_of  # see pyorch.sidecars.beside

    return share_of(model_map) is not None


def _budget(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, devices: Devices | None
) -> tuple[int | None, tuple[str, ...]]:
    """Bytes of the engine, None for none; and notes."""
    info, budget = model_map.info, settings.budget
    notes: tuple[str, ...] = ()
    if budget == AUTO:
        # Each context will take its share; then the budget is set to the rest.
        memory.budget_beside(info, memory.memory_limit(), host_dense_bytes(model_map, devices, params), context_bytes=0)
        n_bytes = info.floor_bytes
    elif budget == RESIDENT:
        n_bytes = info.slots_bytes if info.slim else None
        if info.slim:
            notes = (f"{model_map.path} is slim, llama.cpp by itself cannot load it: the reference is the model with "
                     "all experts in memory, from the pack",)
    else:
        notes = (budget.surplus(info),)
        n_bytes = budget.resolve(info)
    return n_bytes if model_map.layers else None, notes


def _with_contents(plan: EnginePlan) -> EnginePlan:
    """With what only an engine needs: files beside the model, rates of the disk and the device."""
    settings, model_map, sidecars = plan.settings, plan.map, plan.sidecars
    buddies = find_buddies(settings.substitution, settings.buddies, sidecars)
    reads = settings.reads
    if settings.source is None:
        reads = reads_for(model_map, reads, settings.direct_io)  # of one disk: each further one gets as much
        if settings.mirror is not None:
            add_mirrors(model_map, settings.mirror.paths, _Compared())
    ghosts = find_ghosts(settings.substitution, sidecars)
    if ghosts is not None and settings.budget.amount is not None:  # else contexts find what ghosts leave
        plan = replace(plan, budget=settings.budget.resolve(model_map.info, ghosts.n_bytes))
    kept, refusal = _kept(plan)
    device_bytes: tuple[int, ...] = ()
    device_prompt = LEAST_PROMPT
    if plan.devices is not None:
        expert_bytes = plan.devices.expert_bytes(model_map)
        there = min(settings.vram_budget.amount.of(sum(expert_bytes)), sum(expert_bytes)) if (
            settings.vram_budget != AUTO) else 0
        device_bytes = in_shares(there, expert_bytes)
        if there or settings.vram_budget == AUTO:  # else nothing passes there, and nothing is to be measured
            device_prompt = prompt_tokens_of(settings, plan.devices, model_map)
    return replace(
        plan,
        division=plan.division.at(plan.budget),
        reads=reads,
        device_bytes=device_bytes,
        device_prompt=device_prompt,
        prefetch=speculative(settings.prefetch, sidecars) if settings.speculate else settings.prefetch,
        buddies=buddies,
        ghosts=ghosts,
        history=_history(plan),
        kept=kept,
        uses=_uses(plan),
        notes=(*plan.notes, refusal, _without_effect(settings.substitution, model_map.info.n_expert_used)),
    )


def in_shares(n_bytes: int, expert_bytes: list[int]) -> tuple[int, ...]:
    """Of each device's memory, that of so much: the same share of the experts in its blocks."""
    return tuple(n_bytes * of // max(1, sum(expert_bytes)) for of in expert_bytes)


def _without_effect(substitution: Substitution | None, n_used: int) -> str:
    """That a lossy setting can do nothing for a model that uses so many experts of a layer for a token; or ""."""
    if substitution is None or (substitution.sacred or 0) < n_used:
        return ""
    remedy = f"; sacred={n_used - 1} does not" if n_used > 1 else ""
    return (f"the lossy setting {substitution} changes nothing: it waits for a token's heaviest experts, "
            f"{substitution.sacred} of the {n_used} that the model uses in a layer{remedy}")


class _Compared:
    """Says now and then how far the comparison of a copy is, which takes as long as reading both."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not logs.is_quiet() and time.monotonic() - self._said >= self.SECONDS:
            self._said = time.monotonic()
            print(f"pyorch: {what}: {done / total:.0%}", file=sys.stderr)


def _history(plan: EnginePlan) -> ExpertMaps | None:
    """The expert maps that the settings name; those beside the model are read where a predictor searches them."""
    path = plan.settings.maps
    if path is None or not os.path.exists(path):
        return None
    from pyorch.sidecars.history import ExpertMaps

    return ExpertMaps.read(path, plan.map)


def _kept(plan: EnginePlan) -> tuple[Kept | None, str]:
    """What memory begins with, as kept of the last time; and why that is refused."""
    from pyorch.sidecars import eviction  # see pyorch.sidecars.beside

    path = warm.kept_in(plan.map, plan.settings)
    if path is None or not path.exists():
        return None, ""
    try:
        return eviction.read(path, plan.map), ""
    except FormatError as error:
        return None, f"{error}; memory begins without what was kept of the last time"


def _uses(plan: EnginePlan) -> np.ndarray | None:
    """Ranks, by which experts of a compressed pack belong to pools, go on from these."""
    if plan.map.pack is None:
        return None
    from pyorch.sidecars.packs import part_sizes

    return plan.sidecars.uses() if part_sizes(plan.map) is not None else None


def _use_pack(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, devices: Devices | None, plain: bool,
    placed: bool,
) -> tuple[Division, tuple[str, ...]]:
    """Has experts read from the pack that lies beside the model; a note says why not where one is there and refused.

    A compressed one is used where that pays, or the model is slim and has its experts nowhere else; how memory is
    divided then is planned, unless the settings say it. plain: they will be computed with as they lie in the model.
    placed: others compute what this one lacks.
    Raises FormatError for a plan that is refused, PyorchError for shares or an order of forms that experts do not have
    here.
    """
    slim = bool(model_map.info.slim) and settings.source is None
    if slim and not settings.packed:
        raise PyorchError(f"{model_map.path} is slim, its experts are in its pack only: leave out --no-pack "
                          "(packed=False in Python)")
    divided = settings.budget != RESIDENT  # else all memory is for whole experts
    division = Division(settings.pools, "given") if divided and settings.pools is not None else Division()
    if not slim and not (settings.packed and settings.source is None and divided):
        return division, ()
    asked = ("--pools divides memory among the forms of" if settings.pools is not None else
             f"--recovery {settings.recovery} is an order for" if settings.recovery != KERNELS else "")
    if not slim and not asked and "experts" not in model_map.sidecars():
        return division, ()
    from pyorch.llama.pools import best_division, planner_for
    from pyorch.sidecars import packs

    if divided and settings.pools is None and packs.KIND in model_map.sidecars():
        planner = planner_for(model_map, settings, plain)
        if planner is not None and not slim:
            best = best_division(planner, model_map, settings,
                                 lambda: _context_bytes(settings, model_map, params, devices))
            if best is None or not best.compressed:
                return Division(None, "the compressed pack is not used: the model is read sooner", best), ()
        division = Division(planner=planner)
    if slim:
        packs.require(model_map, plain, share=placed)
    refusal = packs.attach(model_map, plain)
    if divided and asked:
        if not model_map.layers:
            raise PyorchError(f"{asked} experts, and {model_map.path} is a dense model: leave it out")
        if packs.part_sizes(model_map) is None:
            has_one_form = model_map.pack is not None and packs.contents(model_map).codecs  # as nibble has
            of_what = " of the whole model" if slim else ""
            why = f" that can be used: {refusal}" if refusal else (
                f"{' with several forms' if has_one_form else ''}: make one{of_what} with `pyorch pack --codec table`, "
                f"or leave out {asked.split(' ')[0]}")
            raise PyorchError(f"{asked} experts of a compressed pack, and {model_map.path} has no compressed "
                              f"pack{why}")
    return division, (refusal and f"{refusal}; the experts are read from {model_map.path}",)


def _context_bytes(
    settings: Settings, model_map: ModelMap, params: llama.llama_model_params, devices: Devices | None
) -> int:
    return measure.sizes_of(model_map, params, _first_context(settings, model_map), devices).host


def _first_context(settings: Settings, model_map: ModelMap) -> llama.llama_context_params:
    """As the settings want it, or as load() makes one."""
    context = llama.llama_context_default_params()
    context.n_ctx = settings.n_ctx or model_map.default_ctx
    context.n_ubatch = settings.n_ubatch or min(NARROW_UBATCH, context.n_batch)
    return context
