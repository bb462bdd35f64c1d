"""GET and POST /residency: the present state of experts, and the settings that can change while the server runs."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyorch.errors import PyorchError
from pyorch.library.bindings import numbers
from pyorch.library.choices import default_policy, policies, predictors
from pyorch.llama.apply import apply_prefetch, apply_substitution, check_prefetch, find_buddies, find_ghosts
from pyorch.llama.managed import ManagedModel
from pyorch.planning.concurrency import Concurrency
from pyorch.runtime.engine import Engine
from pyorch.runtime.statistics import Stats, is_of_layers
from pyorch.serve.routes import FROM_HERE, Answer, Request, as_json, read_json, refusal
from pyorch.settings.budget import AUTO as AUTO_BUDGET
from pyorch.settings.budget import Budget
from pyorch.settings.prefetch import AUTO, Prefetch
from pyorch.settings.substitution import Substitution

if TYPE_CHECKING:
    from pyorch.sidecars.buddies import Buddies
    from pyorch.sidecars.ghosts import Ghosts

# The numbers of pyorch.runtime.statistics.Stats that each layer has.
LAYER_COUNTS = [number.name for number in numbers("pyorch_stats") if is_of_layers(number.part)]

_EVICTION_SECONDS = 30.0  # the longest wait for a disk that does not answer

_DIGITS = bytes.maketrans(bytes(range(32)), b"0123456789abcdefghijklmnopqrstuv")


def recall(stats: Stats) -> float | None:
    """Returns the share of absent experts that were read ahead.

    Absent experts include those that would have been absent without the reads. None: no expert was absent, or nothing
    was read ahead.
    """
    foreseen, absent = stats.prefetch_hits, stats.prefetch_hits + stats.misses - stats.prefetch_late
    return foreseen / absent if absent > 0 and foreseen + stats.prefetch_loads > 0 else None


class Residency:
    """The experts of the served model."""

    def __init__(self, managed: ManagedModel, concurrency: Concurrency, local_only: bool) -> None:
        """Args:
            managed: The served model.
            concurrency: Advice about the server's slots.
            local_only: Whether to accept changes only from this machine, because no API key protects the server.
        """
        self._managed = managed
        self._concurrency = concurrency
        self._local_only = local_only
        self._began = time.monotonic()
        self._changing = threading.Lock()
        self._policy = managed.plan.settings.policy or default_policy()
        self._prefetch = str(managed.plan.prefetch)
        self._substitution = managed.plan.settings.substitution
        self._buddies = managed.plan.buddies

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            PyorchError: The model is dense.
        """
        if self._managed.engine is None:
            raise PyorchError(f"{os.path.basename(self._managed.path)} is served without an engine: it has no routed "
                              "experts, or llama.cpp keeps them")
        return self._managed.engine

    def get(self, _: Request) -> Answer:
        return as_json(self.state())

    def post(self, request: Request) -> Answer:
        if self._local_only and not request.is_from_here():
            return refusal(403, FROM_HERE)
        body = read_json(request.body)
        if not isinstance(body, dict) or not body:
            return refusal(400, f"the body is no JSON object with some of {', '.join(self._changes())}")
        with self._changing:
            self.change(body)
            if "budget" in body:
                self._wait_for_eviction()
            return as_json(self.state())

    def _wait_for_eviction(self) -> None:
        """Waits until memory is within a reduced budget: the experts of a running layer stay until it has finished."""
        due = time.monotonic() + _EVICTION_SECONDS
        while (stats := self.engine.stats()).used_bytes > stats.budget_bytes and time.monotonic() < due:
            time.sleep(0.002)

    def state(self) -> dict[str, Any]:
        """Returns the state of all layers at one moment; see docs/reference/server.md."""
        engine, info = self.engine, self._managed.map.info
        snapshot = engine.snapshot()
        flags = snapshot.flags.tobytes().translate(_DIGITS).decode()
        width = snapshot.flags.shape[1]
        layers = []
        for i, (il, n_expert) in enumerate(engine.n_expert.items()):
            lossy = engine.substitution_stats(il)
            layers.append({
                "layer": il, "states": flags[i * width : i * width + n_expert],
                "uses": snapshot.uses[i, :n_expert].tolist(),
                **{name: getattr(snapshot.layers[i], name) for name in LAYER_COUNTS},
                "substituted": lossy.substituted, "dropped": lossy.dropped, "ghosts": lossy.ghosts,
            })
        lossy, speculated = engine.substitution_stats(), engine.speculation_stats()
        return {
            "model": os.path.basename(self._managed.path),
            "seconds": round(time.monotonic() - self._began, 3),
            "settings": {
                "budget": self._managed.budget_bytes(), "least_budget": info.floor_bytes,
                "most_budget": info.slots_bytes, "budget_follows": self._managed.follows(),
                "budget_note": self._managed.budget_note,
                "policy": self._policy, "prefetch": self._prefetch,
                "substitution": None if self._substitution is None else str(self._substitution),
                "device": self._managed.devices.name if self._managed.devices is not None else None,
                "slots": self._concurrency.n_slots,
                "suitable_slots": self._concurrency.suitable(self._managed.budget_bytes()),
                "advice": self._concurrency.advice(self._managed.budget_bytes()),
                "policies": list(policies().present), "predictors": [AUTO, *predictors().present],
            },
            "totals": {**dataclasses.asdict(snapshot.stats), "recall": recall(snapshot.stats),
                       "substituted": lossy.substituted, "dropped": lossy.dropped, "ghosts": lossy.ghosts,
                       "speculated": speculated.slots},
            "layers": layers,
        }

    def change(self, settings: Mapping[str, Any]) -> None:
        """Changes the named settings.

        All values are read before anything is changed. If one cannot be set, the changed ones get their old values.

        Raises:
            PyorchError: A value is wrong or cannot be set.
        """
        changes = self._changes()
        unknown = sorted(set(settings) - set(changes))
        if unknown:
            raise PyorchError(f'setting "{unknown[0]}" is not known: use {", ".join(changes)}')
        values = {name: change.read(settings[name]) for name, change in changes.items() if name in settings}
        undo: list[tuple[Callable, Any]] = []
        try:
            for name, value in values.items():
                undo.append((changes[name].set, changes[name].now(value)))
                changes[name].set(value)
        except PyorchError:
            for put, before in reversed(undo):
                put(before)
            raise

    def _changes(self) -> dict[str, _Change]:
        return {
            "budget": _Change(self._read_budget, lambda _: (self._managed.budget_bytes(), self._managed.is_automatic),
                              self._set_budget),
            "policy": _Change(lambda value: policies().choose(_text("policy", value)).name, lambda _: self._policy,
                              self._set_policy),
            "prefetch": _Change(self._read_prefetch, lambda _: Prefetch.parse(self._prefetch), self._set_prefetch),
            "pin": _Change(lambda value: self._read_pins("pin", value, True), self._pins_now, self._set_pins),
            "unpin": _Change(lambda value: self._read_pins("unpin", value, False), self._pins_now, self._set_pins),
            "substitution": _Change(self._read_substitution, lambda _: (self._substitution, None, self._buddies),
                                    self._set_substitution),
        }

    def _read_budget(self, value: Any) -> tuple[int, bool]:
        """Returns bytes, and whether the budget follows free memory from now on."""
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise PyorchError(f"budget {json.dumps(value)} is not understood: use bytes, or text such as \"40%\" or "
                              '"1.5GiB"')
        budget = Budget.parse(value)
        if budget == AUTO_BUDGET:
            if not self._managed.may_follow:
                raise PyorchError("the budget can become auto only in a server that was started with --budget auto, "
                                  "without other servers' experts and without a device in the same memory")
            return self._managed.budget_bytes(), True
        ghosts = self._managed.plan.ghosts
        return budget.resolve(self._managed.map.info, ghosts.n_bytes if ghosts is not None else 0), False

    def _set_budget(self, given: tuple[int, bool]) -> None:
        n_bytes, is_automatic = given
        with self._managed.in_use:  # else the budget could follow free memory once more, and the user's is lost
            self._managed.set_budget(n_bytes)
            self._managed.is_automatic = is_automatic

    def _set_policy(self, policy: str) -> None:
        self.engine.set_policy(policy)
        self._policy = policy

    def _read_prefetch(self, value: Any) -> Prefetch:
        prefetch = Prefetch.parse(_text("prefetch", value))
        check_prefetch(prefetch, len(self.engine.n_expert))
        if self._managed.speculating:
            raise PyorchError("layers compute with the predictor's forecasts (--speculate): prefetch cannot be changed")
        return prefetch

    def _set_prefetch(self, prefetch: Prefetch) -> None:
        apply_prefetch(prefetch, self.engine, self._managed.plan.sidecars)
        self._prefetch = str(prefetch)

    # Pins are, by layer and expert, whether to pin the expert.

    def _read_pins(self, name: str, value: Any, pinned: bool) -> dict[int, dict[int, bool]]:
        """Reads {"3": [1, 2]}: experts by layer."""
        try:
            experts = {int(il): sorted({_index(i) for i in ids}) for il, ids in value.items()}
        except (AttributeError, TypeError, ValueError):
            raise PyorchError(
                f'{name} is not understood: use lists of experts by layer, such as {{"3": [0, 7]}}'
            ) from None
        for il, ids in experts.items():
            n_expert = self.engine.n_expert.get(il)
            if n_expert is None:
                raise PyorchError(f"{name}: layer {il} has no routed experts")
            if ids and not 0 <= ids[0] <= ids[-1] < n_expert:
                raise PyorchError(f"{name}: layer {il} has experts 0 to {n_expert - 1}, not {ids[0]} to {ids[-1]}")
        return {il: dict.fromkeys(ids, pinned) for il, ids in experts.items()}

    def _pins_now(self, of: dict[int, dict[int, bool]]) -> dict[int, dict[int, bool]]:
        flags = {il: self.engine.residency(il).pinned for il in of}
        return {il: {i: bool(flags[il][i]) for i in ids} for il, ids in of.items()}

    def _set_pins(self, pins: dict[int, dict[int, bool]]) -> None:
        now = self._pins_now(pins)
        for il, wanted in pins.items():
            self.engine.pin(il, [i for i, pinned in wanted.items() if pinned and not now[il][i]])
            self.engine.unpin(il, [i for i, pinned in wanted.items() if not pinned and now[il][i]])

    def _read_substitution(self, value: Any) -> tuple[Substitution | None, Ghosts | None, Buddies | None]:
        wanted = None if value is None else Substitution.parse(_text("substitution", value))
        if wanted is not None and not wanted.lossy:
            wanted = None
        plan = self._managed.plan
        ghosts = find_ghosts(wanted, plan.sidecars)
        return wanted, ghosts, self._buddies or find_buddies(wanted, plan.settings.buddies, plan.sidecars)

    def _set_substitution(self, given: tuple[Substitution | None, Ghosts | None, Buddies | None]) -> None:
        substitution, ghosts, lists = given
        for il in self.engine.n_expert:
            apply_substitution(self.engine, il, substitution, lists, ghosts)
        self._substitution, self._buddies = substitution, lists


class _Change(NamedTuple):
    """A setting: functions that read a new value, return the present value for its place, and set a value."""

    read: Callable[[Any], Any]
    now: Callable[[Any], Any]
    set: Callable[[Any], None]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PyorchError(f"{name} {json.dumps(value)} is not text")
    return value


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value
