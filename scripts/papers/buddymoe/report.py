"""Writes the tables of docs/measurements/lossy.md from the results of scripts.papers.buddymoe.measure.

A page names a table on a line of its own. The lines between it and the next end are replaced, if the table was
measured:

    <!-- measured: levers small -->
    <!-- end -->
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.eval.report import to_csv
from pyorch.files import write_text
from pyorch.sizes import GiB, MiB
from scripts.bench_goals import interval

MODELS = ("small", "upcycled", "less")

LEAVING = "mode=none,order=weight,miss=drop"
UNSURE = "mode=none,max_replaced=3,min_entropy=p30,order=weight,miss=drop"
FULL_REPLACEMENT = "coverage=0.95,max_buddies=16,max_replaced=3"
LEVERS = (  # the names of levers in docs/measurements/lossy.md, and settings as rows name them
    ("leave out light experts", "heaviest"), ("", "heaviest:0.7"), ("", "heaviest:1.2"),
    ("leave out all but the heaviest", f"{LEAVING},sacred=1"), ("leave out all but two", f"{LEAVING},sacred=2"),
    ("leave out all but three", f"{LEAVING},sacred=3"), ("leave out all", "mode=none,miss=drop"),
    ("ghosts compute light experts", "ghosts"), ("", "ghosts:1.2"),
    ("leave out the three lightest experts if the router is unsure", UNSURE),
    ("cache-aware routing", "mode=cache,order=weight,max_weight=0.9,sacred=1,among=12"),
    ("with a bonus", "mode=cache,order=weight,sacred=2,bonus=1.0"),
    ("buddies compute light experts", "buddies"), ("buddies, settings of the paper", FULL_REPLACEMENT),
    ("", "coverage=0.99,max_buddies=2"),
)
BETAS, READ_EXPERTS = (0.34, 0.51, 0.67), (1, 2, 4)  # of the requested ones absent; waited for by a token
TUNED = (0.75, 0.5, 0.375, 0.25)
GHOSTS_BYTES = (2, 5)  # percent of the experts' bytes, in addition to the default

Row = dict[str, Any]  # of `pyorch eval arc --json`
BEGAN = {"small": "from nothing", "upcycled": "copies", "less": "copies, trained on for 15 % of the run"}
BOTH = MODELS[:2]
WORDS = ("heaviest", "ghosts", "buddies")
_STAND_IN = ("ghosts", "mode=cache", "buddies", "coverage")  # levers that compute something else
_PLACE = re.compile(r"(<!-- measured: (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def result_in(folder: Path, part: str, name: str) -> Path:
    """Returns the file of a part and a model."""
    return folder / f"{part}.{name}.json"


class NotMeasured(PyorchError):
    """The part is not measured yet."""


class Found:
    """The results, by part and model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, part: str, name: str) -> Any:
        """Reads a result. NotMeasured: there is none. PyorchError: it is invalid."""
        path = result_in(self._folder, part, name)
        if not path.exists():
            raise NotMeasured(f"{path} is not there")
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PyorchError(f"{path} cannot be read: {error}") from None

    def rows(self, part: str, name: str) -> dict[tuple[float, str], Row]:
        """Returns rows by cache rate and settings."""
        return {(row["cache_rate"], row["settings"]): row for row in self.read(part, name)}


def write(folder: Path, page: Path) -> None:
    """Replaces the measured tables of a page, and writes CSV files into the folder of its name.

    Raises:
        PyorchError: A table is unknown, or results are invalid.
    """
    found = Found(folder)

    def anew(match: re.Match[str]) -> str:
        begin, table, name, end = match.groups()
        if table not in TABLES:
            raise PyorchError(f'{page}: there is no table "{table}"')
        try:
            text = TABLES[table](found, name) if name else TABLES[table](found)
        except NotMeasured as missing:
            print(f"the table {table} stays as it was: {missing}", file=sys.stderr)
            return match[0]
        except (LookupError, TypeError, ValueError, ArithmeticError, StopIteration, RuntimeError) as error:
            raise PyorchError(f"the table {table} cannot be made of what {folder} has: {error!r}") from None
        return f"{begin}\n{text}\n{end}"

    try:
        before = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PyorchError(f"{page} cannot be read: {error}") from None
    if before.count("<!-- measured:") != len(_PLACE.findall(before)) or not _PLACE.search(before):
        raise PyorchError(f"{page}: it has no marks of tables, or one of them has no end")
    texts = {page: _PLACE.sub(anew, before)}
    for name in MODELS:
        with contextlib.suppress(NotMeasured):
            texts[page.with_suffix("") / f"{name}.csv"] = to_csv(found.read("levers", name))
    page.with_suffix("").mkdir(exist_ok=True)
    for path, text in texts.items():
        write_text(path, text)


