"""Converters: checkpoints to GGUF, and the sidecars that pyorch adds beside a model."""
