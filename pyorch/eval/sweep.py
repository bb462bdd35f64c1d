"""Accuracy and speed of several methods at several cache rates: the paper's tables 2 to 4.

A file stores finished results, so that an interrupted sweep can resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import FormatError, PyorchError
from pyorch.eval.arc import Accuracy, Difference, difference
from pyorch.eval.judge import Judge, Judgement, OnProgress, Questions, in_turns
from pyorch.eval.method import ORIGINAL, Method, Slots, dynamic_model, read_buddies, share, static_model
from pyorch.eval.perplexity import Divergence
from pyorch.eval.speed import Speed, measure_speed, median
from pyorch.files import check_target, reading, write_text
from pyorch.llama.apply import find_ghosts
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.buddies import Buddies

VERSION = 5

METRICS = ("acc_norm", "acc")


class Record:
    """The results of a sweep, by row, and the file that stores them. Without a path nothing is stored.

    conditions: All results depend on them.

    Raises:
        FormatError: The file is no record of a sweep.
        PyorchError: The file was made under other conditions.
    """

    def __init__(self, path: str | os.PathLike[str] | None, conditions: dict[str, object]) -> None:
        self.judgements: dict[str, Judgement] = {}
        self.speeds: dict[str, list[Speed]] = {}
        self._path = Path(path).absolute() if path is not None else None
        self._conditions = conditions
        if self._path is not None:
            check_target(self._path)
            if self._path.exists():
                self._read()

    def judged(self, key: str, judgement: Judgement) -> None:
        self.judgements[key] = judgement
        self._write()

    def timed(self, key: str, speed: Speed) -> None:
        self.speeds.setdefault(key, []).append(speed)
        self._write()

    def _read(self) -> None:
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
            with self._sound():
                version, conditions = value["version"], dict(value["conditions"])
        except OSError as error:
            raise FormatError(f"{self._path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise self._no_record() from None
        if version != VERSION:
            raise FormatError(f"{self._path} has version {version}, this pyorch writes {VERSION}: name another file")
        for name, wanted in self._conditions.items():
            if conditions.get(name) != wanted:
                raise PyorchError(
                    f"{self._path} was made with another {name}: name another file with --resume, or remove it"
                )
        n_files, has_text = len(self._conditions["--data"]), bool(self._conditions["--text"])
        with self._sound():
            self.judgements = {key: _stored(one, n_files, has_text) for key, one in value["judgements"].items()}
            self.speeds = {key: [_stored_speed(speed) for speed in rounds] for key, rounds in value["speeds"].items()}

    def _no_record(self) -> FormatError:
        return FormatError(f"{self._path} is no record of a sweep: name another file with --resume")

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._no_record() from None

    def _write(self) -> None:
        if self._path is None:
            return
        value = {
            "version": VERSION,
            "conditions": self._conditions,
            "judgements": {key: asdict(judgement) for key, judgement in self.judgements.items()},
            "speeds": {key: [asdict(speed) for speed in rounds] for key, rounds in self.speeds.items()},
        }
        write_text(self._path, json.dumps(value, indent=1) + "\n")


def _stored(judged: dict, n_files: int, has_text: bool) -> Judgement:
    """Reads a stored judgement. Raises ValueError, KeyError or TypeError if it is invalid."""
    accuracies = tuple(Accuracy(**one) for one in judged["accuracies"])
    slots, text_slots = Slots(**judged["slots"]), Slots(**judged["text_slots"])
    divergence = judged["divergence"]
    if divergence is not None:
        divergence = Divergence(**divergence | {"blocks": tuple(map(float, divergence["blocks"]))})
    right = all(len(one.right) == len(one.right_norm) > 0 and set(one.right + one.right_norm) <= {"0", "1"}
                for one in accuracies)
    counted = all(isinstance(n, int) and n >= 0 for of in (slots, text_slots) for n in asdict(of).values())
    if not (right and counted and len(accuracies) == n_files and (divergence is not None) == has_text):
        raise ValueError("not of this sweep")
    if divergence is not None and not (divergence.n_tokens > 0 and divergence.blocks and math.isfinite(
            divergence.mean) and all(map(math.isfinite, divergence.blocks))):
        raise ValueError("no divergence")
    return Judgement(accuracies, slots, divergence, text_slots)


def _stored_speed(speed: dict) -> Speed:
    """Reads a stored speed; raises as _stored()."""
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in speed.values()):
        raise ValueError("no speed")
    if not (speed["n_tokens"] and speed["seconds"]):
        raise ValueError("nothing was decoded")
    return Speed(**speed)


@dataclass(frozen=True, kw_only=True)
class Plan(Questions):
    """The measurements of a sweep: every method at every cache rate, on every file.

    Attributes:
        rates: Cache rates. None: only the original is judged, at `budget`.
        methods: The methods.
        texts: Files for the divergence.
        n_text_tokens: Of each.
        speed_tokens: Decoded for each speed. 0: no speed.
        n_rounds: Of speed, in turn; the median counts.
    """

    rates: tuple[float, ...] = ()
    methods: tuple[Method, ...] = (ORIGINAL,)
    texts: tuple[str, ...] = ()
    n_text_tokens: int = 4000
    speed_tokens: int = 0
    n_rounds: int = 3


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        rate: None: the model as it is loaded.
        kept: By metric, the average as a share of the original's.
        differs: By metric, how much it exceeds the original's.
        speed: None: not measured.
        speedup: Relative to the original at the same rate.
    """

    rate: float | None
    method: str
    settings: str
    judgement: Judgement
    kept: dict[str, float]
    differs: dict[str, Difference]
    speed: Speed | None
    speedup: float | None


