"""The residency table under sanitizers: native/tests/residency_stress.cpp."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pyorch import _libs

ROOT = Path(__file__).parent.parent
SOURCES = ["residency", "residency_orders", "residency_reads", "readers", "source", "eviction", "block_pool", "model_map", "status"]


def headers() -> Path:
    """The llama.cpp source tree of the build, for its headers."""
    trees = sorted(ROOT.glob("build/*/llama.cpp/include/llama-moe.h"))
    if not trees or shutil.which("g++") is None:
        pytest.skip("needs the build tree of an editable install, and g++")
    return trees[0].parent.parent


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_contexts_share_a_tight_budget_while_reads_fail_and_orders_come_in(sanitizer, tmp_path):
    tree = headers()
    libraries = _libs.lib_dir()
    program = tmp_path / "residency_stress"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-pthread", "-o", program]
        + [f"-I{ROOT / 'native/include'}", f"-I{tree / 'include'}", f"-I{tree / 'ggml/include'}"]
        + [ROOT / "native/tests/residency_stress.cpp"]
        + [ROOT / f"native/src/{name}.cpp" for name in SOURCES]
        + [f"-L{libraries}", "-lllama", "-lggml-base", f"-Wl,-rpath,{libraries}"],
        check=True,
    )
    for seed in (1, 2):
        done = subprocess.run(
            [program, tmp_path / "stress.gguf", str(seed), "80"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
