"""Runs Mixture-of-Experts models larger than memory, on llama.cpp and GGUF."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pyorch import _libs

_libs.claim_llama_cpp()

if TYPE_CHECKING:
    from pyorch.engine import Engine, Stats
    from pyorch.errors import BudgetError, ExpertReadError, FormatError, PyorchError
    from pyorch.managed import manage
    from pyorch.model import LayerPolicy, Model, load
    from pyorch.modelmap import ModelMap
    from pyorch.routing import Routing
    from pyorch.substitution import Substitution

__version__: str

# Where each name is: importing all of it takes a second, and the command line's --help needs none.
_HOMES = {
    "BudgetError": "errors",
    "Engine": "engine",
    "ExpertReadError": "errors",
    "FormatError": "errors",
    "LayerPolicy": "model",
    "Model": "model",
    "ModelMap": "modelmap",
    "PyorchError": "errors",
    "Routing": "routing",
    "Stats": "engine",
    "Substitution": "substitution",
    "load": "model",
    "manage": "managed",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("pyorch")
    if name in _HOMES:
        return getattr(import_module(f"pyorch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pyorch' has no attribute '{name}'")
