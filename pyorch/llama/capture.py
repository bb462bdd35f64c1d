"""While a model is loaded: its engine is made, and what the settings ask for is read from beside the model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.library.choices import LEARNED, default_policy
from pyorch.llama import logs, measure, memory
from pyorch.llama.apply import apply_ghosts, apply_prefetch, apply_substitution, apply_uses, find_buddies
from pyorch.llama.context_plan import DEFAULT_CTX, NARROW_UBATCH
from pyorch.llama.device import host_dense_bytes
from pyorch.llama.managed import ManagedModel
from pyorch.llama.originals import original
from pyorch.runtime import fatal
from pyorch.runtime.device_rates import rates_for
from pyorch.runtime.disk import reads_for
from pyorch.runtime.engine import Engine
from pyorch.settings.budget import AUTO, RESIDENT
from pyorch.settings.pools import Pools

_noted: set[str] = set()  # what people were told


@contextlib.contextmanager
def capture(managed: ManagedModel) -> Iterator[None]:
    """While the model is loaded: makes its engine, or leaves its experts to llama.cpp."""
    plain = not managed.params.use_extra_bufts or managed.device is not None  # which takes them as the file has them
    if managed.settings.tuned is not None:
        from pyorch.sidecars.tuned_setting import read_tuned  # see pyorch.sidecars.beside

        tuned = read_tuned(managed.settings.tuned, managed.map)
        managed.settings = managed.settings.with_tuned(tuned.substitution, tuned.budget)
    use_pack(managed, plain)
    info = managed.map.info
    settings = managed.settings
    budget = settings.budget
    if budget == AUTO:
        # Each context will take its share; then the budget is set to the rest.
        memory.plan(info, memory.memory_limit(), host_dense_bytes(managed), context_bytes=0)
        budget = info.floor_bytes
    elif budget == RESIDENT and info.slim:
        budget = info.slots_bytes
        fatal.notice(f"note: {managed.path} is slim, llama.cpp by itself cannot load it: the reference is the model "
                     "with all experts in memory, from the pack")
    elif budget != RESIDENT:
        _note_once(budget.surplus(info))
        budget = budget.resolve(info)
    if not managed.map.layers or budget == RESIDENT:
        yield
    else:
        managed.buddies = find_buddies(settings.substitution, settings.buddies, managed.sidecars)
        reads = settings.reads
        if settings.source is None:
            reads = reads_for(managed.map, reads, settings.direct_io)
        if settings.budget != RESIDENT:
            managed.pools = settings.pools
        if managed.pool_planner is not None:
            managed.division = managed.pool_planner.packed_best(budget)
            managed.pools = Pools(*managed.division.shares)
        if managed.device is not None:
            n_threads = settings.n_threads or memory.physical_cores()
            managed.device_misses = rates_for(settings.device_misses, managed.map, managed.device, n_threads)
            if managed.device_misses.rates and not logs.is_quiet():
                fatal.notice(f"note: experts that {managed.device.name} lacks are computed as --device-misses "
                             f"{managed.device_misses} says")
        managed.engine = Engine(
            managed.map, budget, settings.policy, reads, settings.direct_io, settings.source, plain=plain,
            pools=managed.pools or Pools(), device=managed.device,
            device_bytes=0 if settings.vram_budget == AUTO else min(
                settings.vram_budget.amount.of(info.expert_bytes), info.expert_bytes),
            device_misses=managed.device_misses, device_ahead=settings.device_ahead,
        )
        try:
            if managed.map.pack is not None:
                from pyorch.sidecars.packed_sizes import part_sizes

                if part_sizes(managed.map) is not None:
                    apply_uses(managed.engine, managed.sidecars)
            if settings.maps is not None and os.path.exists(settings.maps):
                from pyorch.sidecars.history import ExpertMaps

                managed.engine.set_history(ExpertMaps.read(settings.maps, managed.map))
            if (settings.policy or default_policy()) == LEARNED:
                if settings.learned is None:
                    managed.sidecars.read_learned(managed.engine)
                elif os.path.exists(settings.learned):
                    from pyorch.sidecars import eviction

                    eviction.read(settings.learned, managed.engine, managed.map)
            apply_prefetch(managed.prefetch, managed.engine, managed.sidecars)
            managed.engine.set_speculation("decode" if settings.speculate else "none")
            managed.speculating = settings.speculate
            for layer in managed.map.layers:
                apply_ghosts(managed.engine, layer.il, settings.substitution, managed.sidecars)
                apply_substitution(managed.engine, layer.il, settings.substitution, managed.buddies,
                                   placed=managed.placed)
        except PyorchError:
            managed.engine.close()
            raise
        with managed.engine.capture():
            yield


def _note_once(sentence: str) -> None:
    """"" is nothing to tell."""
    if sentence and sentence not in _noted:
        _noted.add(sentence)
        fatal.notice(f"note: {sentence}")


def use_pack(managed: ManagedModel, plain: bool) -> None:
    """Has experts read from the pack that lies beside the model; says once why not where one is there and refused.

    A compressed one is used where that pays, or the model is slim and has its experts nowhere else; how memory is
    divided then is planned, unless the settings say it. plain: they will be computed with as they lie in the model.
    Raises FormatError for a plan that is refused, PyorchError for shares of forms that experts do not have here.
    """
    model_map, settings = managed.map, managed.settings
    slim = bool(model_map.info.slim) and settings.source is None
    if slim and not settings.packed:
        raise PyorchError(f"{model_map.path} is slim, its experts are in its pack only: leave out --no-pack "
                          "(packed=False in Python)")
    divided = settings.budget != RESIDENT  # else all memory is for whole experts
    if not slim and not (settings.packed and settings.source is None and divided):
        return
    if not slim and settings.pools is None and "experts" not in model_map.sidecars():
        return
    from pyorch.llama.pools import best_division, planner_for
    from pyorch.sidecars import packs

    if divided and settings.pools is None and packs.KIND in model_map.sidecars():
        managed.pool_planner = planner_for(model_map, settings, plain)
        if managed.pool_planner is not None and not slim:
            best = best_division(managed.pool_planner, model_map, settings, lambda: _context_bytes(managed))
            if best is None or not best.compressed:
                managed.pool_planner, managed.pack_pays, managed.division = None, False, best
                return
    if slim:
        packs.require(model_map)
    refusal = packs.attach(model_map, plain)
    if divided and settings.pools is not None:
        if not model_map.layers:
            raise PyorchError(f"--pools divides memory among the forms of experts, and {model_map.path} is a dense "
                              "model: leave it out")
        pack = packs.contents(model_map)
        if pack is None or not pack.codecs:
            of_what = " of the whole model" if slim else ""
            why = f" that can be used: {refusal}" if refusal else (
                f": make one{of_what} with `pyorch pack --codec auto`, or leave out --pools")
            raise PyorchError(f"--pools divides memory among the forms of experts of a compressed pack, and "
                              f"{model_map.path} has no compressed pack{why}")
    _note_once(refusal and f"{refusal}; the experts are read from {model_map.path}")


def _context_bytes(managed: ManagedModel) -> int:
    """Of a context as the settings want it, or as load() makes one: nobody has asked for one yet."""
    settings, info = managed.settings, managed.map.info
    params = llama.llama_context_default_params()
    trained = managed.map.metadata_int(f"{info.arch}.context_length", default=DEFAULT_CTX)
    params.n_ctx = settings.n_ctx or min(DEFAULT_CTX, trained)
    params.n_ubatch = settings.n_ubatch or min(NARROW_UBATCH, params.n_batch)
    with measure.twin(original("llama_model_load_from_file"), managed.path, managed.params) as twin:
        init = original("llama_init_from_model")
        return measure.context_sizes(init, twin, params, managed.map, managed.device).host
