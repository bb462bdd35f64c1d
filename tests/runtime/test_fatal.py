"""What ends the process in llama.cpp is said, also while llama_cpp keeps the process's stderr from the terminal."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import ctypes
import os
import llama_cpp
import pyorch.llama.model
from llama_cpp._utils import suppress_stdout_stderr
from pathlib import Path

ggml = ctypes.CDLL(str(next(Path(os.environ["LLAMA_CPP_LIB_PATH"]).glob("libggml-base.*"))))
with suppress_stdout_stderr(disable=False):
    ggml.ggml_abort(b"/home/me/llama.cpp/src/graph.cpp", 17, b"%s", b"no such gate")
"""


def test_a_fatal_error_while_a_model_is_loaded_is_said() -> None:
    ended = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert ended.returncode < 0, "the process went on"
    assert ended.stderr == "pyorch: fatal error in llama.cpp: graph.cpp:17: no such gate\n"
