"""Models whose experts are looked after: what is known of each, by its llama_model *."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import llama_cpp.llama_cpp as llama

from pyorch.errors import DeviceError, ExpertReadError, FormatError, PyorchError
from pyorch.library.bindings import decode_error
from pyorch.llama import logs, warm
from pyorch.llama.apply import apply_prefetch, apply_substitution, set_uses
from pyorch.llama.device import devices_of, set_placement
from pyorch.llama.division import Division
from pyorch.llama.plan import EnginePlan
from pyorch.llama.survey import make_plan
from pyorch.runtime import fatal
from pyorch.runtime.callbacks import raise_held
from pyorch.runtime.devices import Devices
from pyorch.runtime.engine import Engine
from pyorch.runtime.mirrors import add_mirrors
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import RESIDENT
from pyorch.settings.device import NONE, PROCESSOR, device_names
from pyorch.settings.kernels import STOCK
from pyorch.settings.pools import RECOVERIES, Pools
from pyorch.settings.settings import Settings

_noted: set[str] = set()  # what people were told


def build(plan: EnginePlan) -> Engine | None:
    """The engine of a plan: everything that was decided is told to the library, and nothing is asked again.

    None where llama.cpp keeps the experts, or there are none. Raises as Engine does, and for contents of sidecars that
    do not fit.
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
            except FormatError as error:  # what the cache has is no reason not to start
                fatal.notice(f"note: {error}; eviction begins without what was learned the last time")
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
    """Says now and then how far the comparison of a copy is, which takes as long as reading both."""

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
    """The model at path, while llama.cpp loads it with these parameters: its experts are left to the engine that is
    planned and built first, and ends if loading raises. placed: other servers compute experts for it. context:
    see make_plan(). Raises as make_plan() and build() do."""
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
        managed.engine.close()
        raise


@dataclass
class ManagedModel:
    """A loaded model: what was planned for it, the engine that was built of that, and what changed since.

    engine: None where the model is dense or llama.cpp keeps its experts. devices: where the dense weights are, and
    experts, as far as there is room. division: of memory as it is now: contexts change it. speculating: layers execute
    what is forecast for them. contexts: llama_context * to its bytes, under the automatic budget. warmed: the experts
    that belong into memory were ordered (pyorch.llama.warm).
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
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.devices = devices_of(self.plan.placement)
        self.division = self.plan.division
        self.speculating = self.engine is not None and self.plan.settings.speculate

    @property
    def map(self) -> ModelMap:
        return self.plan.map

    def budget_bytes(self) -> int:
        """For experts in host memory, now."""
        return self.engine.stats().budget_bytes

    @property
    def unmanaged(self) -> str:
        """Why nothing manages its experts, in a sentence; "" where something does, or that was asked for."""
        if not self.map.layers:
            return f"{self.map.path} is a dense model: it has no experts to manage and runs as it would without pyorch"
        if self.engine is not None or self.plan.settings.budget == RESIDENT:
            return ""
        return (f"{self.map.path} fits into the memory of {self.devices.name} with all its experts, where llama.cpp "
                "keeps them")

    @property
    def forked(self) -> bool:
        """Another process loaded the model, whose threads this one lacks: whatever waits for them waits for ever."""
        return self.pid != os.getpid()

    def warm_up(self) -> None:
        """Once, when the budget stands: orders the experts that belong into memory, and returns at once."""
        if self.engine is not None and self._warms and not self.warmed:
            self.warmed = True
            warm.begin(self.engine, self.map, self.plan.kept)

    def keep(self) -> None:
        """Writes what the next start begins with, if it can be written."""
        if self._warms:
            warm.keep(self.engine, self.map, self.plan.settings)

    @property
    def _warms(self) -> bool:
        """Not where other servers compute experts, or pools decide in which form they are kept."""
        return self.plan.settings.warm and not self.plan.placed and self.division.pools is None

    def save(self) -> None:
        """Keeps what the next start begins with, and writes what was learned where the settings say. PyorchError if
        that cannot be written."""
        if self.engine is None:
            return
        settings = self.plan.settings
        self.keep()
        if settings.maps is not None:
            self.engine.wait_idle()  # until the last token was learned from
            if self.engine.history:
                self.engine.history.write(settings.maps, self.map)

    def lost(self) -> str:
        """Says that a device is."""
        one = "one of the devices" if len(self.devices.each) > 1 else "the device"
        return f"{one} {self.plan.settings.device} is lost: its process ended, or cannot be reached"

    def devices_left(self) -> str:
        """The setting without what is lost: "none" where nothing is left, or where a device that it names got no layer,
        and so is not asked."""
        if self.devices is None or not self.devices.is_lost():
            return self.plan.settings.device
        names, each = device_names(self.plan.settings.device), self.devices.each
        left = [name for name, device in zip(names, each) if not device.is_lost()]
        return ",".join(left) if left and len(names) == len(each) else NONE


models: dict[int, ManagedModel] = {}  # by llama_model *
# Of models and of the contexts in it. Reentrant, and loops run over copies: the garbage collector may free
# a model at any moment.
lock = threading.RLock()


def find(model: int) -> ManagedModel | None:
    """What is known of a llama_model *; None if it was loaded without settings in force."""
    return models.get(model)


def is_forked(model: int) -> bool:
    """Whether another process loaded this managed llama_model *."""
    managed = models.get(model)
    return managed is not None and managed.forked


def _refuse_lost(model: int, context: int) -> None:
    """DeviceError where the llama_model * computes on a device of another process, and that is gone.

    Before a decode, which might ask it for memory, and that ends the process; and after one that went well: who reads
    logits that were never computed is told nothing else.
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
    """A decode that fails inside raises the engine's sentence (ExpertReadError), or that the device is lost.

    A failure inside is a RuntimeError or a PyorchError, which stands where neither knows more.
    """
    decode_error()  # of an earlier decode
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
