"""Plans the engine of a model before the model is loaded: settings and facts -> EnginePlan.

All functions are pure. pyorch.llama.survey measures the facts, in methods of the same names. build() in
pyorch.llama.managed makes the engine of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pyorch.errors import BudgetError, PyorchError
from pyorch.llama.device_placement import LEAST_PROMPT, Placement, misses_of, place, prompt_tokens_of, whole_model
from pyorch.llama.division import Division, budget_beside
from pyorch.llama.facts import Facts, Header
from pyorch.llama.layouts import Layout, check_layout, choose_layout
from pyorch.settings.budget import AUTO, RESIDENT, Budget
from pyorch.settings.device_options import PROCESSOR
from pyorch.settings.kernels import PLAIN
from pyorch.settings.pools import KERNELS
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.settings.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from pyorch.llama.pools import PoolPlanner
    from pyorch.planning.planner import Split
    from pyorch.runtime.model_map import ModelMap
    from pyorch.settings.substitution import Substitution
    from pyorch.sidecars.beside import Sidecars
    from pyorch.sidecars.buddies import Buddies
    from pyorch.sidecars.eviction import Kept
    from pyorch.sidecars.ghosts import Ghosts
    from pyorch.sidecars.history import ExpertMaps


@dataclass(frozen=True)
class Contents:
    """The contents of the files next to a model that an engine needs; None if there is no such file.

    Attributes:
        prefetch: The predictor, also if it depends on the sidecar of predictors.
        history: The expert maps with which predictors begin.
        kept: The experts and the learned values with which memory begins.
        uses: The counts with which ranks of experts begin.
        refusal: The reason why `kept` is not used.
    """

    prefetch: Prefetch = Prefetch()
    buddies: Buddies | None = None
    ghosts: Ghosts | None = None
    history: ExpertMaps | None = None
    kept: Kept | None = None
    uses: np.ndarray | None = None
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class EnginePlan(Contents):
    """All that an engine is made of.

    Attributes:
        header: The model, with the pack from which experts are read.
        settings: The user's, changed by a tuned setting and by rates of devices.
        plain: Kernels compute with experts as the file has them, not repacked.
        layout: The choice between both, and its reason. None if there is no choice.
        placed: Other servers compute experts.
        has_share: Only other servers have some of the experts.
        division: Under the automatic budget, the least that works. Contexts raise it.
        device_prompt: If a ubatch has so many tokens, experts are uploaded for it.
        notes: Sentences for people.
    """

    header: Header
    settings: Settings
    sidecars: Sidecars
    placement: Placement
    plain: bool
    layout: Layout | None = None
    placed: bool
    has_share: bool = False
    division: Division = Division()
    reads: Reads = Reads()
    device_prompt: int = LEAST_PROMPT
    notes: tuple[str, ...] = ()

    @property
    def map(self) -> ModelMap:
        return self.header.map

    @property
    def automatic(self) -> bool:
        """Whether contexts set the budget to the memory that they leave."""
        return self.division.budget is not None and self.settings.budget == AUTO


def plan(settings: Settings, facts: Facts) -> EnginePlan:
    """Plans the engine of a model.

    If a new option changes the engine, a function here reads it. An option without native code is whole with a field of
    Settings and this reader.

    Raises:
        BudgetError: The budget is below the floor, or the model does not fit under the memory limit.
        FormatError: A sidecar that is needed is damaged or belongs to another model.
        PyorchError: A device does not exist, or the model lacks data that the settings need.
        Unknown: A fact is missing.
    """
    if settings.tuned is not None:
        settings = settings.with_tuned(*facts.tuned())
    header, request = facts.header, facts.request
    placement, note = place(settings, facts)
    check_layout(settings, facts, has_devices=bool(placement.each))
    # Kernels of devices compute with experts in the order of the file.
    must_be_plain = not request.repacks or bool(placement.each)
    plain = must_be_plain or settings.kernels == PLAIN
    notes: tuple[str, ...] = (note,)
    if facts.has_holes():
        notes += (f"{header.path} seems to be a header without weights, most of its bytes were never written: what it "
                  "answers means nothing",)
    whole = whole_model(placement, settings, facts) if placement.each and not request.placed else None
    if whole is not None:
        return EnginePlan(header=header, settings=settings, sidecars=facts.sidecars(False), placement=whole,
                          plain=plain, placed=False, notes=notes)
    if placement.each:
        settings, note = _for_experts_on(placement, settings, facts)
        notes += (note,)
    with_pack, division, has_share, of_pack = _use_pack(settings, placement, plain, facts)
    packed = with_pack is not None
    header = with_pack or header
    budget, of_budget = _budget(settings, header, placement, facts)
    layout = None
    if budget is not None and not must_be_plain:
        expected = partial(_expected_budget, budget, settings, header, placement, facts)
        layout = choose_layout(settings, header, expected, packed, facts)
        plain = layout.plain if layout is not None else plain
    made = EnginePlan(
        header=header, settings=settings, sidecars=facts.sidecars(packed), placement=placement, plain=plain,
        layout=layout, placed=request.placed, has_share=has_share, division=replace(division, budget=budget),
        notes=(*notes, of_pack, of_budget))
    return made if budget is None else _with_contents(made, packed, facts)


def _for_experts_on(placement: Placement, settings: Settings, facts: Facts) -> tuple[Settings, str]:
    """Completes the settings of devices by their rates. Returns the settings and a note for people."""
    devices = placement.each
    of_none = replace(settings, vram_budget=Budget.parse(0), device_misses=settings.device_misses or PROCESSOR)
    shares = all(device.shares_memory for device in devices) and settings.vram_budget == AUTO
    # Other servers rely on the experts in host memory.
    if facts.request.placed or settings.budget == RESIDENT or not facts.header.layers:
        return of_none if shares else settings, ""
    if shares:
        names = ", ".join(device.name for device in devices)
        return of_none, (f"{names} shares this machine's memory: it computes the dense layers, and the processor the "
                         "experts, unless --vram-budget says otherwise")
    if settings.vram_budget != AUTO and settings.vram_budget.amount.of(100) == 0:
        return of_none, ""
    misses, note = misses_of(settings, devices, facts)
    return replace(settings, device_misses=misses), note


def _use_pack(
    settings: Settings, placement: Placement, plain: bool, facts: Facts
) -> tuple[Header | None, Division, bool, str]:
    """Chooses between the model and its pack. A compressed pack is used if it is faster, or if the model is slim.

    Unless the settings divide memory among the forms of its experts, a planner does.

    Returns:
        The header of the model with the pack, None if experts are read from the model; the division; whether
        the pack has a share of the experts; and a note.

    Raises:
        FormatError: A plan is damaged or belongs to another model.
        PyorchError: The settings name forms that the experts do not have.
    """
    header, path = facts.header, facts.header.path
    slim = bool(header.info.slim) and settings.source is None
    if slim and not settings.packed:
        raise PyorchError(f"{path} is slim, its experts are in its pack only: leave out --no-pack (packed=False in "
                          "Python)")
    divided = settings.budget != RESIDENT  # otherwise all memory is for whole experts
    division = Division(pools=settings.pools, origin="given") if divided and settings.pools is not None else Division()
    if not slim and not (settings.packed and settings.source is None and divided):
        return None, division, False, ""
    asked = ("--pools divides memory among the forms of" if settings.pools is not None else
             f"--recovery {settings.recovery} is an order for" if settings.recovery != KERNELS else "")
    with_pack, refusal, is_share = facts.pack(plain, facts.request.placed)
    if with_pack is not None and divided and settings.pools is None:
        planner = facts.planner()
        if planner is not None and not slim:
            best = _best_division(planner, settings, placement, facts)
            if best is None or not best.compressed:
                return None, Division(origin="the compressed pack is not used: the model is read sooner",
                                      split=best), False, ""
        division = Division(planner=planner)
    if divided and asked:
        _check_forms(asked, slim, with_pack, refusal, facts)
    return with_pack, division, is_share, refusal and f"{refusal}; the experts are read from {path}"


def _check_forms(asked: str, slim: bool, with_pack: Header | None, refusal: str, facts: Facts) -> None:
    """PyorchError if the experts lack the forms that a setting names."""
    path = facts.header.path
    if not facts.header.layers:
        raise PyorchError(f"{asked} experts, and {path} is a dense model: leave it out")
    has_several, has_one = facts.forms() if with_pack is not None else (False, False)
    if has_several:
        return
    of_what = " of the whole model" if slim else ""
    why = f" that can be used: {refusal}" if refusal else (
        f"{' with several forms' if has_one else ''}: make one{of_what} with `pyorch pack --codec table`, or leave out "
        f"{asked.split(' ')[0]}")  # one, as nibble has
    raise PyorchError(f"{asked} experts of a compressed pack, and {path} has no compressed pack{why}")


def _best_division(planner: PoolPlanner, settings: Settings, placement: Placement, facts: Facts) -> Split | None:
    """Returns the division with which a token waits least, with the pack or without it.

    None if the budget is below the floor of the model with its pack: the model alone needs less.

    The automatic budget is the memory that dense weights and a context leave. The context is measured only if its
    bytes change the result.
    """
    def best(budget: Budget) -> Split | None:
        try:
            return planner.best(budget.resolve(planner.info))
        except BudgetError:
            return None

    if settings.budget != AUTO:
        return best(settings.budget)
    limit, dense_bytes = facts.memory(), facts.header.info.dense_bytes
    most = best(Budget.parse(max(1, limit.rest_bytes(dense_bytes))))
    least = best(Budget.parse(planner.info.floor_bytes))
    if most is None or least is None or most.compressed == least.compressed:
        return most
    return best(Budget.parse(max(1, limit.rest_bytes(dense_bytes, facts.sizes(placement).host))))


def _budget(settings: Settings, header: Header, placement: Placement, facts: Facts) -> tuple[int | None, str]:
    """Returns the budget of the engine in bytes, None for no engine; and a note for people."""
    info, budget, note = header.info, settings.budget, ""
    n_bytes: int | None
    if budget == AUTO:
        # Each context takes its share; then the budget is set to the rest.
        budget_beside(info, facts.memory(), placement.host_dense(header), context_bytes=0)
        n_bytes = info.floor_bytes
    elif budget == RESIDENT:
        n_bytes = info.slots_bytes if info.slim else None
        if info.slim:
            note = (f"{header.path} is slim, llama.cpp by itself cannot load it: the reference is the model with all "
                    "experts in memory, from the pack")
    else:
        n_bytes, note = budget.resolve(info), budget.surplus(info)
    return n_bytes if header.layers else None, note


def _expected_budget(
    budget: int, settings: Settings, header: Header, placement: Placement, facts: Facts
) -> int:
    """Returns the bytes that experts will have: of the automatic budget, the rest after a first context's KV cache."""
    if settings.budget != AUTO:
        return budget
    cache = header.kv_bytes(facts.request.n_ctx)  # buffers are small in comparison, and slow to measure
    return max(header.info.floor_bytes, facts.memory().rest_bytes(placement.host_dense(header), cache))


