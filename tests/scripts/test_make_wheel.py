"""What a wheel for another architecture needs of the machine that builds it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from scripts import make_wheel


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
def test_the_chat_page_is_built_where_node_is_new_enough(version: str | None, has: bool, tmp_path: Path) -> None:
    for name, text in (("node", f"echo {version}" if version else "exit 127"), ("npm", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["make", "-n", "-B", "wheel"], cwd=Path(make_wheel.__file__).parents[1], capture_output=True,
                          text=True, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0 and "scripts.make_wheel" in done.stdout, done.stderr
    assert ("scripts/build_chat_page.py build/chat-page" in done.stdout) == has
