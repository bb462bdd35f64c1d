"""What a harness is given after --model_args: the model, and options of commands, by the names of their flags.

    model=olmoe.gguf,budget=40%,prefetch=none
    model=olmoe.gguf,cache_rate=0.5,lossy="max_replaced=3,min_entropy=p20"

lm_eval cuts the text at commas. Where `lossy` has no quotes around it, its parts after the first one arrive as
arguments of their own, and are put together again here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.settings.option import options
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import Substitution

MAX_LENGTH = 4096  # tokens of a text, unless the user says otherwise: attention needs memory by its square
MAX_GEN_TOKS = 256

_LOSSY = "lossy"  # the flag that has settings of its own
_NOT_HERE = ("n_ctx", "n_ubatch", "tuned", "maps", "learned")  # the harness has its own sizes, and runs once


@dataclass(frozen=True)
class Arguments:
    """settings: keywords of pyorch.load, as values. cache_rate: None for a real budget. n_threads: None: default."""

    path: str
    settings: dict[str, Any]
    cache_rate: float | None
    n_threads: int | None
    max_length: int
    max_gen_toks: int


def read(given: Mapping[str, Any]) -> Arguments:
    """Raises PyorchError for an argument that nobody knows, or that cannot mean anything."""
    given = dict(given)
    path = given.pop("model", None) or given.pop("pretrained", None)
    given.pop("pretrained", None)
    if path is None:
        raise PyorchError("which model is missing: --model_args model=MODEL.gguf,budget=40%")
    if not Path(str(path)).is_file():
        raise PyorchError(f"{path}: no such model")
    cache_rate = _number(given, "cache_rate", float, 0, 1, None)
    max_length = _number(given, "max_length", int, 2, 1 << 30, MAX_LENGTH)
    max_gen_toks = _number(given, "max_gen_toks", int, 1, 1 << 30, MAX_GEN_TOKS)
    settings = _settings(given)
    n_threads = settings.pop("n_threads", None) or None
    checked = Settings(**settings)
    if cache_rate is not None and not isinstance(checked.substitution, Substitution):
        raise PyorchError("cache_rate simulates a cache for settings that replace absent experts: give lossy too, or "
                          "a budget in its place")
    if cache_rate is not None and "budget" in settings:
        raise PyorchError("cache_rate simulates a cache, and needs the whole model in memory: leave out budget")
    return Arguments(str(path), settings, cache_rate, n_threads, max_length, max_gen_toks)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    declared = {(option.flag or name).lstrip("-").replace("-", "_"): option
                for name, option in options(Settings).items() if name not in _NOT_HERE}
    names = {known for name, option in options(Substitution).items() for known in (name, option.plain)}
    parts = {name: given.pop(name) for name in list(given) if name in names and name not in declared}
    if parts:
        if _LOSSY not in given:
            raise PyorchError(f"{next(iter(parts))} is a setting of lossy: give lossy too, such as "
                              f'lossy="max_replaced=3,min_entropy=p20"')
        given[_LOSSY] = ",".join([str(given[_LOSSY]), *(f"{name}={value}" for name, value in parts.items())])
    unknown = sorted(given.keys() - declared.keys())
    if unknown:
        raise PyorchError(f'"{unknown[0]}" is no argument of the model pyorch: use model, cache_rate, max_length, '
                          f"max_gen_toks, {', '.join(declared)}")
    settings = {}
    for name, value in given.items():
        option = declared[name]
        # A flag without a value turns its default round: no_pack=True.
        settings[option.name] = (option.parse(value) if option.metavar is not None
                                 else option.parse(bool(value) != option.default))
    return settings


def _number(given: dict[str, Any], name: str, kind: type, least: float, most: float, default: Any) -> Any:
    value = given.pop(name, None)
    if value is None:
        return default
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        what = "a whole number" if kind is int else "a number"
        raise PyorchError(f"{name} is {value}, and must be {what} from {least} to {most}")
    return number