def _with_contents(plan: EnginePlan, packed: bool, facts: Facts) -> EnginePlan:
    """Adds the facts that only an engine needs: files next to the model, rates of the disk and of devices."""
    settings, header, placement, division = plan.settings, plan.header, plan.placement, plan.division
    contents = facts.contents(settings.substitution, packed)
    budget, devices, device_prompt = division.budget, division.devices, LEAST_PROMPT
    if contents.ghosts is not None and settings.budget.amount is not None:  # otherwise contexts subtract them
        budget = settings.budget.resolve(header.info, contents.ghosts.n_bytes)
    if placement.each:
        expert_bytes, given = placement.expert_bytes(header), settings.vram_budget
        total = sum(expert_bytes)
        n_bytes = min(given.amount.of(total), total) if given != AUTO else 0
        devices = tuple(n_bytes * of // max(1, total) for of in expert_bytes)  # the same share of each one's experts
        if n_bytes or given == AUTO:  # otherwise nothing is uploaded, so nothing is measured
            device_prompt = prompt_tokens_of(settings, placement.each, facts)
    return replace(
        plan, **vars(contents), division=replace(division, devices=devices).at(budget), device_prompt=device_prompt,
        reads=settings.reads if settings.source is not None else facts.reads(packed),  # the same for further disks
        notes=(*plan.notes, contents.refusal, _without_effect(settings.substitution, header.info.n_expert_used)))


def _without_effect(substitution: Substitution | None, n_used: int) -> str:
    """Returns a note if a lossy setting has no effect on a model with n_used experts of a token in a layer; or ""."""
    if substitution is None or (substitution.sacred or 0) < n_used:
        return ""
    remedy = f"; sacred={n_used - 1} does not" if n_used > 1 else ""
    return (f"the lossy setting {substitution} changes nothing: it waits for a token's heaviest experts, "
            f"{substitution.sacred} of the {n_used} that the model uses in a layer{remedy}")
