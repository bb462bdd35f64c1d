"""The arrows between the packages: the contracts in pyproject.toml, kept by import-linter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# An editable install finds pyorch in the checkout, where convert/ lies beside it and not in it.
_LINT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path.insert(0, "")
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename="pyproject.toml", no_cache=True))
"""


@pytest.fixture()
def installed(tmp_path: Path) -> Path:
    """A directory with the packages as an install lays them out."""
    python_only = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__")
    shutil.copytree(ROOT / "pyorch", tmp_path / "pyorch", ignore=python_only)
    shutil.copytree(ROOT / "convert", tmp_path / "pyorch" / "convert", ignore=python_only)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _LINT], cwd=directory, capture_output=True, text=True, check=False)


def test_packages_import_only_what_is_below_them(installed: Path) -> None:
    done = lint(installed)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("module", "statement"), [
    ("runtime/engine.py", "import pyorch.llama.model"),
    ("settings/budget.py", "def later():\n    from pyorch.runtime import engine"),
    ("eval/arc.py", "import torch"),
    ("llama/engine_plan.py", "def later():\n    import os"),
    ("llama/division.py", "from pyorch.runtime import disk"),
    ("sidecars/buddies.py", "import pyorch.sidecars.unheard_of\nimport pyorch.cli"),
])
def test_an_import_upwards_is_found_wherever_it_stands(installed: Path, module: str, statement: str) -> None:
    with (installed / "pyorch" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{statement}\n")
    done = lint(installed)
    assert done.returncode != 0 and "BROKEN" in done.stdout, done.stdout + done.stderr


def test_what_decides_loads_nothing_that_measures() -> None:
    script = ("import sys, pyorch.llama.engine_plan\n"
              "measuring = ('llama_cpp', 'pyorch.runtime')\n"
              "print(*(name for name in sys.modules if name.startswith(measuring)))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
