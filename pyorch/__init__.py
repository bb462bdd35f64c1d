"""Runs Mixture-of-Experts models larger than memory, on llama.cpp and GGUF."""

from __future__ import annotations

from importlib import import_module

from pyorch import _libs

_libs.claim_llama_cpp()
_libs.claim_gguf()
_libs.choose_spin_count()

TYPE_CHECKING = False  # importing typing would take as long as all other imports here
if TYPE_CHECKING:
    from pyorch.errors import BudgetError, DeviceError, ExpertReadError, FormatError, OutOfMemoryError, PyorchError
    from pyorch.llama.layer import LayerSettings
    from pyorch.llama.model import Model
    from pyorch.runtime.callbacks import Routing
    from pyorch.runtime.engine import Engine
    from pyorch.runtime.model_map import ModelMap
    from pyorch.runtime.statistics import Stats
    from pyorch.settings.substitution import Substitution
    from pyorch.signatures import load, manage  # editors see these in place of load and manage of _HOMES

__version__: str

# The module of each name. Importing all of them takes a second, and the command line's --help needs none.
_HOMES = {
    "BudgetError": "errors",
    "DeviceError": "errors",
    "Engine": "runtime.engine",
    "ExpertReadError": "errors",
    "FormatError": "errors",
    "LayerSettings": "llama.layer",
    "Model": "llama.model",
    "ModelMap": "runtime.model_map",
    "OutOfMemoryError": "errors",
    "PyorchError": "errors",
    "Routing": "runtime.callbacks",
    "Stats": "runtime.statistics",
    "Substitution": "settings.substitution",
    "load": "llama.model",
    "manage": "llama.interception",
}

__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("pyorch")
    if name in _HOMES:
        return getattr(import_module(f"pyorch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pyorch' has no attribute '{name}'")
