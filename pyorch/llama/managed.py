"""The managed models, by llama_model *, and their engines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import llama_cpp.llama_cpp as llama

from pyorch.errors import DeviceError, ExpertReadError, FormatError, PyorchError
from pyorch.library.bindings import decode_error
from pyorch.llama import logs, memory, warm
from pyorch.llama.apply import apply_prefetch, apply_substitution, set_uses
from pyorch.llama.device_parameters import devices_of, set_placement
from pyorch.llama.division import Division
from pyorch.llama.engine_plan import EnginePlan
from pyorch.llama.survey import make_plan
from pyorch.runtime import fatal
from pyorch.runtime.callbacks import raise_held
from pyorch.runtime.devices import Devices
from pyorch.runtime.engine import Engine
from pyorch.runtime.mirrors import add_mirrors
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import RESIDENT
from pyorch.settings.device_options import NONE, PROCESSOR, device_names
from pyorch.settings.kernels import STOCK
from pyorch.settings.pools import RECOVERIES, Pools
from pyorch.settings.settings import Settings

_noted: set[str] = set()  # notes that were printed


def build(plan: EnginePlan) -> Engine | None:
    """Makes the engine of a plan.

    Returns:
        None if llama.cpp keeps the experts, or there are none.

    Raises:
        BudgetError: The budget is below the floor.
        FormatError: A mirror or the content of a sidecar does not fit the model.
        PyorchError: An option is impossible.
    """
    for sentence in plan.notes:
        if sentence and sentence not in _noted:
            _noted.add(sentence)
            fatal.notice(f"note: {sentence}")
    if plan.division.budget is None:
        return None
    settings, division = plan.settings, plan.division
    if settings.mirror is not None and settings.source is None:
        add_mirrors(plan.map, settings.mirror.paths, _Compared())
    engine = Engine(
        plan.map, division.budget, settings.policy, plan.reads, settings.source, pools=division.pools or Pools(),
        devices=devices_of(plan.placement), device_bytes=division.devices,
        device_misses=settings.device_misses or PROCESSOR, plain=plan.plain,
        stock=settings.kernels == STOCK, direct_io=settings.direct_io,
        device_ahead=settings.device_ahead, device_prompt=plan.device_prompt,
        recovery=RECOVERIES.index(settings.recovery),
    )
    try:
        set_uses(engine, plan.map, plan.uses)
        if plan.history is not None:
            engine.set_history(plan.history)
        if plan.kept is not None and plan.kept.learned:
            try:
                plan.kept.tell(engine)
            except FormatError as error:  # a damaged cache must not prevent the start
                fatal.notice(f"note: {error}; eviction starts without the state of the last time")
        apply_prefetch(plan.prefetch, engine, plan.sidecars)
        engine.set_speculation("decode" if settings.speculate else "none")
        for layer in plan.map.layers:
            apply_substitution(
                engine, layer.il, settings.substitution, plan.buddies, plan.ghosts)
    except PyorchError:
        engine.close()
        raise
    return engine


class _Compared:
    """Prints now and then the progress of comparing a copy, which takes as long as reading both files."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not logs.is_quiet() and time.monotonic() - self._said >= self.SECONDS:
            self._said = time.monotonic()
            print(f"pyorch: {what}: {done / total:.0%}", file=sys.stderr)


@contextlib.contextmanager
def loading(
    path: str, model_map: ModelMap, settings: Settings, params: llama.llama_model_params, placed: bool = False,
    context: llama.llama_context_params | None = None,
) -> Iterator[ManagedModel]:
    """Plans and builds the engine of the model at path, which llama.cpp loads in the `with` block.

    If the block raises, the engine is closed.

    Args:
        path: The model.
        model_map: Its map.
        settings: The user's settings.
        params: With which llama.cpp loads; the placement on devices is added.
        placed: Other servers compute experts for the model.
        context: The first context, if the caller knows it.

    Raises:
        BudgetError: The budget is below the floor, or the model does not fit under the memory limit.
        FormatError: A sidecar or mirror that is needed is damaged or belongs to another model.
        PyorchError: An option is impossible, or the model lacks data that an option needs.
    """
    plan = make_plan(settings, model_map, params, placed, context)
    set_placement(params, plan.placement)
    managed = ManagedModel(path, plan, params, build(plan))
    if managed.engine is None:
        yield managed
        return
    try:
        with managed.engine.capture():
            yield managed
    except BaseException:
        managed.close()
        raise


