"""What a sweep has measured, and the file that keeps it: a sweep that was interrupted goes on where it ended."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import FormatError, PyorchError
from pyorch.eval.arc import Accuracy, average
from pyorch.eval.method import Slots
from pyorch.eval.perplexity import Divergence
from pyorch.eval.speed import Speed
from pyorch.files import check_target, write_text

VERSION = 3


@dataclass(frozen=True)
class Judgement:
    """Accuracies, one for each file, and what was done to reach them. divergence: on other text, None if not asked."""

    accuracies: tuple[Accuracy, ...]
    slots: Slots
    divergence: Divergence | None = None

    def average(self, metric: str) -> float:
        """Mean over the files, as in the paper."""
        return average(self.accuracies, metric)


class Record:
    """What a sweep has measured, by row, and the file that keeps it. Without a path nothing is kept.

    conditions: on which all of it depends. PyorchError if the file was made under others, FormatError if it is
    no such file.
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
            version, conditions = value["version"], dict(value["conditions"])
            judgements = {key: _judgement(judged) for key, judged in value["judgements"].items()}
            speeds = {key: [Speed(**speed) for speed in rounds] for key, rounds in value["speeds"].items()}
        except OSError as error:
            raise FormatError(f"{self._path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FormatError(f"{self._path} is no record of a sweep: name another file with --resume") from None
        if version != VERSION:
            raise FormatError(f"{self._path} has version {version}, this pyorch writes {VERSION}: name another file")
        for name, value in self._conditions.items():
            if conditions.get(name) != value:
                raise PyorchError(
                    f"{self._path} was made with another {name}: name another file with --resume, or remove it"
                )
        self.judgements, self.speeds = judgements, speeds

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


def _judgement(judged: dict) -> Judgement:
    divergence = judged["divergence"]
    return Judgement(
        tuple(Accuracy(**one) for one in judged["accuracies"]),
        Slots(**judged["slots"]),
        None if divergence is None else Divergence(**divergence | {"blocks": tuple(divergence["blocks"])}),
    )
