"""`python -m pyorch.lm_eval` and `import pyorch.lm_eval` where the harness is not installed, or not wholly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import python

MISSING = 'raise ModuleNotFoundError("No module named \'a_package\'", name="a_package")\n'
SENTENCE = "lm-evaluation-harness is not complete here (No module named 'a_package'): pip install 'pyorch[lm-eval]'"


def harness(directory: Path, missing_in: str) -> dict[str, str]:
    """The environment in which a harness is found first that has no more than the file `missing_in`, which fails."""
    files = {"__init__.py": "", "api/__init__.py": "", "__main__.py": "", missing_in: MISSING}
    if missing_in == "__main__.py":
        files["api/registry.py"] = (
            "class model_registry:\n    def register(name, target):\n        print(name, target)\n"
        )
    for name, text in files.items():
        path = directory / "lm_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [path])])}


@pytest.mark.parametrize("missing_in", ["__init__.py", "api/registry.py", "__main__.py"])
def test_the_command_says_in_a_sentence_what_to_install(tmp_path: Path, missing_in: str) -> None:
    done = python("-m", "pyorch.lm_eval", "--tasks", "arc_easy", env=harness(tmp_path, missing_in))
    assert (done.returncode, done.stderr) == (2, f"pyorch: error: {SENTENCE}\n")


def test_the_import_says_it_too(tmp_path: Path) -> None:
    program = "from pyorch import PyorchError\ntry:\n    import pyorch.lm_eval\n"
    program += "except PyorchError as error:\n    print(error)"
    done = python("-c", program, env=harness(tmp_path, "__init__.py"))
    assert (done.stdout, done.stderr) == (f"{SENTENCE}\n", "")


def test_a_module_that_imports_it_is_run_by_its_name_and_knows_the_model(tmp_path: Path) -> None:
    env = harness(tmp_path, "__main__.py")
    (tmp_path / "mine.py").write_text("import pyorch.lm_eval\n")
    done = python("-m", "mine", env=env)
    assert done.stdout == "pyorch pyorch.lm_eval.model:PyorchLM\n", done.stderr
