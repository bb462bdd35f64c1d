"""The small trained model, and how models are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyorch.llama.model import Model, load

CHECKPOINT = Path(__file__).parent / "fixtures" / "small-moe"

# Ends in the middle of a statement: a model that was trained on whole files does not end its answer here.
PROMPT = """import os
import sys

class Reader:
    def __init__(self, path, mode="r"):
        self.path = os.path.abspath(path)
        self.lines = []

    def read(self):
        with open(self.path) as file:
            self.lines = [line.strip() for line in"""


def small_model(path: Path, budget: str | int, **options: object) -> Model:
    """A model with a small context of its own. One thread: those that wait for each other use a processor, too."""
    return load(path, budget=budget, **{"n_ctx": 256, "n_batch": 256, "n_threads": 1, **options})


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bytes, not values: a sum in another order would pass a tolerance."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert np.isfinite(expected).all() and expected.std() > 0, "the reference says nothing"
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))
