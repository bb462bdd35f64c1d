"""Parts of the runtime without a model: native/tests/, run by ctest."""

from __future__ import annotations

import json

from native_build import ROOT, built_tests, ctest


def test_every_native_test_passes() -> None:
    tree = built_tests()
    listed = json.loads(ctest(tree, "--show-only=json-v1").stdout)["tests"]
    names = {test["name"] for test in listed}
    assert names >= {source.stem for source in (ROOT / "native" / "tests").rglob("*_test.cpp")}
    assert names >= {f"residency_stress_{sanitizer}_{kind}" for sanitizer in ("thread", "address")
                     for kind in ("threads", "compressed")}
    done = ctest(tree, "--output-on-failure", "--parallel", "2")
    assert done.returncode == 0, done.stdout
