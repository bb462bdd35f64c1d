"""The scheduler of a running cluster as a Ray actor. It places experts by recent requests, and moves them.

Requests do not pass through it. It keeps no state of its own: each time it asks the servers for their plan, their
routers' selections and the memo that it gave them. So if it dies, Ray restarts it and it continues.

The plan has a number, and each server has a copy. A server's row in it lists the experts that it keeps in memory; the
other rows tell it which servers to ask for the rest. Experts move in rounds, one for each server in each round:

1. All servers get the plan without the experts that will be evicted, and with the arrivals of the last round. From now
   on no server asks for the evicted experts.
2. Servers evict these experts, and load the next ones.

So servers ask for an expert only where it is. It is evicted only while another server has it, and all servers know
that. If this is interrupted at any point, every server can compute all requests, if necessary from its own disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from pyorch.cluster.local_ray import ask_all, ray_library
from pyorch.cluster.members import Activity, Plan
from pyorch.cluster.migration import DISK, Load, Migration
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.cluster.rebalancing import Recent, Setting, Verdict, place_again
from pyorch.errors import PyorchError

NAME = "/scheduler"  # of the actor; no server can have this name
_LOOK_SECONDS = 8.0  # for servers to report their work
_PLAN_SECONDS = 30.0  # to follow another plan
_HOLD_SECONDS = 90.0  # to load an expert


@dataclass(frozen=True)
class Progress:
    """The progress of a migration: experts that arrived, of all that move."""

    done: int
    total: int


@dataclass(frozen=True)
class Report:
    """The scheduler's state.

    Attributes:
        pid: The process of the actor.
        interval: Seconds between decisions.
        next: The time of the next decision, in seconds since the epoch.
        plan: The number of the present plan.
        last: The last decision, None before the first one.
        local: Each server's share of activations that it computed itself in the last window.
        moving: The progress of a migration, None if no experts move.
        moved: The experts that the last completed migration moved.
        failed: Why the last migration did not complete, "" if it did.
    """

    pid: int
    interval: float
    next: float
    plan: int
    last: Verdict | None
    local: Mapping[str, float]
    moving: Progress | None
    moved: int
    failed: str


@dataclass(frozen=True, eq=False)
class _Memo:
    """The memo that servers keep for the scheduler. target: the target of a running migration."""

    number: int
    recent: Recent
    last: Verdict | None
    target: Placement | None
    moved: int
    next: float


class Scheduler:
    """The actor. Ray calls its methods, several at once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._names = setting.problem.servers
        self._recent = Recent.begin(setting, time.time())
        self._last: Verdict | None = None
        self._plan: Placement | None = None
        self._number = 0
        self._memo_number = -1
        self._absent_since: dict[str, float] = {}
        self._moving: Progress | None = None
        self._target: Placement | None = None  # of a migration that an earlier life of the scheduler began
        self._moved, self._failed = 0, ""
        self._deciding = threading.Lock()
        self._ending = threading.Event()
        self._next = time.time() + setting.interval
        threading.Thread(target=self._run, daemon=True).start()

    def report(self) -> Report:
        """Returns the scheduler's state."""
        return Report(
            os.getpid(), self._setting.interval, self._next, self._number, self._last, dict(self._recent.local),
            self._moving, self._moved, self._failed,
        )

    def rebalance(self) -> Verdict:
        """Decides now. Experts move in the background."""
        return self._decide()

    def stop(self) -> None:
        """Stops: begins no further decision or round."""
        self._ending.set()

    def _run(self) -> None:
        with self._surviving(), self._deciding:
            self._go_on(self._look())
        while not self._ending.wait(max(0.0, self._next - time.time())):
            self._next = time.time() + self._setting.interval
            with self._surviving():
                self._decide()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Reports errors, so that the next interval is tried again."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._last = Verdict(time.time(), False, f"the scheduler failed: {type(error).__name__}: {error}")

    def _decide(self) -> Verdict:
        """Asks all servers, makes a placement, and begins to move experts if that pays."""
        with self._deciding:
            if self._moving is not None:
                return Verdict(time.time(), False, "experts are still moving to the last placement")
            found = self._look()
            if self._go_on(found):
                return Verdict(time.time(), False, "experts move on to the placement that was adopted last")
            verdict, candidate = self._judge(found)
            self._last = verdict
            self._remember(candidate if verdict.adopted else None)
            if verdict.adopted:
                self._begin(candidate, list(found))
            return verdict

    def _judge(self, found: Mapping[str, Activity]) -> tuple[Verdict, Placement | None]:
        now = self._recent.at
        absent = [name for name in self._names if name not in found]
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
        for name, since in self._absent_since.items():
            if now - since < self._setting.interval:
                return Verdict(now, False, f"server {name} does not answer; its experts are placed anew when it has "
                                           f"not for {self._setting.interval:g} s"), None
        if not found or self._plan is None:
            return Verdict(now, False, "no server answers"), None
        if not self._recent.uses.uses.any():
            return Verdict(now, False, "there were no requests yet"), None
        try:
            candidate, decision = place_again(self._setting, self._plan, self._recent, list(found))
        except PyorchError as error:
            return Verdict(now, False, str(error)), None
        return Verdict.of(now, decision), candidate

    def _look(self) -> dict[str, Activity]:
        """Asks all servers. Then all that answer follow one plan, in which each row is true."""
        found = {name: activity for name, activity in self._ask(self._names, "activity", seconds=_LOOK_SECONDS).items()
                 if isinstance(activity, Activity)}
        self._take_memo(found)
        self._recent.look(self._setting, {name: activity.work for name, activity in found.items()}, time.time())
        return self._agreed(found)

    def _take_memo(self, found: Mapping[str, Activity]) -> None:
        """Takes the servers' memo if it is newer than the own one: after a restart."""
        memos = [activity.memo for activity in found.values() if activity.memo is not None]
        newest = max(memos, key=lambda memo: memo.number, default=None)
        if newest is not None and newest.number > self._memo_number:
            self._memo_number, self._recent, self._last = newest.number, newest.recent, newest.last
            self._moved, self._target, self._next = newest.moved, newest.target, newest.next

    def _go_on(self, found: Mapping[str, Activity]) -> bool:
        """Continues a migration of an earlier life of the scheduler. Returns whether there was one."""
        target, self._target = self._target, None
        if target is None or self._plan is None:
            return False
        self._begin(target, list(found))
        return True

    def _agreed(self, found: dict[str, Activity]) -> dict[str, Activity]:
        """Makes these servers follow one plan, and returns those that do.

        Servers that were interrupted, or came later, may follow different plans. Each server's own row is true.
        """
        if not found:
            return found
        plans = {name: activity.plan for name, activity in found.items()}
        number = max(plan.number for plan in plans.values())
        newest = next(plan.placement for plan in plans.values() if plan.number == number)
        device = newest.device.copy()
        for name, plan in plans.items():
            own = self._names.index(name)
            device[own] = plan.placement.device[own]
        self._plan, self._number = replace(newest, device=device), number
        if all(plan.number == number for plan in plans.values()) and (device == newest.device).all():
            return found
        self._number += 1
        answers = self._ask(list(found), "follow", self._whole_plan, _PLAN_SECONDS)
        return {name: found[name] for name, answer in answers.items() if answer is None}

    def _whole_plan(self, _: str) -> tuple[Plan]:
        return (Plan(self._plan, self._number),)

    def _begin(self, candidate: Placement, present: Sequence[str]) -> None:
        self._failed = ""
        held = self._plan.held
        self._moving = Progress(0, int((candidate.held & ~held).sum()))
        threading.Thread(target=self._migrate, args=(candidate, present), daemon=True).start()

    def _migrate(self, candidate: Placement, present: Sequence[str]) -> None:
        done = 0
        try:
            for arrived in self._rounds(candidate, present):
                done += arrived
                self._moving = replace(self._moving, done=done)
        except PyorchError as error:
            self._failed = str(error)
        except Exception as error:  # otherwise the progress would be shown for ever
            self._failed = f"{type(error).__name__}: {error}"
        finally:
            self._moved = done
            with self._deciding, contextlib.suppress(PyorchError):
                self._moving = None
                self._remember(None)

    def _rounds(self, candidate: Placement, present: Sequence[str]):
        """Moves experts, and yields after each round how many have arrived.

        Raises:
            PyorchError: A server was lost meanwhile.
        """
        is_present = np.isin(self._names, present)
        resident = self._plan.held & is_present[:, None, None]
        migration = Migration(resident, candidate.held, self._recent.uses.expected, self._setting.moving)
        held = resident.copy()  # the state that the servers know
        loads: list[Load] = []
        while not self._ending.is_set():
            for load in loads:
                migration.finish(load)
            n_arrived, ended = len(loads), migration.done
            loads = [load for n in np.flatnonzero(is_present) if (load := migration.next_load(int(n))) is not None]
            # From now on servers ask for the arrivals, and not for experts that will be evicted.
            self._publish(self._known(candidate, resident, is_present), present)
            yield n_arrived
            left = held & ~resident
            held = resident.copy()
            self._hold(present, loads, left)
            if ended:
                self._all(present, "settle", seconds=_HOLD_SECONDS)
                return
            if not loads:
                raise PyorchError("experts wait for each other's room")

    def _known(self, candidate: Placement, resident: np.ndarray, is_present: np.ndarray) -> Placement:
        """Returns the plan with the resident experts. Absent servers keep their old rows, for their return."""
        device = np.where(candidate.device != ABSENT, candidate.device, self._plan.device)
        device = np.where(resident, np.maximum(device, 0), ABSENT).astype(np.int16)
        device[~is_present] = self._plan.device[~is_present]
        return replace(self._plan, device=device, algorithm=candidate.algorithm)

    def _hold(self, present: Sequence[str], loads: Sequence[Load], left: np.ndarray) -> None:
        """Makes all servers load and evict their experts at the same time."""
        load_of = {self._names[load.server]: load for load in loads}
        drop = {name: list(map(tuple, np.argwhere(left[self._names.index(name)]).tolist())) for name in present}

        def arguments(name: str) -> tuple:
            load = load_of.get(name)
            source = "" if load is None or load.source == DISK else self._names[load.source]
            return [] if load is None else [(load.layer, load.expert)], drop[name], source

        self._all([name for name in present if name in load_of or drop[name]], "hold", arguments, _HOLD_SECONDS)

    def _publish(self, plan: Placement, present: Sequence[str]) -> None:
        """Makes all present servers follow this plan.

        Raises:
            PyorchError: A server does not.
        """
        moves = self._plan.moves_to(plan)
        if not moves:
            return
        self._number += 1
        self._plan = plan
        answers = self._ask(present, "move", lambda name: (self._number, moves), _PLAN_SECONDS)
        # Servers with another plan than the last one get the whole plan.
        rest = [name for name in present if name not in answers or answers[name] is not None]
        self._all(rest, "follow", self._whole_plan, _PLAN_SECONDS)

    def _remember(self, target: Placement | None) -> None:
        self._memo_number += 1
        memo = _Memo(self._memo_number, self._recent, self._last, target, self._moved, self._next)
        self._ask(self._names, "remember", lambda name: (memo,), _LOOK_SECONDS)

    def _all(
        self, names: Sequence[str], method: str, arguments: Callable[[str], tuple] = lambda name: (), seconds: float = 0
    ) -> None:
        """Calls a method of servers.

        Raises:
            PyorchError: A server refuses, or does not answer.
        """
        answers = self._ask(names, method, arguments, seconds)
        for name in names:
            answer = answers.get(name, TimeoutError())
            if isinstance(answer, PyorchError):
                raise PyorchError(f"server {name}: {answer}")
            if isinstance(answer, Exception):
                raise PyorchError(f"server {name} does not answer")

    def _ask(
        self, names: Sequence[str], method: str, arguments: Callable[[str], tuple] = lambda name: (), seconds: float = 0
    ) -> dict[str, Any]:
        """Returns the servers' answers or exceptions, by name, without servers that do not answer in time."""
        return ask_all(ray_library(), names, method, arguments, seconds)[0]


def start_scheduler(ray: ModuleType, setting: Setting) -> Any:
    """Starts the actor, which outlives this process. If it dies, Ray restarts it.

    It runs on this machine, which has pyorch; on another one if Ray has lost this machine.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(Scheduler).options(
        name=NAME, lifetime="detached", num_cpus=0, max_restarts=-1, max_concurrency=4, scheduling_strategy=here,
    ).remote(setting)
