"""Converters: checkpoints to GGUF, and the sidecars that pyorch adds beside a model."""

from pyorch.convert.to_gguf import Conversion, convert

__all__ = ["Conversion", "convert"]
