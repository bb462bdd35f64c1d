"""The automatic budget follows free memory: it gives memory back while other programs need it, and takes it again.

The available memory of the experts is the memory that they use plus the free memory under the tightest limit. A thread
compares it with the budget. Between two marks it changes nothing (hysteresis):

    available - budget < reserve / 2    reduces the budget at once, until the reserve is free
    available - budget > 2 * reserve    after QUIET_SECONDS, raises the budget by half of the surplus

It takes half of the surplus, because two programs that follow the same memory must not both take all of it. The
reserve is the margin of the automatic budget. It is larger if other programs lately allocated more memory than the
margin between two looks. It is doubled while the kernel reports that programs wait for memory (pressure).

Nothing follows while a lossy setting is on, because lossy answers depend on the experts in memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace

from pyorch.errors import BudgetError, one_line
from pyorch.llama import memory
from pyorch.llama.managed import ManagedModel
from pyorch.runtime import fatal
from pyorch.sizes import format_bytes

LEAST_PERIOD, MOST_PERIOD = 0.05, 0.5  # seconds between two looks at the memory
QUIET_SECONDS = 2.0  # a surplus must last so long
SAY_SECONDS = 10.0  # a budget that does not settle is reported so often

_FASTEST = 4e9  # bytes a second: no program is expected to allocate faster, so the next look may be later
_RATE_HALF_LIFE = 300.0  # seconds after which a fast allocation counts half
_MOST_RESERVE = 0.1  # of the limit: the largest reserve because of fast allocations
_PRESSURE = 0.1  # share of the time in which some program waited for memory
_FIND_SECONDS = 10.0  # a process may be moved to another control group


@dataclass(frozen=True)
class Look:
    """The memory at one moment.

    Attributes:
        now: Seconds of a steady clock.
        budget: Bytes that the experts may use.
        available: Bytes that they could use, without a margin.
        margin: Bytes that the automatic budget leaves free.
        limit: Bytes of the tightest limit.
        pressed: Programs wait for memory.
    """

    now: float
    budget: int
    available: int
    margin: int
    limit: int
    pressed: bool = False


class Follower:
    """Decides the budget from one look at the memory after the other. It reads no clock and no memory itself."""

    def __init__(self, floor: int, most: int) -> None:
        """Args:
            floor: The smallest budget that works, in bytes.
            most: The bytes of all experts.
        """
        self._floor = floor
        self._most = most
        self._rate = 0.0  # the fastest loss of available memory lately, in bytes a second
        self._last: Look | None = None
        self._surplus_since: float | None = None

    def next(self, look: Look) -> int | None:
        """Returns the new budget. None: it stays."""
        reserve = self._reserve(look)
        spare = look.available - look.budget
        if spare < reserve // 2:
            self._surplus_since = None
            target = max(self._floor, look.available - reserve)
            return target if target < look.budget else None
        if look.pressed or spare < 2 * reserve or look.budget >= self._most:
            self._surplus_since = None
            return None
        if self._surplus_since is None:
            self._surplus_since = look.now
        if look.now - self._surplus_since < QUIET_SECONDS:
            return None
        self._surplus_since = look.now
        return min(self._most, look.budget + (spare - reserve) // 2)

    def period(self) -> float:
        """Returns the seconds until the next look: less than the fastest program needs to use up the reserve."""
        if self._last is None:
            return LEAST_PERIOD
        spare = self._last.available - self._last.budget - self._last.margin // 2
        return min(MOST_PERIOD, max(LEAST_PERIOD, spare / max(_FASTEST, self._rate)))

    def _reserve(self, look: Look) -> int:
        last, self._last = self._last, look
        if last is not None and look.now > last.now:
            seconds = look.now - last.now
            lost = (last.available - look.available) / seconds
            self._rate = max(self._rate * 0.5 ** (seconds / _RATE_HALF_LIFE), lost)
        lost_in_time = min(self._rate * 2 * LEAST_PERIOD, _MOST_RESERVE * look.limit)
        return max(look.margin, int(lost_in_time)) * (2 if look.pressed else 1)


class _Followed:
    """A model whose budget follows the memory."""

    def __init__(self, model: ManagedModel, limit: memory.MemoryLimit) -> None:
        """limit: its free bytes include the memory that the model's experts use."""
        self.model = model
        self.follower = Follower(model.map.info.floor_bytes, model.map.info.slots_bytes)
        resident = memory.Resident.now()
        self._own = resident.own - model.engine.stats().used_bytes
        # Contexts reserved memory. As long as it is not written, it counts as free.
        unused = limit.free_bytes - _mapped_bytes(model, resident) - limit.margin_bytes - model.budget_bytes()
        self._to_come = max(0, min(unused, model.context_bytes()))
        self._said = model.budget_bytes()
        self._moved_at: float | None = None  # the last change of a budget that has not settled
        self._moves_since: float | None = None  # the first change that no line has said

    def step(self, limit: memory.MemoryLimit, pressed: bool, now: float) -> None:
        """Looks at the memory once, and changes the budget if needed. limit: as for __init__."""
        model, stats, resident = self.model, self.model.engine.stats(), memory.Resident.now()
        written = resident.own - stats.used_bytes - self._own
        to_come = max(0, min(self._to_come, self._to_come - written, model.context_bytes()))
        available = limit.free_bytes - _mapped_bytes(model, resident) - to_come
        wanted = self.follower.next(
            Look(now, stats.budget_bytes, available, limit.margin_bytes, limit.limit_bytes, pressed))
        if wanted is not None and _set_budget(model, wanted):
            self._moved_at, self._moves_since = now, self._moves_since or now
        is_settled = self._moved_at is not None and now - self._moved_at > 1.5 * QUIET_SECONDS
        if is_settled:
            self._moved_at = None
            model.settle_budget()
        if is_settled or (self._moves_since is not None and now - self._moves_since >= SAY_SECONDS):
            self._moves_since = None
            self._say(model.budget_bytes(), available, limit)

    def _say(self, budget: int, available: int, limit: memory.MemoryLimit) -> None:
        """Says the change since the last line, if there is one."""
        if budget != self._said:
            free = f"{format_bytes(max(0, available - budget))} of {format_bytes(limit.limit_bytes)}"
            why = "other programs need memory" if budget < self._said else "memory is free again"
            self.model.say_budget(f"budget {format_bytes(budget)}, before {format_bytes(self._said)}: {why}; {free} "
                                  f"are free now ({limit.source})")
            self._said = budget


