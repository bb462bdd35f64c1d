"""Converters: checkpoints to GGUF, and the sidecars that pyorch adds next to a model."""
