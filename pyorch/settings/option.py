"""Options: what a setting is called, how it is read, its default and its help, declared once as a field of a dataclass.

The flags of commands, the keywords of pyorch.load() and of pyorch.manage(), and what one process tells another are
derived from the declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyorch.errors import PyorchError

# Where commands offer an option: what stays and comes in; what a device does; contexts; what outlives a run; what makes
# answers different.
EXPERTS, DEVICE, CONTEXT, LONG, LOSSY = GROUPS = ("experts", "device", "context", "long", "lossy")


@dataclass(frozen=True)
class Option:
    """One setting.

    read: makes the value of what a user gives, text or the value itself; ValueError or PyorchError for what it cannot
    mean. kind: what it must be, for the sentence that refuses it. flag: of commands; a flag without a metavar takes no
    value, and turns the default round. default_text: what commands say is done without the flag. plain: the name for
    those who have not read the paper, where the field has that of the paper's symbol. type: that of the value, as the
    field is annotated. repeated: commands take the flag several times, and read() a list. value_kind: what a value must
    be that is no text, where that differs.
    """

    name: str
    default: Any
    read: Callable[[Any], Any]
    kind: str
    group: str
    help: str
    flag: str
    metavar: str | None
    default_text: str
    plain: str = ""
    type: str = ""
    repeated: bool = False
    value_kind: str = ""

    @property
    def long_flag(self) -> str:
        """Of commands, the name: "--vram-budget"."""
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def accepts(self) -> str:
        """The annotation of a keyword that gives it: what `read` says that it takes, else the value or its text."""
        given = next(iter(inspect.signature(self.read).parameters.values())).annotation
        if given in ("Any", inspect.Parameter.empty):
            given = self.type if self.type.split(" ")[0] in ("bool", "int", "str", "Any") else f"str | {self.type}"
        return given if self.default is not None or given.endswith(("None", "Any")) else f"{given} | None"

    @property
    def plain_default(self) -> Any:
        """As whoever calls would write it: a number, a boolean, text, or None."""
        return told(self.default)

    def parse(self, given: Any, called: str = "") -> Any:
        """The value. PyorchError for what cannot be one. called: what the user calls it, default: its name."""
        if given is None:
            return self.default
        try:
            return self.read(given)
        except (ValueError, TypeError, OverflowError):
            kind = self.kind if isinstance(given, str) else self.value_kind or self.kind
            raise PyorchError(f"{called or self.name} is {given}, and must be {kind}") from None


def option(
    default: Any, read: Callable[[Any], Any], kind: str = "", *, group: str = EXPERTS, help: str, flag: str = "",
    metavar: str | None = None, default_text: str = "", plain: str = "",
    repeated: bool = False, value_kind: str = "",
) -> Any:
    """A field that is an option."""
    declared = Option("", default, read, kind, group, help, flag, metavar, default_text, plain,
                      repeated=repeated, value_kind=value_kind)
    return dataclasses.field(default=default, metadata={"option": declared})


def options(cls: type) -> dict[str, Option]:
    """The options among the fields of a dataclass, by name."""
    return {
        field.name: dataclasses.replace(field.metadata["option"], name=field.name, type=field.type)
        for field in dataclasses.fields(cls) if "option" in field.metadata
    }


def parse_fields(settings: Any) -> None:
    """In __post_init__: makes values of what the fields were given."""
    for name, declared in options(type(settings)).items():
        object.__setattr__(settings, name, declared.parse(getattr(settings, name)))


def texts(settings: Any, defaults: bool = False) -> dict[str, Any]:
    """What differs from the defaults, or all, as another process can be told it: numbers, booleans, text and None."""
    found = {}
    for name, declared in options(type(settings)).items():
        value = getattr(settings, name)
        if defaults or value != declared.default:
            found[name] = told(value)
    return found


def told(value: Any) -> int | float | str | None:
    """A value of an option, as parse() reads it in any process."""
    return value if value is None or isinstance(value, (int, float)) else str(value)


def flag(given: Any) -> bool:
    """Of True, False, "1" or "0". ValueError for anything else."""
    if given not in (True, False, "0", "1"):
        raise ValueError(given)
    return given in (True, "1")


def text(given: Any) -> str:
    """TypeError for anything that is not text."""
    if not isinstance(given, str):
        raise TypeError(given)
    return given


def whole(most: int, least: int = 1) -> Callable[[Any], int]:
    """Reads whole numbers to the most that llama.cpp takes. A number 0 stands for the default, text below least for
    nothing."""
    def read(given: Any) -> int:
        number = int(given)
        if isinstance(given, (bool, float, bytes)) or not (least if isinstance(given, str) else 0) <= number <= most:
            raise ValueError(given)
        return number

    return read
