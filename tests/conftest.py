"""Models that several tests share. Each is made once."""

from __future__ import annotations

import os
from pathlib import Path

# Threads that spin for one that has no core make tests five times slower on a busy machine. Read once,
# when the libraries are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
from ggufs import write_dense_model

from pyorch.cli import progress
from pyorch.convert import convert
from pyorch.settings.budget import MAPPED
from pyorch.llama.model import Model, load

# On a busy machine a command of a test may take so long that it says how far it is.
progress.INTERVAL = 86400.0

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


@pytest.fixture(scope="session")
def small_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained fixture as a GGUF: 8 layers of 64 experts, 6 used, 12 MiB of experts in BF16."""
    path = tmp_path_factory.mktemp("small-moe") / "small-moe.gguf"
    convert(CHECKPOINT, path, pre_tokenizer="gpt-2")
    return path


@pytest.fixture(scope="session")
def small_moe_q4(small_moe: Path) -> Path:
    """The same in Q4_0, whose experts lie at offsets that direct reads have to widen."""
    path = small_moe.with_name("small-moe-q4.gguf")
    convert(small_moe, path, quantize="Q4_0")
    return path


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama without experts."""
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    write_dense_model(path)
    return path


@pytest.fixture(scope="session")
def resident(small_moe: Path):
    """The small MoE with all experts mapped and none managed: what every other run must equal."""
    with small_model(small_moe, MAPPED) as model:
        yield model


@pytest.fixture(scope="session")
def prompt_tokens(resident: Model) -> list[int]:
    """About 60 tokens of Python, the language that the fixture was trained on."""
    return resident.llama.tokenize(PROMPT.encode(), add_bos=False)


def small_model(path: Path, budget: str | int, **options: object) -> Model:
    """A model with a small context of its own and two threads."""
    return load(path, budget=budget, **{"n_ctx": 256, "n_batch": 256, "n_threads": 2, **options})


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bytes, not values: a sum in another order would pass a tolerance."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert np.isfinite(expected).all() and expected.std() > 0, "the reference says nothing"
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))
