"""The native build tree of an editable install, and the programs of native/tests that are built in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from processes import HANG_SECONDS

ROOT = Path(__file__).parent.parent


def built_tests(target: str = "native-tests") -> Path:
    """The build tree, in which the programs of native/tests are up to date, or one of them."""
    trees = sorted(tree.parent for tree in ROOT.glob("build/py3-*/CTestTestfile.cmake"))
    if not trees:
        pytest.skip("needs the build tree of an editable install: make setup")
    if not os.access(trees[0], os.W_OK):
        pytest.skip(f"needs a build tree that can be written: {trees[0]}")
    with FileLock(trees[0] / "native-tests.lock"):  # ninja does not expect another one in its tree
        done = _run("cmake", "--build", trees[0], "--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    return trees[0]


def ctest(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs ctest on our tests in a build tree."""
    return _run("ctest", "--test-dir", tree, "--label-regex", "pyorch", *options)


def _run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A tool of the virtual environment, where make has installed it, or of the system."""
    ours = Path(sys.executable).with_name(tool)
    command = [str(ours) if ours.exists() else tool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
