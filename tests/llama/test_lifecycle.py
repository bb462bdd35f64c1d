"""Contexts and models end: what they held is given back, and nothing grows with those that ever lived."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from pyorch.llama.context import Context
from pyorch.llama.model import Model

PROMPT = range(100, 164)  # touches most experts of a layer: those of two layers are more than the budget
PROCESS = Path(__file__).with_name("aborted_context_process.py")


@pytest.mark.parametrize("end", ["freed", "kept"])
def test_a_context_that_was_aborted_inside_a_layer_stops_no_other(small_moe: Path, resident: Model, end: str) -> None:
    command = [sys.executable, PROCESS, small_moe, end, *map(str, PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)  # a second, or for ever
    assert done.returncode == 0, done.stderr
    with Context(resident.llama.model, n_ctx=128, n_threads=1) as context:
        expected = hashlib.sha256(context.decode(list(PROMPT)).tobytes()).hexdigest()
    assert done.stdout.splitlines() == ["in use: 0", expected]
