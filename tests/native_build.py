"""The native build tree beside the tests, for programs that are compiled against it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def headers() -> Path:
    """The llama.cpp source tree of the build, for its headers."""
    trees = sorted(ROOT.glob("build/*/llama.cpp/include/llama-moe.h"))
    if not trees or shutil.which("g++") is None:
        pytest.skip("needs the build tree of an editable install, and g++")
    return trees[0].parent.parent
