"""Tuned settings: what `pyorch tune` found for a model, which `run` and `serve` take with --tuned."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap, beside
from pyorch.settings.substitution import Substitution
from pyorch.sidecars import json_file

KIND = "pyorch tuned setting"
VERSION = 3  # before, heaviest, ghosts and buddies were other settings


@dataclass(frozen=True)
class TunedSetting:
    """A setting, what it was tuned for, and what was measured then.

    settings: for Substitution.parse(). budget: a share of the experts such as "50%", or a size; cache_rate: the
    share that it is. accuracy and original_accuracy: averages of `metric` over the files of the tuning questions,
    None where only the KL divergence, in nats, was asked for; speeds in tokens per second and bytes_read_per_token,
    of experts, at the budget, None where not measured. held_out_...: of n_held_out other questions, with the standard
    error of the difference between the two accuracies; None where there were none.
    """

    settings: str
    budget: str
    cache_rate: float
    metric: str
    n_questions: int
    accuracy: float | None
    original_accuracy: float | None
    kl_divergence: float | None
    tokens_per_second: float | None
    original_tokens_per_second: float | None
    bytes_read_per_token: float | None
    n_held_out: int = 0
    held_out_accuracy: float | None = None
    held_out_original_accuracy: float | None = None
    held_out_error: float | None = None

    @property
    def substitution(self) -> Substitution:
        return Substitution.parse(self.settings)


def default_path(model: str | os.PathLike[str]) -> Path:
    """model.tuned.json beside the model."""
    return beside(model, "tuned.json")


def write_tuned(path: str | os.PathLike[str], setting: TunedSetting, model_map: ModelMap) -> None:
    """Writes the setting, whole or not at all. PyorchError where it cannot."""
    json_file.write(path, KIND, VERSION, model_map, asdict(setting), indent=2)


def read_tuned(path: str | os.PathLike[str], model_map: ModelMap) -> TunedSetting:
    """Raises FormatError: no such file, no tuned setting, of another version or model, or settings that are none."""
    value = json_file.read(path, KIND, VERSION, model_map, command="tune")
    try:
        setting = TunedSetting(**{name: value[name] for name in TunedSetting.__dataclass_fields__})
    except KeyError as error:
        raise FormatError(f"{path} is damaged: it has no {error}: tune again") from None
    for name in ("settings", "budget"):
        if not isinstance(getattr(setting, name), str):
            raise FormatError(f"{path}: {name} is not a string: tune again")
    try:
        Substitution.parse(setting.settings)
    except PyorchError as error:
        raise FormatError(f"{path}: {error}") from None
    return setting
