"""A process that is forked has no threads of its parent: nothing in it waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import python

from pyorch.llama.interception import FORKED_BEFORE
from pyorch.runtime.engine import FORKED

PROCESS = Path(__file__).with_name("forked_process.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_model_that_was_used_is_refused_in_a_forked_process_and_closing_it_there_does_nothing(
    small_moe: Path,
) -> None:
    done = python(PROCESS, small_moe)  # seconds, or for ever
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"generate: {FORKED}", f"stats: {FORKED}", f"context: {FORKED}", f"decode: {FORKED}",
        f"decode in Llama's context: {FORKED}", f"load anew: {FORKED_BEFORE}",
        "closed: the model was closed: load it again", "closed by a child", "status 0",
        "status 1",
        "same",
    ]
    assert "left open by a child" in done.stderr