def run(plan: Plan, record: Record, on_progress: OnProgress) -> list[Row]:
    """Measures results that the record lacks, stores each at once, and returns the whole table."""
    if plan.speed_tokens:
        _check_rates(plan)
    judge(plan, record, on_progress)
    if plan.rates and plan.speed_tokens:
        measure_speeds(plan, record, on_progress)
    return rows(plan, record)


def _check_rates(plan: Plan) -> None:
    """Raises PyorchError, before questions are asked, if a cache is too small to decode with."""
    with ModelMap(plan.model) as model_map:
        info, beside = model_map.info, Sidecars(model_map)
        for method in plan.methods:
            ghosts = find_ghosts(method.substitution, beside)
            least = info.floor_bytes + (ghosts.n_bytes if ghosts is not None else 0)
            for rate in plan.rates:
                if rate * info.slots_bytes < least:
                    raise PyorchError(
                        f"a cache rate of {rate:g} is too small to decode with, as is done to measure speed: use "
                        f"{math.ceil(1000 * least / info.slots_bytes) / 1000:g} or more, or --speed-tokens 0")


def judge(plan: Plan, record: Record, on_progress: OnProgress) -> None:
    """Judges all rows. The original is lossless, so its accuracy is the same at every rate."""
    wanted = [(None, ORIGINAL)] + [
        (rate, method) for rate in plan.rates for method in plan.methods if method != ORIGINAL
    ]
    wanted = list({_row_key(*row): row for row in wanted if _row_key(*row) not in record.judgements}.values())
    if not wanted:
        return
    buddies = _buddies(plan)
    loaded = static_model(plan.model, **plan.options) if plan.rates else dynamic_model(
        plan.model, ORIGINAL, plan.budget, None, **plan.options)
    with loaded as model, Judge(model, plan.tasks(model), plan.texts, plan.n_text_tokens, plan.n_threads) as judging:
        for row, (rate, method) in enumerate(wanted):

            def progress(step: str, done: int, total: int, row: int = row) -> None:
                """Reports progress over all rows, as if each had as many questions as the present one."""
                whole = step == "questions"
                on_progress(step, done + whole * row * total, total * len(wanted) if whole else total)

            record.judged(_row_key(rate, method), judging.judge(method, rate, buddies, progress))


