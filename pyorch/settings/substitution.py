"""Settings of buddy substitution (BuddyMoE): when a resident expert replaces an absent one, and which.

Substitution is lossy, so it is off by default. native/src/routing/substitution.cpp has the gates and the choice.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyorch.errors import PyorchError
from pyorch.library import choices
from pyorch.settings.option import LOSSY, flag, option, options, texts
from pyorch.sizes import Amount

# Each preset waits for a token's heavy experts. For light absent experts, heaviest omits them, ghosts and buddies
# replace them. heaviest needs no file and loses least for the bytes read; if experts differ, ghosts lose half as much
# (docs/measurements/lossy.md). The error of an omitted expert grows with the square of its weight. So a bound on the
# weight loses least for the bytes read, whatever the number of experts. Without a bound a token could lose all experts
# of a layer.
PRESETS = {
    "heaviest": "mode=none,order=weight,miss=drop,sacred=1,max_weight=0.9",
    "ghosts": "mode=none,order=weight,miss=ghost,sacred=1,max_weight=0.9",
    "buddies": "mode=buddies,order=weight,sacred=1,max_weight=0.9",
}

_THRESHOLD = "a number, or a percentile such as p15"
_KEY_END = re.compile("[=:]")


@dataclass(frozen=True)
class Percentile:
    """A threshold given as a percentile, 0 to 100, of a layer's distribution in the trace."""

    percent: float

    def __str__(self) -> str:
        return f"p{self.percent:g}"


def _number(given: Any) -> float:
    value = float(given)
    if not math.isfinite(value):
        raise ValueError(given)
    return value


def _bytes(given: Any) -> int:
    amount = Amount.parse(given)
    if not amount.n_bytes:
        raise ValueError(given)
    return amount.n_bytes


def _whole(most: int) -> Callable[[Any], int]:
    """Returns a reader of whole numbers from -most to most, the range of the library's type."""
    def read(given: Any) -> int:
        number = int(given)
        if (number != given and not isinstance(given, str)) or abs(number) > most:
            raise ValueError(given)
        return number

    return read


_count, _seed = _whole(2**31 - 1), _whole(2**64 - 1)
_COUNT, _SEED = "a whole number below 2147483648", "a whole number below 2^64"


def _number_or_percentile(given: Any) -> float | Percentile:
    if isinstance(given, Percentile):
        return given
    return Percentile(_number(given[1:])) if isinstance(given, str) and given.startswith("p") else _number(given)