@dataclass
class ManagedModel:
    """A loaded model: its plan, its engine, and later changes.

    Attributes:
        engine: None if the model is dense, or llama.cpp keeps its experts.
        devices: Have the dense weights, and as many experts as fit.
        division: The present division of memory; contexts change it.
        speculating: Layers execute their forecasts.
        warmed: The experts for the memory were queued (pyorch.llama.warm).
        contexts: Bytes by llama_context *, under the automatic budget.
        is_automatic: The budget is automatic, and nobody named another.
        budget_note: The last sentence about a change of the automatic budget; "" before the first.
        on_budget: Called with each of these sentences.
        in_use: Held while another thread uses the engine, and while the engine is closed.
        mapped_before: Bytes of mapped files of this process before the model was loaded.
    """

    path: str
    plan: EnginePlan
    params: llama.llama_model_params
    engine: Engine | None
    devices: Devices | None = field(init=False)
    division: Division = field(init=False)
    speculating: bool = field(init=False)
    warmed: bool = False
    contexts: dict[int, int] = field(default_factory=dict)
    is_automatic: bool = field(init=False)
    budget_note: str = ""
    on_budget: Callable[[str], None] | None = None
    in_use: threading.RLock = field(default_factory=threading.RLock)
    mapped_before: int = field(default_factory=lambda: memory.Resident.now().files)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.devices = devices_of(self.plan.placement)
        self.division = self.plan.division
        self.is_automatic = self.plan.automatic
        self.speculating = self.engine is not None and self.plan.settings.speculate

    @property
    def map(self) -> ModelMap:
        return self.plan.map

    def budget_bytes(self) -> int:
        """Returns the present bytes for experts in host memory."""
        return self.engine.stats().budget_bytes

    @property
    def may_follow(self) -> bool:
        """Whether the budget may follow free memory.

        Not if other servers compute experts, because their placement counts on this memory; and not if a device has
        experts in the same memory.
        """
        return self.plan.automatic and not self.plan.placed and not self.plan.has_share and not any(
            device.shares_memory for device in self.plan.placement.each)

    def follows(self) -> bool:
        """Returns whether the budget follows free memory now: nobody named another budget, and nothing is lossy."""
        return (self.may_follow and self.is_automatic and not self.speculating and not self.engine.lossy_layers
                and self.budget_bytes() == self.division.budget)  # otherwise Engine.set_budget() was called

    def set_budget(self, n_bytes: int) -> None:
        """Changes the budget of the host's experts, in bytes.

        Raises:
            BudgetError: It is below the floor, or below the pinned experts.
        """
        self.engine.set_budget(n_bytes)
        self.division = replace(self.division, budget=self.budget_bytes())

    def settle_budget(self) -> None:
        """Divides the changed budget among the forms of experts, and reads all experts if they fit."""
        if self.division.planner is not None:
            self.division = self.division.at(self.division.budget)
            self.engine.set_pools(self.division.pools)
        elif self._warms and self.division.budget >= self.map.info.slots_bytes:
            warm.begin(self.engine, self.map, None)

    def say_budget(self, sentence: str) -> None:
        """Keeps and reports a sentence about a change of the automatic budget."""
        self.budget_note = sentence
        if self.on_budget is not None:
            self.on_budget(sentence)

    def context_bytes(self) -> int:
        """Returns the bytes of host memory that contexts and caches reserved under the automatic budget."""
        return max(sum(self.contexts.values()), self.division.context_bytes + self.contexts.get(0, 0))

    def close(self) -> None:
        """Ends the engine. REQUIRES: the model and its contexts are freed."""
        if self.engine is not None:
            with self.in_use:
                self.engine.close()

    @property
    def is_closed(self) -> bool:
        """Whether the engine was freed, or belongs to the process from which this one was forked."""
        return self.engine is None or self.engine.is_closed

    @property
    def unmanaged(self) -> str:
        """Why pyorch does not manage its experts, in a sentence. "": it does, or the settings forbid it."""
        if not self.map.layers:
            return f"{self.map.path} is a dense model: it has no experts to manage and runs as it would without pyorch"
        if self.engine is not None or self.plan.settings.budget == RESIDENT:
            return ""
        return (f"{self.map.path} fits into the memory of {self.devices.name} with all its experts, where llama.cpp "
                "keeps them")

    @property
    def forked(self) -> bool:
        """Whether another process loaded the model. This process lacks its threads, and would wait for them forever."""
        return self.pid != os.getpid()

    def warm_up(self) -> None:
        """Queues the experts for the memory, once, when the budget is final. Returns at once."""
        if self.engine is not None and self._warms and not self.warmed:
            self.warmed = True
            warm.begin(self.engine, self.map, self.plan.kept)

    def keep(self) -> None:
        """Writes the data with which the next start begins, if possible."""
        if self._warms:
            warm.keep(self.engine, self.map, self.plan.settings)

    @property
    def _warms(self) -> bool:
        """False if other servers compute experts, or pools decide the forms of experts."""
        return self.plan.settings.warm and not self.plan.placed and self.division.pools is None

    def save(self) -> None:
        """Writes the data with which the next start begins, and the expert maps if the settings name a file.

        Raises:
            PyorchError: The maps cannot be written.
        """
        if self.engine is None:
            return
        settings = self.plan.settings
        self.keep()
        if settings.maps is not None:
            self.engine.wait_idle()  # until the last token is in the maps
            if self.engine.history:
                self.engine.history.write(settings.maps, self.map)

    def lost(self) -> str:
        """Returns a sentence about the lost device."""
        one = "one of the devices" if len(self.devices.each) > 1 else "the device"
        return f"{one} {self.plan.settings.device} is lost: its process ended, or cannot be reached"

    def devices_left(self) -> str:
        """Returns the setting without lost devices.

        "none" if no device is left. Also if the setting names a device that got no layer, so its state is unknown.
        """
        if self.devices is None or not self.devices.is_lost():
            return self.plan.settings.device
        names, each = device_names(self.plan.settings.device), self.devices.each
        left = [name for name, device in zip(names, each) if not device.is_lost()]
        return ",".join(left) if left and len(names) == len(each) else NONE