def _markdown(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """Returns a table. ValueError: rows are missing or have another length."""
    lines = [columns, ["---"] * len(columns), *rows]
    if len(lines) == 2 or any(len(line) != len(columns) for line in lines):
        raise ValueError("rows are missing")
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _kept(row: Row) -> str:
    """Returns the share of the lossless accuracy with the standard error of the difference, both in percent."""
    whole = row["average acc"] - row["differs acc"]
    return f"{100 * row['kept acc']:.1f} ± {100 * row['differs acc stderr'] / whole:.1f} %"


def _kl(row: Row) -> str:
    return f"{row['kl_divergence']:.4f} ± {row['kl_divergence stderr']:.4f}"


def _above(row: Row, name: str) -> str:
    return f"{row[f'kl_divergence above {name}']:+.4f} ± {row[f'kl_divergence above {name} stderr']:.4f}"


def _leads(row: Row, name: str) -> str:
    return f"{row[f'leads {name} acc']:+.3f} ± {row[f'leads {name} acc stderr']:.3f}"


def _read(row: Row) -> str:
    return f"{row['text_read_per_token']:.1f} of {row['text_absent_per_token']:.1f}"


def levers(found: Found, name: str) -> str:
    rows = found.rows("levers", name)

    def lines() -> Iterator[Sequence[str]]:
        for label, settings in LEVERS:
            half, less = rows[0.5, settings], rows[0.375, settings]
            yield (label, f"`{settings}`", _kept(half), _kept(less), _kl(half), _kl(less), _read(half), _read(less))

    return _markdown(("lever", "settings", "kept at 0.5", "0.375", "KL at 0.5", "0.375",
                      "experts read a token, of those absent, at 0.5", "0.375"), lines())


def quarter(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name in BOTH:
            rows = found.rows("quarter", name)
            for settings in WORDS:
                row = rows[0.25, settings]
                yield (BEGAN[name], f"`{settings}`", _kept(row),
                       _leads(row, "drop") if "leads drop acc" in row else "", _kl(row), _read(row))

    return _markdown(("experts began", "settings", "kept", "accuracy above leaving out", "KL",
                      "experts read a token, of those absent"), lines())


def gates(found: Found) -> str:
    every = [settings for _, settings in LEVERS if settings.startswith(_STAND_IN) and settings != "ghosts:1.2"]

    def lines() -> Iterator[Sequence[str]]:
        for settings in every:
            for name in BOTH:
                row = found.rows("levers", name)[0.5, settings]
                yield (f"`{settings}`" if name == BOTH[0] else "", BEGAN[name], _leads(row, "random"),
                       _leads(row, "drop"), _above(row, "random"), _above(row, "drop"))

    return _markdown(("settings", "experts began", "accuracy above random", "above leaving out", "KL above random",
                      "above leaving out"), lines())


def unseen(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name in BOTH:
            for (rate, settings), row in found.rows("unseen", name).items():
                if settings in WORDS or settings.endswith("miss=drop,sacred=2"):
                    beside = "leads drop acc" in row
                    yield (BEGAN[name], f"{rate:g}", f"`{settings}`", _kept(row), _leads(row, "drop") if beside else "",
                           _kl(row), _above(row, "drop") if beside else "", _read(row))

    return _markdown(("experts began", "cache rate", "settings", "kept", "accuracy above leaving out", "KL",
                      "KL above leaving out", "experts read a token, of those absent"), lines())


def ghosts_bytes(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name in BOTH:
            sizes = {percent: {(row["cache_rate"], row["settings"]): row for row in rows}
                     for percent, rows in ((size, found.read("bytes", name)[str(size)]) for size in GHOSTS_BYTES)}
            sizes[3] = found.rows("levers", name)
            for percent, rows in sorted(sizes.items()):
                yield (BEGAN[name], f"{percent} %{', the default' if percent == 3 else ''}",
                       *(f"{share(rows[rate, 'ghosts'])}" for rate in (0.5, 0.375)))

    def share(row: Row) -> str:
        left_out = row["kl_divergence"] - row["kl_divergence above drop"]
        return f"{row['kl_divergence'] / left_out:.2f} ± {row['kl_divergence above drop stderr'] / left_out:.2f}"

    return _markdown(("experts began", "ghosts' bytes, of the experts'", "KL at 0.5", "0.375"), lines())


def paper(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for small, upcycled in zip(*(found.read("paper", name) for name in BOTH), strict=True):
            yield (f"`{small['changed']}`", f"`{' '.join(filter(None, (small['base'], small['beside'])))}`",
                   *(cell for row in (small, upcycled) for cell in (
                       _leads(row, "it"), _above(row, "it"), f"{row['read beside']:.1f}, {row['read']:.1f}")))

    return _markdown(("changed", "beside", *(f"{BEGAN[name]}: {title}" if title == "accuracy above" else title
                                             for name in BOTH for title in ("accuracy above", "KL above", "read"))),
                     lines())


def adaptive(found: Found) -> str:
    def cells(windows: list[Row]) -> Iterator[str]:
        kl = [window["kl_divergence"] for window in windows]
        yield f"{statistics.mean(kl):.3f} ± {statistics.stdev(kl) / len(kl) ** 0.5:.3f}"
        yield " of ".join(f"{statistics.mean(window[field] for window in windows):.1f}"
                          for field in ("read_per_token", "absent_per_token"))

    def lines() -> Iterator[Sequence[str]]:
        by_model = [list(found.read("adaptive", name).items()) for name in BOTH]
        for i, ((small, _), (upcycled, _)) in enumerate(zip(*by_model, strict=True)):
            same = small == upcycled
            yield (f"`{small}`" if same else f"{READ_EXPERTS[i - len(BETAS)]} experts by `read_budget`",
                   *(cell for rows in by_model for cell in cells(rows[i][1])))

    return _markdown(("", *(f"{BEGAN[name]}: {title}" if title == "KL" else title
                            for name in BOTH for title in ("KL", "waited for a token, of those absent"))), lines())


def speculation(found: Found) -> str:
    words = {"quasi-hidden": "the guess, right or wrong",
             "quasi-hidden+mode=none,miss=drop": "the router's choice, without absent experts that were not guessed",
             "quasi-hidden+mode=none,miss=ghost": "the router's choice, with ghosts for the same experts"}

    def lines() -> Iterator[Sequence[str]]:
        for name in BOTH:
            rows = {settings: row for (_, settings), row in found.rows("speculation", name).items()}
            for settings, word in words.items():
                yield BEGAN[name], word, _kept(rows[settings]), _kl(rows[settings])

    return _markdown(("experts began", "computed", "kept", "KL"), lines())


def similarity(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name in MODELS:
            layers = found.read("similarity", name)
            forms = {"coactivated_cosine": ".3f", "random_cosine": ".3f", "best_cosine": ".3f",
                     "coactivated_error": ".2f", "random_error": ".2f", "best_error": ".2f", "spearman": ".2f"}
            yield BEGAN[name], *(format(statistics.mean(layer[field] for layer in layers), form)
                                 for field, form in forms.items())

    return _markdown(("experts", "cosine of outputs: most co-activated", "random", "best",
                      "relative error of a substitute: most co-activated", "random", "best",
                      "rank correlation of q(j\\|i) (eq. 4) and cosine"), lines())


def replacing(found: Found) -> str:
    """Compares buddies, random residents and dropping: of three in a layer, of all, and of the light ones."""
    three, light = FULL_REPLACEMENT, "buddies"
    ways = (
        ("three in a layer", three, "mode=random,max_replaced=3", "mode=none,max_replaced=3,miss=drop"),
        ("all", "", "mode=random,miss=drop", "mode=none,miss=drop"),
        ("light ones", light, "mode=random,order=weight,max_weight=0.9,sacred=1", "heaviest"),
    )

    def lines() -> Iterator[Sequence[str]]:
        for name in MODELS:
            rows = {settings: row for (rate, settings), row in found.rows("levers", name).items() if rate == 0.5}
            for replaced, *settings in ways:
                yield BEGAN[name], replaced, *(f"{_kept(rows[one])}, {_kl(rows[one])}" if one else ""
                                               for one in settings)

    return _markdown(("experts", "replaced", "by buddies", "by random residents", "left out"), lines())


def time(found: Found) -> str:
    columns = ("kl_divergence", "absent_per_token", "changed_per_token", "read_per_token")

    def lines() -> Iterator[Sequence[str]]:
        for windows in zip(*(found.read("time", name) for name in BOTH), strict=True):
            yield (str(windows[0]["first_token"]),
                   *(format(window[column], ".3f" if column == columns[0] else ".1f")
                     for window in windows for column in columns))

    return _markdown(("from token", *(f"{BEGAN[name]}: {title}" if title == "KL" else title for name in BOTH
                                      for title in ("KL", "absent", "left out", "waited for"))), lines())


def tune(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name in BOTH:
            for rate, tuning in zip(TUNED, found.read("tune", name), strict=True):
                tuned = tuning["tuned"]
                trial = next(one for one in tuning["trials"] if one["settings"] == tuned["settings"])
                kept = tuned["accuracy"] / tuned["original_accuracy"]
                held_out = tuned["held_out_accuracy"] / tuned["held_out_original_accuracy"]
                error = tuned["held_out_error"] / tuned["held_out_original_accuracy"]
                yield (BEGAN[name], f"{rate:g}", f"`{tuned['settings']}`", f"{100 * kept:.1f} %",
                       f"{100 * held_out:.1f} ± {100 * error:.1f} %",
                       f"{trial['experts_read_per_token']:.1f} of {trial['absent_per_token']:.1f}")

    return _markdown(("experts began", "cache rate", "winner", "kept, of the questions it was chosen by",
                      "kept, held out", "experts waited for a token, of those absent"), lines())


def speed(found: Found) -> str:
    def lines() -> Iterator[Sequence[str]]:
        for name in BOTH:
            runs = [run for run in found.read("speed", name)["runs"] if run["measurement"] is not None]
            for budget in ("50%", "37.5%", "25%"):
                without, with_it = (
                    {run["round"]: run["measurement"] for run in runs if run["config"]["label"] == label}
                    for label in (f"budget {budget}", f"budget {budget}, lossy heaviest"))
                both = sorted(without.keys() & with_it.keys())
                each = [_rate(with_it[n]) / _rate(without[n]) for n in both]
                if (between := interval(each)) is None:
                    raise PyorchError(f"speed.{name}.json has fewer than two rounds of budget {budget}")

                def pair(value: Callable[[Row], float], form: str, ours=with_it, theirs=without) -> list[str]:
                    return [format(statistics.median(map(value, side.values())), form) for side in (theirs, ours)]

                same = statistics.median(
                    statistics.mean(map(int.__eq__, with_it[n]["text"]["most_probable"],
                                        without[n]["text"]["most_probable"])) for n in both)
                yield (BEGAN[name], budget.replace("%", " %"), *pair(_rate, ".1f"),
                       f"{statistics.median(each):.2f}x ({between[0]:.2f} to {between[1]:.2f})",
                       f"{', '.join(pair(_hits, '.0f'))} %", f"{', '.join(pair(_bytes, '.0f'))} MiB",
                       f"{', '.join(pair(_waited, '.0f'))} ms", pair(_changed, ".1f")[1], f"{100 * same:.0f} %")

    return _resident(found) + _markdown(
        ("experts began", "budget", "lossless, tok/s", "`heaviest`, tok/s", "gain", "hits", "read a token",
         "waited a token", "slots of a token that are not computed", "same most probable token"), lines())


def _resident(found: Found) -> str:
    """Returns a sentence after the table."""
    results = [found.read("speed", name) for name in BOTH]
    rates = [statistics.median(_rate(run["measurement"]) for run in result["runs"]
                               if run["config"]["preload"] and run["measurement"] is not None) for result in results]
    disk = sorted(one["bytes_per_second"] / GiB for result in results for one in result["bandwidths"])
    return (f"With all experts in memory they decode {rates[0]:.0f} and {rates[1]:.0f} tok/s; the disk gave "
            f"{disk[0]:.1f} to {disk[-1]:.1f} GiB/s.\n\n")


def _rate(run: Row) -> float:
    return run["decode"]["n_tokens"] / run["decode"]["seconds"]


def _hits(run: Row) -> float:
    return 100 * run["decode"]["hits"] / (run["decode"]["hits"] + run["decode"]["misses"])


def _bytes(run: Row) -> float:
    return run["decode"]["bytes_read"] / run["decode"]["n_tokens"] / MiB


def _waited(run: Row) -> float:
    return 1000 * run["decode"]["stall_seconds"] / run["decode"]["n_tokens"]


def _changed(run: Row) -> float:
    return run["decode"]["changed_slots"] / run["decode"]["n_tokens"]


TABLES: dict[str, Callable[..., str]] = {
    "levers": levers, "quarter": quarter, "gates": gates, "unseen": unseen, "bytes": ghosts_bytes, "paper": paper,
    "adaptive": adaptive, "speculation": speculation, "similarity": similarity, "replacing": replacing, "time": time,
    "tune": tune, "speed": speed,
}
