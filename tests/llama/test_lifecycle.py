"""Contexts and models end: what they held is given back, and nothing grows with those that ever lived."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from gguf import GGUFReader
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap

PROMPT = range(100, 164)  # touches most experts of a layer: those of two layers are more than the budget
PROCESS = Path(__file__).with_name("aborted_context_process.py")


@pytest.mark.parametrize("end", ["freed", "kept"])
def test_a_context_that_was_aborted_inside_a_layer_stops_no_other(small_moe: Path, resident: Model, end: str) -> None:
    command = [sys.executable, PROCESS, small_moe, end, *map(str, PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)  # a second, or for ever
    assert done.returncode == 0, done.stderr
    with Context(resident.llama.model, n_ctx=128, n_threads=1) as context:
        expected = hashlib.sha256(context.decode(list(PROMPT)).tobytes()).hexdigest()
    assert done.stdout.splitlines() == ["in use: 0", expected]


def test_a_model_that_is_freed_leaves_no_routers_behind(small_moe: Path) -> None:
    with ModelMap(small_moe) as model_map, Engine(model_map, "50%") as engine:
        with engine.capture():
            model = llama.llama_model_load_from_file(str(small_moe).encode(), llama.llama_model_default_params())
        with Context(model, n_ctx=64, n_threads=1) as context:
            context.decode([1])
            gate = engine.router(3).gate
        assert np.array_equal(engine.router(3).gate, gate), "they belong to the model, not to the context"
        llama.llama_model_free(model)
        with pytest.raises(PyorchError, match="router of layer 3 is not known"):
            engine.router(3)


@pytest.mark.parametrize("predictor", ["quasi-hidden", "expert-map"])
def test_contexts_come_and_go_while_predictors_work(
    small_moe: Path, resident: Model, prompt_tokens: list[int], predictor: str
) -> None:
    """Nothing waits for a predictor at the end of a token: the end of its context does."""
    with Context(resident.llama.model, n_ctx=64, n_threads=1) as context:
        expected = np.concatenate([context.decode([token]) for token in prompt_tokens[:4]])
    for _ in range(3):
        with small_model(small_moe, "20%", prefetch=predictor) as model:
            for _ in range(8):
                with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
                    assert_same_bits(np.concatenate([context.decode([token]) for token in prompt_tokens[:4]]), expected)
            assert not any(model.engine.residency(il).in_use.any() for il in model.layers)


def test_a_context_and_its_model_may_end_after_their_engine(small_moe: Path) -> None:
    """As when a program that closes nothing is taken down: in any order."""
    program = f"""
import pyorch, llama_cpp.llama_cpp as llama
from pyorch.llama.context import Context
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap

engine = Engine(ModelMap({str(small_moe)!r}), "50%")
engine.set_prefetch("quasi-hidden", 2)
with engine.capture():
    model = llama.llama_model_load_from_file({str(small_moe).encode()!r}, llama.llama_model_default_params())
context = Context(model, n_ctx=64, n_threads=1)
context.decode([1])
engine.close()
context.close()
llama.llama_model_free(model)
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_a_model_that_computes_no_numbers_says_so(small_moe: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copy(small_moe, tmp_path / "damaged.gguf"))
    next(one for one in GGUFReader(damaged, "r+").tensors if one.name == "output_norm.weight").data[:] = np.nan
    with small_model(damaged, "50%") as model:
        for _ in range(2):
            with pytest.raises(PyorchError, match=r"damaged.gguf computes results that are not numbers: its weights"):
                next(model.generate("import os", max_tokens=2))