def _mapped_bytes(model: ManagedModel, resident: memory.Resident) -> int:
    """Returns the bytes of files that were mapped since the model was planned, such as its dense weights.

    The kernel counts them as free, but every token needs them.
    """
    return max(0, resident.files - model.mapped_before)


def _set_budget(model: ManagedModel, wanted: int) -> bool:
    """Changes the budget. If pinned experts or the minima of layers need more, finds a budget just above theirs.

    Returns:
        False if the budget stays.
    """
    before = works = model.budget_bytes()
    refused = None
    while True:
        try:
            model.set_budget(wanted)
            works = wanted
        except BudgetError:
            refused = wanted
        if refused is None or works - refused <= before // 64:
            return works != before
        wanted = (works + refused) // 2


class _Thread:
    """Looks at the memory for all models of the process, while it has models whose budget follows."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._followed: list[_Followed] = []
        self._thread: threading.Thread | None = None

    def add(self, model: ManagedModel) -> None:
        """Begins with a model, or begins anew after it got another context."""
        with self._changed:
            others = [followed for followed in self._followed if followed.model is not model]
            limits = memory.MemoryLimits()
            limit = _without_promised(limits.tightest(), [followed.model for followed in others])
            self._followed = [*others, _Followed(model, _with_used(limit, model))]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, args=(limits,), name="pyorch-budget", daemon=True)
                self._thread.start()

    def _run(self, limits: memory.MemoryLimits) -> None:
        found_at, pressure = time.monotonic(), _Pressure()
        while True:
            now = time.monotonic()
            if now - found_at > _FIND_SECONDS:
                with contextlib.suppress(OSError):  # too many open files: the known limits still hold
                    limits, found_at = memory.MemoryLimits(), now
            pressed = pressure.is_high(limits, now)
            with self._changed:
                followed = sorted(self._followed, key=lambda each: -each.model.division.budget)
            for each in followed:
                others = [other.model for other in followed if other is not each]
                if not self._step(each, limits, others, pressed):
                    with self._changed:
                        self._followed = [other for other in self._followed if other is not each]
            with self._changed:
                if not self._followed:
                    self._thread = None
                    return
                period = min(each.follower.period() for each in self._followed)
            del followed, each, others  # a freed model must not be kept while the thread sleeps
            time.sleep(period)

    @staticmethod
    def _step(each: _Followed, limits: memory.MemoryLimits, others: list[ManagedModel], pressed: bool) -> bool:
        """Returns False if the budget no longer follows: the model was freed, or the engine failed."""
        try:
            limit = _without_promised(limits.tightest(), others)
            with each.model.in_use:
                if each.model.is_closed:
                    return False
                if each.model.follows():
                    each.step(_with_used(limit, each.model), pressed, time.monotonic())
        except OSError:  # too many open files: the next look may read the memory
            return True
        except Exception as error:
            fatal.notice(f"note: the budget stays as it is, and follows free memory no longer: {one_line(str(error))}")
            return False
        return True


class _Pressure:
    """Whether programs waited for memory in a notable share of the last second."""

    def __init__(self) -> None:
        self._at, self._stalled, self._is_high = 0.0, 0.0, False

    def is_high(self, limits: memory.MemoryLimits, now: float) -> bool:
        if now - self._at >= 1.0:
            stalled = limits.stalled_seconds() or 0.0
            self._is_high = self._at > 0 and (stalled - self._stalled) / (now - self._at) > _PRESSURE
            self._at, self._stalled = now, stalled
        return self._is_high


def _without_promised(limit: memory.MemoryLimit, others: list[ManagedModel]) -> memory.MemoryLimit:
    """Subtracts from the free bytes the memory that the experts of other models may still take."""
    free = limit.free_bytes
    for other in others:
        with other.in_use:
            if not other.is_closed:
                stats = other.engine.stats()
                free -= max(0, stats.budget_bytes - stats.used_bytes)
    return replace(limit, free_bytes=free)


def _with_used(limit: memory.MemoryLimit, model: ManagedModel) -> memory.MemoryLimit:
    """Adds the memory of the model's experts to the free bytes."""
    return replace(limit, free_bytes=limit.free_bytes + model.engine.stats().used_bytes)


_thread = _Thread()


def follow(model: ManagedModel) -> None:
    """Lets the budget of a model follow free memory from now on, if it is automatic. Returns at once.

    Call it after each new context: the memory of the context may not be written yet.
    """
    if model.may_follow and memory.is_known():
        try:
            _thread.add(model)
        except OSError as error:
            fatal.notice(f"note: the budget does not follow free memory, which cannot be read: {error.strerror}")
