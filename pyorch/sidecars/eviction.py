"""What the eviction policy `learned` has learned, beside the model: the sidecar model.eviction.gguf."""

from __future__ import annotations

import os

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "eviction"
VERSION = 1


def write(path: str | os.PathLike[str], engine: Engine, model_map: ModelMap) -> None:
    """Writes the file, whole or not at all. PyorchError under another policy, or if it cannot be written."""
    container.write(path, KIND, VERSION, model_map, {}, engine.learned())


def read(path: str | os.PathLike[str], engine: Engine, model_map: ModelMap) -> None:
    """Lets the engine go on from there. FormatError for a file that is damaged or another model's."""
    _, arrays = container.read(path, KIND, VERSION, model_map)
    try:
        engine.set_learned({name: values for name, values in arrays.items() if values.dtype == np.float32})
    except PyorchError as error:
        raise FormatError(f"{os.fspath(path)}: {error}: make it again") from None
