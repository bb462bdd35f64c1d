"""Tuned settings: what `pyorch tune` found for a model, which `run` and `serve` take with --tuned."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pyorch.errors import FormatError, PyorchError
from pyorch.files import write_text
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from pyorch.sidecars import container

KIND = "pyorch tuned setting"
VERSION = 1


@dataclass(frozen=True)
class TunedSetting:
    """A setting, what it was tuned for, and what was measured then.

    settings: for Substitution.parse(). budget: a share of the experts such as "50%", or a size; cache_rate: the
    share that it is. accuracy and original_accuracy: averages of `metric` over the files of the tuning questions,
    None where only the KL divergence, in nats, was asked for; speeds in tokens per second and bytes_read_per_token,
    of experts, at the budget, None where not measured.
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

    @property
    def substitution(self) -> Substitution:
        return Substitution.parse(self.settings)


def default_path(model: str | os.PathLike[str]) -> Path:
    """model.tuned.json beside the model."""
    return Path(model).with_suffix(".tuned.json")


def write_tuned(path: str | os.PathLike[str], setting: TunedSetting, model_map: ModelMap) -> None:
    """Writes the setting, whole or not at all. PyorchError where it cannot."""
    value = {
        "kind": KIND, "version": VERSION, "model": Path(model_map.path).name,
        "fingerprint": container.fingerprint(model_map), **asdict(setting),
    }
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_tuned(path: str | os.PathLike[str], model_map: ModelMap) -> TunedSetting:
    """Raises FormatError: no such file, no tuned setting, of another version or model, or settings that are none."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise FormatError(f"{path} is not a tuned setting: `pyorch tune` makes one")
    if value.get("version") != VERSION:
        raise FormatError(f"{path} has version {value.get('version')} of its format, this pyorch reads version "
                          f"{VERSION}: tune again")
    if value.get("fingerprint") != container.fingerprint(model_map):
        raise FormatError(f"{path} was made for another model, {value.get('model')}, not for {model_map.path}: "
                          "tune this one")
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