models: dict[int, ManagedModel] = {}  # by llama_model *
# For `models` and their contexts. It is reentrant, and loops run over copies, because the garbage collector may free
# a model at any moment.
lock = threading.RLock()


def find(model: int) -> ManagedModel | None:
    """Returns the managed model of a llama_model *; None if it was loaded without settings."""
    return models.get(model)


def is_forked(model: int) -> bool:
    """Returns whether another process loaded this managed llama_model *."""
    managed = models.get(model)
    return managed is not None and managed.forked


def _refuse_lost(model: int, context: int) -> None:
    """Raises DeviceError if the llama_model * computes on a device of another process that has ended.

    Called before a decode, because asking the device for memory would end this process; and after a successful one,
    because no other error tells that the logits were not computed.
    """
    managed = find(model)
    devices = managed.devices if managed is not None else None
    if devices is None or not devices.is_remote:
        return
    llama.llama_synchronize(context)
    if devices.is_lost():
        raise DeviceError(f"{managed.lost()}; load the model again, with it or without --device")


@contextlib.contextmanager
def decoding(model: int, context: int) -> Iterator[None]:
    """Explains a failed decode in the `with` block, which raises RuntimeError or PyorchError.

    Raises:
        DeviceError: A computing device is lost.
        ExpertReadError: The engine failed the decode, with its reason.
        KeyboardInterrupt: A callback held it.
    """
    decode_error()  # clears the error of an earlier decode
    _refuse_lost(model, context)
    try:
        yield
        _refuse_lost(model, context)
    except (RuntimeError, PyorchError):
        reason = decode_error()
        if reason:
            raise ExpertReadError(reason) from None
        _refuse_lost(model, context)
        raise
    finally:
        raise_held()