def measure_speeds(plan: Plan, record: Record, on_progress: OnProgress) -> None:
    """Measures the speeds of all rows, in rounds forward and backward, so that a drift favours no method."""
    buddies = _buddies(plan)
    methods = tuple(dict.fromkeys((ORIGINAL, *plan.methods)))
    order = list(in_turns([(rate, method) for rate in plan.rates for method in methods], plan.n_rounds))
    missing = list(order)
    for rate, method in set(order):
        for _ in record.speeds.get(_speed_key(plan, rate, method), ()):
            if (rate, method) in missing:
                missing.remove((rate, method))
    for done, (rate, method) in enumerate(missing):
        on_progress("speed", done, len(missing))
        speed = measure_speed(
            plan.model, method, share(rate), buddies, plan.data, plan.speed_tokens, **plan.options
        )
        record.timed(_speed_key(plan, rate, method), speed)


def rows(plan: Plan, record: Record) -> list[Row]:
    original = _judgement(record, None, ORIGINAL)
    table = []
    for rate in plan.rates or (None,):
        reference = _speed(plan, record, rate, ORIGINAL)
        for method in plan.methods if plan.rates else (ORIGINAL,):
            judgement = _judgement(record, rate, method)
            kept = {metric: judgement.average(metric) / whole if (whole := original.average(metric)) else math.nan
                    for metric in METRICS}
            speed = _speed(plan, record, rate, method)
            speedup = speed.rate / reference.rate if speed is not None and reference is not None else None
            differs = {metric: difference(judgement.accuracies, original.accuracies, metric) for metric in METRICS}
            table.append(Row(rate, method.name, method.settings, judgement, kept, differs, speed, speedup))
    return table


def _judgement(record: Record, rate: float | None, method: Method) -> Judgement:
    return record.judgements[_row_key(None if method == ORIGINAL else rate, method)]


def _buddies(plan: Plan) -> Buddies | None:
    if not plan.rates:
        return None
    needed = any(method.substitution is not None and method.substitution.needs_buddies for method in plan.methods)
    return read_buddies(plan.model, plan.buddies_file, needed)


def _row_key(rate: float | None, method: Method) -> str:
    return f"{'' if rate is None else f'{rate:g}'} {method.name} {method.settings}".strip()


def _speed_key(plan: Plan, rate: float, method: Method) -> str:
    return f"{_row_key(rate, method)} {plan.speed_tokens} tokens"


def _speed(plan: Plan, record: Record, rate: float | None, method: Method) -> Speed | None:
    """Returns the median of all rounds."""
    if rate is None or not plan.speed_tokens:
        return None
    rounds = record.speeds.get(_speed_key(plan, rate, method))
    return median(rounds) if rounds else None


def conditions(plan: Plan) -> dict[str, object]:
    """Returns the conditions of a plan's results, besides rates and methods, by names for the user."""
    with ModelMap(plan.model) as model_map:
        model = container.fingerprint(model_map)
        beside = model_map.sidecars()
    lossy = {"buddies": plan.buddies_file or beside.get("buddies"), "ghosts": beside.get("ghosts"),
             "predictor": beside.get("predictor")}
    return {
        "model": model,
        "--data": [_digest(path) for path in plan.data],
        "--shots": plan.n_shots,
        "--shots-data": _digest(plan.shots_data) if plan.shots_data and plan.n_shots else None,
        "--limit": plan.limit,
        "--text": [_digest(path) for path in plan.texts],
        "--text-tokens": plan.n_text_tokens if plan.texts else None,
        **{f"{kind} file": _digest(path) if path else None for kind, path in lossy.items()},
    }


def _digest(path: str | os.PathLike[str]) -> str:
    with reading(path):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
