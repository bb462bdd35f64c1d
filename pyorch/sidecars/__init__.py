"""Sidecars: the files that pyorch writes for a model, such as buddies, predictors and expert maps."""
