"""llama-server's own tests pass under a budget as they do on llama.cpp alone: here the quick ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/upstream_server_tests.py"
QUICK = ("test_tokenize.py",)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("upstream_server_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_quick_files_pass_alike(script, small_moe: Path, tmp_path: Path):
    for needed in ("requests", "filelock"):
        pytest.importorskip(needed, reason=f"the tests of llama-server need {needed}: pip install '.[convert,test]'")
    plain, budget = script.compare(small_moe, "30%", QUICK, tmp_path, print)
    assert script.differences(plain, budget) == []
    assert list(plain.values()).count("passed") >= 2, plain


def test_a_test_that_ends_otherwise_is_told(script):
    told = script.differences({"a": "passed", "b": "passed"}, {"a": "failed", "c": "skipped"})
    assert told == [
        "a: passed on llama.cpp alone, failed under the budget",
        "b: passed on llama.cpp alone, missing under the budget",
        "c: missing on llama.cpp alone, skipped under the budget",
    ]
    assert script.differences({"a": "passed"}, {"a": "failed"}, lambda name: [f"why {name}"])[1] == "why a"


def test_a_report_is_read_whole(script, tmp_path: Path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="unit.test_a" name="one"/>'
        '<testcase classname="unit.test_a" name="two"><failure message="x">x</failure></testcase>'
        '<testcase classname="unit.test_a" name="three"><skipped/></testcase>'
        '<testcase classname="unit.test_a" name="one"><error message="at its end"/></testcase>'
        '</testsuite></testsuites>')
    assert script.reason(path, "test_a: two") == "x" and script.reason(path, "test_a: three") == ""
    assert script.read_report(path) == {"test_a: one": "failed", "test_a: two": "failed", "test_a: three": "skipped"}


def test_the_model_is_exchanged_and_nothing_is_downloaded(script):
    given = ["--port", "1", "--offline", "--hf-repo", "a/b", "--hf-file", "c.gguf", "--temp", "0.8"]
    assert script.server_arguments(given) == (True, ["--port", "1", "--temp", "0.8"])
    assert script.server_arguments(["--port", "1"]) == (False, ["--port", "1"])
