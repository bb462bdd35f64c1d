"""The state of eviction for the next start: resident experts, and the state of the policy `learned`.

It is a file of the cache directory (pyorch.llama.warm).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pyorch.errors import FormatError, PyorchError
from pyorch.library.bindings import lib
from pyorch.library.numerics import np
from pyorch.runtime.engine import LEARNED, Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "eviction"
VERSION = 2  # 1 had no moments

_RESIDENT = "resident"


@dataclass(frozen=True)
class Kept:
    """The stored state.

    learned: the result of Engine.learned(); empty for another policy. resident: int32[n, 2] of il and expert, the most
    used first.
    """

    path: str
    learned: Mapping[str, np.ndarray]
    resident: np.ndarray

    def tell(self, engine: Engine) -> None:
        """Restores the learned state of an engine.

        Raises:
            FormatError: The state is not valid.
        """
        try:
            engine.set_learned(self.learned)
        except PyorchError as error:
            raise FormatError(f"{self.path}: {error}: make it again") from None


def resident(engine: Engine, model_map: ModelMap) -> np.ndarray:
    """Returns the resident experts of this moment, as Kept has them."""
    snapshot = engine.snapshot()
    layers, experts = np.nonzero(snapshot.flags & lib.PYORCH_RESIDENT)
    order = np.argsort(-snapshot.uses[layers, experts].astype(np.int64), kind="stable")
    il = np.array([layer.il for layer in model_map.layers])
    return np.stack([il[layers], experts], axis=1)[order].astype(np.int32)


def write(
    path: str | os.PathLike[str], engine: Engine, model_map: ModelMap, learned: Mapping[str, np.ndarray]
) -> None:
    """Writes the file, completely or not at all.

    Raises:
        PyorchError: It cannot be written, or there is nothing to write.
    """
    experts = resident(engine, model_map)
    arrays = {name: values for name, values in (*learned.items(), (_RESIDENT, experts)) if len(values)}
    if not arrays:
        raise PyorchError(f"{os.fspath(path)} is not written: no expert is resident, and nothing was learned")
    container.write(path, KIND, VERSION, model_map, {}, arrays)


def read(path: str | os.PathLike[str], model_map: ModelMap) -> Kept:
    """Reads the file.

    Raises:
        FormatError: It is damaged, or belongs to another model.
    """
    path = os.fspath(path)
    _, arrays = container.read(path, KIND, VERSION, model_map)
    experts = arrays.get(_RESIDENT, np.empty((0, 2), np.int32))
    n_expert = np.zeros(1 + max((layer.il for layer in model_map.layers), default=0), np.int32)
    for layer in model_map.layers:
        n_expert[layer.il] = layer.n_expert
    if not (experts.dtype == np.int32 and experts.ndim == 2 and experts.shape[1] == 2 and (experts >= 0).all()
            and (experts[:, 0] < len(n_expert)).all() and (experts[:, 1] < n_expert[experts[:, 0]]).all()):
        raise FormatError(f"{path} names experts that {model_map.path} does not have: make it again")
    learned = {name: values for name, values in arrays.items() if values.dtype == LEARNED.get(name)}
    return Kept(path, learned, experts)