@dataclass(frozen=True)
class Substitution:
    """The treatment of absent experts. Equation numbers and symbols are those of the BuddyMoE paper.

    An expert is absent if it is not resident when its layer is routed. Only a resident expert that the token does not
    already use can replace it. Otherwise `miss` decides: fetch, drop or ghost. A gate with the value None is off.

    Raises:
        PyorchError: A setting has no valid value, or two settings exclude each other.
    """

    mode: str = option(
        "buddies", str, "a word", group=LOSSY,
        help="replacement of an absent expert: a buddy (buddies), the resident expert that the router ranks highest, "
             "with its own weight (cache), any resident expert (random, a baseline), or none")
    alpha: float | None = option(
        None, _number, "a number", plain="coverage", group=LOSSY, default_text="the sidecar's",
        help="an expert's buddies are its most frequent companions that together have this share of all "
             "co-activations (eq. 5)")
    k: int | None = option(
        None, _count, _COUNT, plain="max_buddies", group=LOSSY,
        help="try at most this many buddies of an expert (H of algorithm 1)")
    rho: int | None = option(
        None, _count, _COUNT, plain="max_replaced", group=LOSSY,
        help="replace or omit at most this many experts of a token in a layer")
    rho_token: int | None = option(
        None, _count, _COUNT, plain="max_replaced_per_token", group=LOSSY,
        help="replace or omit at most this many experts of a token in all layers together, starting with the first "
             "layers (rho of the paper)")
    tau: float | Percentile | None = option(
        None, _number_or_percentile, _THRESHOLD, plain="min_entropy", group=LOSSY,
        help="replace nothing for a token with a router entropy (eq. 1) of at most this, because its router is sure; "
             "p15: the entropy that 15 % of the trace's tokens do not exceed")
    temperature: float = option(
        1.0, _number, "a number", group=LOSSY,
        help="temperature of the router's probabilities for min_entropy and max_lead; above 1 the router seems less "
             "sure")
    gamma: float | Percentile | None = option(
        None, _number_or_percentile, _THRESHOLD, plain="max_lead", group=LOSSY,
        help="replace nothing for a token if its likeliest expert leads the second by this much or more")
    beta: float | None = option(
        None, _number, "a number", plain="max_absent", group=LOSSY,
        help="replace nothing in a batch if this share or more of its experts is absent (eq. 2)")
    read_budget: int | None = option(
        None, _bytes, "a size above 0, such as 40MiB", group=LOSSY,
        help="adapt max_absent so that a batch waits for this many bytes of experts on average, in all layers "
             "together")
    eta: float = option(
        0.0, _number, "a number", plain="by_logit", group=LOSSY,
        help="how much the router's logit of a buddy raises its priority (eq. 3)")
    kappa: float = option(
        0.0, _number, "a number", plain="by_hops", group=LOSSY,
        help="how much each hop to a buddy, from a device to host memory or from there to another server, lowers its "
             "priority (eq. 3)")
    reuse: float = option(
        1.0, _number, "a number", group=LOSSY,
        help="multiply a buddy's priority by this for each token of the ubatch that already uses it")
    order: str = option(
        "rank", str, "a word", group=LOSSY,
        help="order in which a token's absent experts are replaced: by the router's rank (rank), or the lowest weight "
             "first (weight)")
    miss: str = option(
        "fetch", str, "a word", group=LOSSY,
        help="an absent expert that may be replaced but has no resident buddy is read (fetch), omitted (drop), or "
             "estimated by its ghost (ghost, see pyorch ghosts)")
    max_weight: float | None = option(
        None, _number, "a number", group=LOSSY,
        help="never replace or omit an expert with at least this many times the average weight of a token's experts")
    sacred: int | None = option(
        None, _count, _COUNT, group=LOSSY,
        help="never replace or omit this many of a token's heaviest experts in a layer")
    among: int | None = option(
        None, _count, _COUNT, group=LOSSY,
        help="with mode=cache, replace only with experts among the router's highest so many")
    bonus: float | None = option(
        None, _number, "a number", group=LOSSY,
        help="with mode=cache, replace only with an expert of a logit lower by at most this, as if resident experts "
             "had a bonus")
    prefill: bool = option(False, flag, "0 or 1", group=LOSSY, help="replace in prompts too, not only in decoding")
    seed: int = option(0, _seed, _SEED, group=LOSSY, help="seed of the random baseline")

    def __post_init__(self) -> None:
        for name, declared in options(type(self)).items():
            given = getattr(self, name)
            if given is None and declared.default is None:
                continue
            try:
                object.__setattr__(self, name, declared.read(given))
            except (ValueError, TypeError, OverflowError):
                raise PyorchError(f'lossy setting {_plain(name)}="{given}" is not {declared.kind}') from None
        _check(self)

    @classmethod
    def parse(cls, text: str | Substitution) -> Substitution:
        """Parses "coverage=0.95,max_replaced=3", or with the paper's symbols "alpha=0.95,rho=3".

        The text may begin with one of PRESETS: "heaviest", "heaviest,sacred=2", or with a max_weight, "heaviest:1.2".

        Raises:
            PyorchError: The text is no setting.
        """
        if isinstance(text, Substitution):
            return text
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
        if not text.strip():
            raise PyorchError(
                f"lossy settings are empty: begin with {' or '.join(PRESETS)}, or give KEY=VALUE, such as "
                "max_replaced=3"
            )
        known, values = options(cls), {}
        plain = {option.plain: name for name, option in known.items() if option.plain} | {"H": "k"}
        first, _, rest = text.partition(",")
        word, colon, bound = (part.strip() for part in first.partition(":"))
        again = next((key for item in rest.split(",") if (key := _KEY_END.split(item)[0].strip()) in PRESETS), None)
        if again is not None:
            raise PyorchError(f'lossy setting "{again}" stands first, and is the only such word: '
                              f'"{again},KEY=VALUE,..."')
        if word in PRESETS:
            preset = cls.parse(PRESETS[word])
            if colon:
                try:
                    cls.parse(f"max_weight={bound}")
                except PyorchError as error:
                    raise PyorchError(f'lossy setting "{word}:{bound}": what stands behind the colon is max_weight, '
                                      f"and {error}") from None
            rest = ",".join(filter(None, (f"max_weight={bound}" if colon else "", rest)))
            changes = cls.parse(rest) if rest else preset
            keys = [item.partition("=")[0].strip() for item in rest.split(",") if item]
            return replace(preset, **{name: getattr(changes, name) for name in (plain.get(key, key) for key in keys)})
        for item in text.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            key = plain.get(key, key)
            if key not in known:
                names = [option.plain or name for name, option in known.items()]
                meant = difflib.get_close_matches(key.partition(":")[0], [*PRESETS, *names], 1)
                hint = f" did you mean {meant[0]}?" if meant else ""
                raise PyorchError(f'lossy setting "{key}" is not known:{hint} begin with {" or ".join(PRESETS)}, or '
                                  f'give KEY=VALUE of {", ".join(names)}')
            if key in values:
                raise PyorchError(f'lossy setting "{_plain(key)}" is given twice')
            values[key] = "1" if key == "prefill" and not equals else value
        return cls(**values)  # type: ignore[arg-type]  # the fields read text

    def __str__(self) -> str:
        """Returns text that parse() reads: plain names, without defaults, after a preset only the differences."""
        changed = texts(self)
        preset: tuple[str, ...] = ()
        for name, settings in PRESETS.items():
            fixed = texts(Substitution.parse(settings))
            same = all(changed.get(key) == fixed.get(key) for key in ("mode", "miss"))
            if same and fixed.keys() <= changed.keys():
                changed = {key: value for key, value in changed.items() if value != fixed.get(key)}
                preset = (f"{name}:{changed.pop('max_weight')}" if "max_weight" in changed else name,)
                break
        parts = (f"{_plain(name)}={int(value) if value is True else value}" for name, value in changed.items())
        return ",".join((*preset, *parts)) or f"mode={self.mode}"

    @property
    def lossy(self) -> bool:
        """Whether these settings can change results."""
        return self.mode != "none" or self.miss != "fetch"

    @property
    def needs_ghosts(self) -> bool:
        """Whether they need a sidecar of ghosts."""
        return self.miss == "ghost"

    @property
    def needs_buddies(self) -> bool:
        """Whether they need a sidecar of buddies."""
        return self.mode == "buddies" or isinstance(self.tau, Percentile) or isinstance(self.gamma, Percentile)


