"""What `import pyorch` gives."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pyorch


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(pyorch) == sorted(pyorch.__all__)
    assert {"load", "manage", "Model", "Substitution", "__version__"} <= set(dir(pyorch))


@pytest.mark.parametrize("name", [name for name in pyorch.__all__ if name != "__version__"])
def test_every_public_name_says_what_it_is(name: str) -> None:
    documented = getattr(pyorch, name)
    assert inspect.getdoc(documented)
    methods = inspect.getmembers(documented, inspect.isfunction) if inspect.isclass(documented) else []
    own = {method: function for method, function in methods if function.__module__.startswith("pyorch.")}
    assert [
        method for method, function in own.items() if not method.startswith("_") and not inspect.getdoc(function)
    ] == []


@pytest.mark.parametrize("order", ["import llama_cpp, pyorch", "import pyorch, llama_cpp"])
def test_llama_cpp_may_be_imported_first(order: str) -> None:
    """Our bindings are on Python's path, and the first thing that they do is to import pyorch."""
    code = f"{order}; print(llama_cpp.llama_cpp._lib._name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve().parent == Path(pyorch._libs.lib_dir()).resolve()
