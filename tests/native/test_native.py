"""Parts of the runtime without a model: native/tests/, run by ctest. And its locks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from native_build import ROOT, built_tests, ctest

SRC = ROOT / "native" / "src"

# What clang's analysis is to find in a class, and what not.
COUNTER = """
#include "base/mutex.h"
using namespace pyorch;
struct Counter {{
    Mutex mutex;
    int   n GUARDED_BY(mutex) = 0;
    void  add(const Locked & locked) {{ mutex.assert_held(locked); ++n; }}
    void  count() {{ {body} }}
}};
"""


def test_every_native_test_passes() -> None:
    tree = built_tests()
    listed = json.loads(ctest(tree, "--show-only=json-v1").stdout)["tests"]
    names = {test["name"] for test in listed}
    assert names >= {source.stem for source in (ROOT / "native" / "tests").rglob("*_test.cpp")}
    assert names >= {f"residency_stress_{sanitizer}_{kind}" for sanitizer in ("thread", "address")
                     for kind in ("threads", "compressed")}
    done = ctest(tree, "--output-on-failure", "--parallel", "2")
    assert done.returncode == 0, done.stdout


def test_every_lock_is_one_that_clang_checks() -> None:
    files = [path for folder in (SRC, ROOT / "native" / "server") for path in folder.rglob("*.*")]
    lock = re.compile(r"std::(\w*mutex|(unique|shared|scoped)_lock|lock_guard|condition_variable\w*)\b")
    assert [path.relative_to(SRC) for path in files if lock.search(path.read_text())] == [Path("base/mutex.h")]


@pytest.mark.parametrize(("body", "is_right"), [
    ("MutexLock lock(mutex); ++n;", True),
    ("MutexLock lock(mutex); add(mutex.locked());", True),
    ("++n;", False),
    ("add(mutex.locked());", False),
    ("MutexLock lock(mutex); { MutexUnlock unlock(mutex); ++n; }", False),
    ("MutexLock lock(mutex); lock.unlock(); ++n;", False),
])
def test_clang_finds_what_is_done_without_the_lock(body: str, is_right: bool, tmp_path: Path) -> None:
    clang = next(filter(None, map(shutil.which, ("clang++", *(f"clang++-{n}" for n in range(40, 13, -1))))), None)
    if clang is None:
        pytest.skip("there is no clang++")
    source = tmp_path / "counter.cpp"
    source.write_text(COUNTER.format(body=body))
    done = subprocess.run(
        [clang, "-std=c++17", "-fsyntax-only", "-Wthread-safety", "-Werror", "-I", SRC, source],
        capture_output=True, text=True)
    assert (done.returncode == 0) == is_right, done.stderr
    assert is_right or "[-Werror,-Wthread-safety-analysis]" in done.stderr