def _check(settings: Substitution) -> None:
    for name in ("mode", "order", "miss"):
        allowed = choices.substitution(name)
        if getattr(settings, name) not in allowed:
            raise PyorchError(f'lossy setting {name}="{getattr(settings, name)}" is not known: '
                              f'use {" or ".join(allowed)}')
    if settings.alpha is not None and not 0 < settings.alpha <= 1:
        raise PyorchError(f"lossy setting coverage={settings.alpha:g} is not above 0 and at most 1")
    for name in ("k", "rho", "rho_token", "sacred", "among"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            off = f"none, without {', '.join(PRESETS)}" if name == "sacred" else "no limit"
            raise PyorchError(f"lossy setting {_plain(name)}={value} is below 1: leave it out for {off}")
    if not settings.temperature > 0:
        raise PyorchError(f"lossy setting temperature={settings.temperature:g} is not above 0")
    for name, most, why in (("kappa", 0.5, "another server may be two hops away, and no priority is negative"),
                            ("reuse", 1.0, "it discounts a buddy that was chosen before")):
        if getattr(settings, name) > most:
            raise PyorchError(f"lossy setting {_plain(name)}={getattr(settings, name):g} is above {most:g}: {why}")
    for name in ("beta", "eta", "kappa", "reuse", "bonus", "max_weight", "seed"):
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise PyorchError(f"lossy setting {_plain(name)}={value:g} is negative")
    for name in ("among", "bonus"):
        if getattr(settings, name) is not None and settings.mode != "cache":
            raise PyorchError(f"lossy setting {name} is for mode=cache, not for mode={settings.mode}")
    if settings.beta is not None and settings.read_budget is not None:
        raise PyorchError("lossy settings max_absent and read_budget exclude each other: read_budget sets max_absent")
    for name in ("tau", "gamma"):
        value = getattr(settings, name)
        if isinstance(value, Percentile) and not 0 <= value.percent <= 100:
            raise PyorchError(f"lossy setting {_plain(name)}={value} is not a percentile from p0 to p100")
        if isinstance(value, Percentile) and settings.temperature != 1:
            raise PyorchError(f"lossy setting {_plain(name)}={value} is a percentile of probabilities at temperature "
                              f"1: give a number with temperature={settings.temperature:g}")


def _plain(name: str) -> str:
    """Returns the plain name of a setting; fields may have the paper's symbol as their name."""
    return options(Substitution)[name].plain or name


OFF = Substitution(mode="none")
