"""Flags of commands, derived from the options that pyorch.settings declares."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from pyorch.errors import PyorchError
from pyorch.library.choices import names
from pyorch.settings.budget import RESIDENT
from pyorch.settings.device_options import AUTO, NONE
from pyorch.settings.option import DEVICE, EXPERTS, GROUPS, LONG, LOSSY, Option, options
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import PRESETS, Substitution

OPTIONS = options(Settings)

_OF_A_DEVICE = ("vram_budget", "device_misses", "device_ahead")
_HANGING = 23  # columns of indentation of continued lines of a list


def add_settings(
    parser: argparse.ArgumentParser, *wanted: str, lists: Collection[str] = (),
    defaults: Mapping[str, str] | None = None, without: Collection[str] = (), repeated: Collection[str] = (),
) -> None:
    """Adds flags for groups of options, and for single ones by name. A flag that the user does not give is None.

    Args:
        parser: The parser of a command.
        wanted: Groups and names of options.
        lists: Options that take several values with commas between them; see listed().
        defaults: The default in --help, for options whose value the command chooses; "": none.
        without: Options of the groups that the command does not take.
        repeated: Options that may be given several times; see one_by_one().
    """
    groups = {*wanted, *((DEVICE,) if EXPERTS in wanted else ())}
    added = [name for name, option in OPTIONS.items()
             if (name in groups or option.group in groups) and name not in without]
    parser.set_defaults(settings_flags=[*(parser.get_default("settings_flags") or ()), *added])
    titled: dict[str, Any] = {}
    for name in sorted(added, key=lambda name: GROUPS.index(OPTIONS[name].group)):
        option = OPTIONS[name]
        group = parser
        # After the everyday options. An argument group cannot contain groups.
        if name not in _EVERYDAY and option.group in groups and isinstance(parser, argparse.ArgumentParser):
            group = titled.get(option.group) or titled.setdefault(
                option.group, parser.add_argument_group(*_TITLES.get(option.group, (option.group,))))
        _add(group, option, name in lists, (defaults or {}).get(name), name in repeated or option.repeated)


_EVERYDAY = ("budget",)
_TITLES = {
    EXPERTS: ("experts", "How they are kept and read: the defaults suit most."),
    LONG: ("what is kept in files",),
    LOSSY: ("lossy", "Off unless asked for: the model's answers change."),
}


def _help_of_substitution() -> str:
    """Returns a line for each preset of --lossy and each setting: its plain name, the paper's symbol, its effect."""
    lines = ["SETTINGS of --lossy are one of these words, behind which a colon and a number are its max_weight, as in "
             "heaviest:1.2, or KEY=VALUE,... of the keys below, or the word first and then what differs, as in "
             "heaviest,max_replaced=3:", ""]
    lines += (f"  {name:20} short for {settings}" for name, settings in PRESETS.items())
    lines += ["", "The keys, with the symbols of the BuddyMoE paper, which can be given too:", ""]
    for name, option in options(Substitution).items():
        heading = f"{option.plain} ({name})" if option.plain else name
        lines.append(f"  {heading:20} {option.help}")
    width = min(120, shutil.get_terminal_size().columns)
    return "\n".join(textwrap.fill(line, width, subsequent_indent=" " * (_HANGING if line.startswith(" ") else 0))
                     for line in lines)


def or_help(text: str) -> str:
    """Returns lossy settings; for "help" lists all settings and ends the command as --help does."""
    if text == "help":
        print(_help_of_substitution())
        raise SystemExit(0)
    return text


def given_settings(args: argparse.Namespace, *without: str) -> dict[str, Any]:
    """Returns the values of the given options by name: keywords of pyorch.load() and of Settings.

    Raises:
        PyorchError: An option has no valid value, or would have no effect.
    """
    values = {
        name: OPTIONS[name].parse(getattr(args, name), OPTIONS[name].long_flag) for name in args.settings_flags
        if name not in without and getattr(args, name) is not None
    }
    if values.get("device") == NONE:  # other options of a device, such as those of a settings file, have no effect
        values = {name: value for name, value in values.items() if name not in _OF_A_DEVICE}
    _check_lossy(values)
    if "substitution" in values and not values["substitution"].lossy:
        values["substitution"] = None
    if "maps" in values:
        _check_maps(values)
    return values


DEFAULT_DEVICE = "auto where there is a GPU, else none"  # the default of with_device()


def with_device(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings that use a GPU if there is one, unless the user chose a device or the budget "resident"."""
    from pyorch.runtime.devices import has_gpu

    if "device" in values or values.get("budget") == RESIDENT or not has_gpu():
        return values
    return {**values, "device": AUTO}


def settings_arguments(args: argparse.Namespace) -> list[str]:
    """Returns the given options as arguments for another command."""
    arguments = []
    for name in args.settings_flags:
        value, option = getattr(args, name), OPTIONS[name]
        if value is not None:
            text = str(option.parse(value) if option.repeated else value)
            arguments += [option.long_flag, *([] if option.metavar is None else [text])]
    return arguments


def listed(args: argparse.Namespace, name: str) -> tuple[Any, ...]:
    """Returns the values of an option that takes several, without duplicates; () if it was not given."""
    given = getattr(args, name)
    return tuple(dict.fromkeys(map(OPTIONS[name].parse, given.split(",")))) if given else ()


def one_by_one(args: argparse.Namespace, name: str) -> list[argparse.Namespace]:
    """Returns the arguments once for each value of a repeated option; once, if it was not given."""
    return [argparse.Namespace(**{**vars(args), name: value}) for value in getattr(args, name) or (None,)]


def _add(
    parser: Any, option: Option, several: bool, default: str | None = None, repeated: bool = False
) -> None:
    if option.metavar is None:
        parser.add_argument(option.long_flag, dest=option.name, action="store_const", const=not option.default,
                            help=_escaped(option.help))
        return
    if default is None:
        default = option.default_text or ("" if option.default is None else str(option.default))
    text = option.help + (f" (default: {default})" if default else "")
    metavar = option.metavar + (",..." if several else "")
    before = "several, with commas between them; each: " if several else "may be repeated; each: " if repeated else ""
    parser.add_argument(option.long_flag, dest=option.name, metavar=metavar, action="append" if repeated else "store",
                        type=or_help if option.name == "substitution" else str, help=_escaped(before + text))


def _escaped(text: str) -> str:
    """Escapes percent signs for argparse."""
    return text.replace("%", "%%")


def _check_lossy(values: Mapping[str, Any]) -> None:
    given = values.get("substitution")
    if values.get("tuned") is not None and given is not None:
        raise PyorchError("--tuned has a lossy setting, and --lossy is another one: give one of them")
    if "buddies" in values and given is None and values.get("tuned") is None:
        raise PyorchError("--buddies-file names lists that nothing uses: say with --lossy what replaces absent "
                          "experts, such as --lossy buddies")


def _check_maps(values: dict[str, Any]) -> None:
    from pyorch.files import check_target

    prefetch = values.get("prefetch", OPTIONS["prefetch"].default)
    if not prefetch.searches_maps:
        raise PyorchError(f'--maps is for the predictors {names()["searching"]}, and --prefetch is "{prefetch}"')
    check_target(values["maps"].absolute())
