"""What a wheel for another architecture needs of the machine that builds it."""

from __future__ import annotations

import platform
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
