"""Tuned settings: the result of `pyorch tune` for a model, which `run` and `serve` use with --tuned."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap, beside
from pyorch.settings.substitution import Substitution
from pyorch.sidecars import json_file

KIND = "pyorch tuned setting"
VERSION = 3  # in earlier versions heaviest, ghosts and buddies were other settings


@dataclass(frozen=True)
class TunedSetting:
    """A setting, its goal, and the measurements of the tuning.

    Attributes:
        settings: For Substitution.parse().
        budget: A share of the experts such as "50%", or a size. cache_rate: the same as a share.
        accuracy: Mean of `metric` over the files of tuning questions; None if only the KL divergence, in nats, was a
            goal. original_accuracy: the same of the lossless model.
        held_out_...: The same for n_held_out other questions, with the standard error of the difference; None without
            such questions.

    Speeds are in tokens a second and bytes_read_per_token counts experts, both at the budget; None if not measured.
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
    """Returns the path model.tuned.json next to the model."""
    return beside(model, "tuned.json")


def write_tuned(path: str | os.PathLike[str], setting: TunedSetting, model_map: ModelMap) -> None:
    """Writes the setting, completely or not at all.

    Raises:
        PyorchError: It cannot be written.
    """
    json_file.write(path, KIND, VERSION, model_map, asdict(setting), indent=2)


def read_tuned(path: str | os.PathLike[str], model_map: ModelMap) -> TunedSetting:
    """Reads a setting.

    Raises:
        FormatError: There is no such file, or it is no tuned setting, of another version or model, or not valid.
    """
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
