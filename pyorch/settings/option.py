"""Options: name, reader, default and help of a setting, declared once as a field of a dataclass.

The flags of commands, the keywords of pyorch.load() and pyorch.manage(), and the settings that one process passes to
another are derived from the declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyorch.errors import PyorchError

# The groups of options: memory and reads of experts; devices; contexts; files that outlive a run; lossy options.
EXPERTS, DEVICE, CONTEXT, LONG, LOSSY = GROUPS = ("experts", "device", "context", "long", "lossy")


@dataclass(frozen=True)
class Option:
    """One setting.

    Attributes:
        name: The name of the field.
        default: The default value.
        read: Makes the value from text or from the value itself. It raises ValueError or PyorchError.
        kind: The valid values, for the sentence that refuses a wrong one.
        group: One of GROUPS.
        help: The help text of the flag.
        flag: The flag of commands, if it differs from the name. A flag without metavar takes no value and negates the
            default.
        metavar: The placeholder of the value in help texts.
        default_text: The default in help texts, if it differs from `default`.
        plain: A plain name, if the field has the paper's symbol as its name.
        type: The type of the value, from the annotation of the field.
        repeated: Commands take the flag several times, and read() takes a list.
        value_kind: The valid values other than text, if they differ from `kind`.
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
        """The flag of commands, such as "--vram-budget"."""
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def accepts(self) -> str:
        """The annotation of the keyword: the parameter type of `read`, else the value's type or text."""
        given = next(iter(inspect.signature(self.read).parameters.values())).annotation
        if given in ("Any", inspect.Parameter.empty):
            given = self.type if self.type.split(" ")[0] in ("bool", "int", "str", "Any") else f"str | {self.type}"
        return given if self.default is not None or given.endswith(("None", "Any")) else f"{given} | None"

    @property
    def plain_default(self) -> Any:
        """The default as a caller writes it: a number, a boolean, text, or None."""
        return told(self.default)

    def parse(self, given: Any, called: str = "") -> Any:
        """Returns the value.

        Args:
            given: Text or a value. None: the default.
            called: The name that the user knows; by default the name of the option.

        Raises:
            PyorchError: `given` is not valid.
        """
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
    """Returns a dataclass field that is an option. Option describes the arguments."""
    declared = Option("", default, read, kind, group, help, flag, metavar, default_text, plain,
                      repeated=repeated, value_kind=value_kind)
    return dataclasses.field(default=default, metadata={"option": declared})


def options(cls: type) -> dict[str, Option]:
    """Returns the options among the fields of a dataclass, by name."""
    return {
        field.name: dataclasses.replace(field.metadata["option"], name=field.name, type=field.type)
        for field in dataclasses.fields(cls) if "option" in field.metadata
    }


def parse_fields(settings: Any) -> None:
    """Parses all options of a dataclass; its __post_init__ calls this."""
    for name, declared in options(type(settings)).items():
        object.__setattr__(settings, name, declared.parse(getattr(settings, name)))


def texts(settings: Any, defaults: bool = False) -> dict[str, Any]:
    """Returns the options that differ from their defaults, or all, as values for another process.

    The values are numbers, booleans, text and None.
    """
    found = {}
    for name, declared in options(type(settings)).items():
        value = getattr(settings, name)
        if defaults or value != declared.default:
            found[name] = told(value)
    return found


def told(value: Any) -> int | float | str | None:
    """Returns a value of an option in a form that parse() reads in any process."""
    return value if value is None or isinstance(value, (int, float)) else str(value)


def flag(given: Any) -> bool:
    """Returns the boolean of True, False, "1" or "0".

    Raises:
        ValueError: `given` is not valid.
    """
    if given not in (True, False, "0", "1"):
        raise ValueError(given)
    return given in (True, "1")


def text(given: Any) -> str:
    """Returns `given` if it is text.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(given, str):
        raise TypeError(given)
    return given


def whole(most: int, least: int = 1) -> Callable[[Any], int]:
    """Returns a reader of whole numbers up to `most`, llama.cpp's limit.

    The number 0 means the default. Text must be `least` or more.
    """
    def read(given: Any) -> int:
        number = int(given)
        if isinstance(given, (bool, float, bytes)) or not (least if isinstance(given, str) else 0) <= number <= most:
            raise ValueError(given)
        return number

    return read
