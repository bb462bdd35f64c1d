"""Converters: checkpoints to GGUF, and the sidecars that pyorch adds beside a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyorch.convert.to_gguf import Conversion, convert

__all__ = ["Conversion", "convert"]


def __getattr__(name: str) -> object:
    # numpy comes with it, and neither the --help of the commands nor the child processes need that.
    if name in __all__:
        from pyorch.convert import to_gguf

        return getattr(to_gguf, name)
    raise AttributeError(f"module 'pyorch.convert' has no attribute '{name}'")
