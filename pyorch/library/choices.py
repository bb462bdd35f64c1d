"""Choices by name, as the library lists them: policies, predictors, gating functions, and modes of lossy settings.

This module needs neither numpy nor a model, because help texts use it too.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from pyorch.errors import PyorchError
from pyorch.library.bindings import lib, string


def _flags(prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): getattr(lib, name) for name in dir(lib) if name.startswith(prefix)}


# ROUTERS, STATES, ...: the library's PYORCH_NEEDS_*, which pyorch.h describes.
Needs = cast(Any, enum.IntFlag)("Needs", _flags("PYORCH_NEEDS_"))


@dataclass(frozen=True)
class Choice:
    """One named choice.

    Attributes:
        value: The number in the C API.
        needs: It does nothing without these.
        uses: It is better with these.
        executable: Of a predictor: layers can compute with its forecasts.
    """

    name: str
    value: int
    description: str
    needs: enum.IntFlag
    uses: enum.IntFlag
    executable: bool


class Choices(dict[str, Choice]):
    """All choices of one kind, by name, in the library's order, including the ones for replays."""

    def __init__(self, what: str, choices: Iterable[Choice]) -> None:
        super().__init__((choice.name, choice) for choice in choices)
        self.what = what

    @property
    def present(self) -> tuple[str, ...]:
        """The names of choices that are not only for replays."""
        return tuple(name for name, choice in self.items() if not choice.needs & (Needs.FUTURE | Needs.REPLAY))

    @property
    def foreseeing(self) -> tuple[str, ...]:
        """The names of choices that need to know the future."""
        return self.needing(Needs.FUTURE)

    @property
    def compared(self) -> tuple[str, ...]:
        """The names of choices for comparison."""
        return self.needing(Needs.REPLAY)

    @property
    def executable(self) -> tuple[str, ...]:
        return tuple(name for name, choice in self.items() if choice.executable)

    def needing(self, needs: enum.IntFlag) -> tuple[str, ...]:
        """Returns the names of choices that need any of `needs`."""
        return tuple(name for name, choice in self.items() if choice.needs & needs)

    def named(self, value: int) -> str | None:
        """Returns the name of the choice with this value, or None."""
        return next((name for name, choice in self.items() if choice.value == value), None)

    def choose(self, name: str, in_replay: bool = False, also: tuple[str, ...] = ()) -> Choice:
        """Returns a choice by name. also: other names that the error offers.

        Raises:
            PyorchError: The name is unknown, or only a replay can use it.
        """
        choice = self.get(name)
        if choice is None:
            known = tuple(self) if in_replay else self.present
            raise PyorchError(f'{self.what} "{name}" is not known: use {listed((*also, *known))}')
        if Needs.FUTURE in choice.needs and not in_replay:
            raise PyorchError(f'{self.what} "{name}" needs to know the future: only a replay does')
        if Needs.REPLAY in choice.needs and not in_replay:
            raise PyorchError(f'{self.what} "{name}" is there to be compared with: only a replay takes it')
        return choice


LEARNED = "learned"  # the policy that learns; a warm start continues from its state


@functools.cache
def _choices(what: str, which: int) -> Choices:
    found: list[Choice] = []
    while raw := lib.pyorch_get_choice(which, len(found)):
        found.append(Choice(string(raw.name), raw.value, string(raw.description), Needs(raw.needs), Needs(raw.uses),
                            bool(raw.executable)))
    return Choices(what, found)


policies = functools.partial(_choices, "policy", lib.PYORCH_CHOICES_POLICY)  # of eviction
predictors = functools.partial(_choices, "predictor", lib.PYORCH_CHOICES_PREDICTOR)  # of later layers' experts
speculation = functools.partial(_choices, "speculation", lib.PYORCH_CHOICES_SPECULATE)  # when forecasts are computed

# How a router turns logits into probabilities. The values are those of GGUF's expert_gating_func.
gatings = functools.partial(_choices, "gating function", lib.PYORCH_CHOICES_GATING)


def substitution(setting: str) -> Choices:
    """Returns the choices of a substitution setting: "mode", "order" or "miss"."""
    lists = {"mode": lib.PYORCH_CHOICES_SUBSTITUTE_MODE, "order": lib.PYORCH_CHOICES_SUBSTITUTE_ORDER,
             "miss": lib.PYORCH_CHOICES_ON_MISS}
    return _choices(f"substitution {setting}", lists[setting])


def default_policy() -> str:
    """Returns the default policy of an engine."""
    return policies().named(lib.pyorch_default_config.policy)


@functools.cache
def names() -> dict[str, str]:
    """Returns the text for each name between braces in help texts."""
    return {
        "policies": listed(policies().present), "policy": default_policy(), "predictors": listed(predictors().present),
        "searching": listed(name for name in predictors().present if Needs.HISTORY & predictors()[name].needs),
        "executable": listed(predictors().executable),
    }


def with_names(text: str) -> str:
    """Fills the library's names into a help text, in place of {policies} and the like."""
    return re.sub(r"\{(\w+)\}", lambda name: names().get(name[1], name[0]), text) if "{" in text else text


def listed(names: Iterable[str], word: str = "or") -> str:
    """Returns names as a sentence has them: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
