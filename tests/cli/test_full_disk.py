"""A file system that is full: the command says so, exits with status 2, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyorch.cli import main

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system: needs root")


@pytest.fixture()
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB: the header of a file fits, its contents do not."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("this system does not let root mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_the_reason_is_named(
    small_moe: Path, trace: Path, text: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = disk / "out.gguf"
    for command in (
        ("maps", small_moe, trace, "-o", output),
        ("buddies", small_moe, "--trace", trace, "-o", output),
        ("calibrate", small_moe, "--data", text, "--tokens", 200, "--threads", 1, "-o", output),
        ("run", small_moe, "-p", "import", "-n", 24, "--temp", 0, "--threads", 1, "--budget", "50%", "--json",
         "--prefetch", "expert-map:1:0", "--maps", output),
        ("profile", small_moe, "--data", text, "--threads", 1, "-o", disk / "out.trace"),
    ):
        capsys.readouterr()
        assert main([str(word) for word in command]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("pyorch: error: ") and "No space left on device" in error, (command[0], error)
        left = [path for path in disk.iterdir() if path.suffix != ".part"]  # a trace may be continued
        assert left == [] and str(disk) in error
        for path in disk.iterdir():
            path.unlink()
