"""A file system that is full: the command says so, exits with status 2, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyorch.cli import main
from pyorch.convert import pack as packing
from pyorch.convert.pack import check
from pyorch.errors import PyorchError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system: needs root")


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[Path]:
    """A file system of this size."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("this system does not let root mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture()
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB: the header of a file fits, its contents do not."""
    with mounted(tmp_path / "disk", "16k") as path:
        yield path


def test_a_pack_is_made_where_the_disk_has_room_for_it_and_little_more(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", "40m") as disk:
        model = Path(shutil.copyfile(small_moe, disk / "model.gguf"))
        pack = disk / "model.experts.gguf"
        assert main(["pack", str(model)]) == 0
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - (2 << 20)))
        pack.unlink()
        assert shutil.disk_usage(disk).free < 16 << 20
        assert main(["pack", str(model)]) == 0
        pack.unlink()
        capsys.readouterr()
        assert main(["prepare", str(model), "--skip", "calibrate,profile,maps,plan,buddies,ghosts,tune"]) == 0
        assert pack.exists(), capsys.readouterr().out
        pack.unlink()
        (disk / "more").write_bytes(bytes(4 << 20))
        capsys.readouterr()
        assert main(["pack", str(model)]) == 2
        assert "free, what is to be written needs about" in capsys.readouterr().err


def test_preparing_in_a_folder_that_is_read_only_is_one_sentence(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", "40m") as disk:
        model = Path(shutil.copyfile(small_moe, disk / "model.gguf"))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert main(["prepare", str(model)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and f"{disk}, in which files" in printed.err


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


def test_a_disk_that_fills_up_while_a_pack_is_compressed_is_said_and_the_next_run_goes_on(
    small_moe: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes the room that there was when packing began."""
    monkeypatch.setattr(packing, "_STEP_BYTES", 1 << 20)
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    other, target = disk / "other", disk / "model.experts.gguf"

    def fill(_step: str, done: int, total: int) -> None:
        if done > total // 3 and not other.exists():
            with other.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))

    with pytest.raises(PyorchError, match=f"writing {disk}/.* failed: No space left on device; the packed experts"):
        packing.pack(small_moe, target, codec="table", on_progress=fill)
    assert not target.exists()
    other.unlink()
    made = packing.pack(small_moe, target, codec="table")
    assert 0 < made.n_continued < made.n_experts and check(small_moe, target).damaged == ()
