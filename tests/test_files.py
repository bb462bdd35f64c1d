"""Files appear whole or not at all, and what a killed process left is removed by the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyorch import files
from pyorch.errors import PyorchError
from pyorch.files import check_target, staging, write_text

_SCRIPT = """
import subprocess, sys
from pathlib import Path
from pyorch.files import staging, staging_locks

with staging(Path(sys.argv[1])) as directory:
    (directory / "big").write_bytes(bytes(1 << 20))
    if sys.argv[2] == "child":
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=staging_locks())
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path):
    """Starts processes that hold a staging directory until they are killed or their input ends."""
    started = []

    def start(target: str, child: str = "") -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-c", _SCRIPT, tmp_path / target, child]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        directory = Path(process.stdout.readline().strip())
        assert (directory / "big").exists()
        return process, directory

    yield start
    for process in started:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def test_what_a_killed_process_left_is_removed_by_the_next_run(writer, tmp_path: Path) -> None:
    _, held = writer("held.gguf")
    killed, left = writer("model.gguf")
    killed.kill()
    killed.wait()
    assert left.exists()
    write_text(tmp_path / "other.txt", "x")
    assert not left.exists() and held.exists()


def test_what_a_child_of_a_killed_process_still_writes_is_left_to_it(writer, tmp_path: Path) -> None:
    killed, held = writer("model.gguf", "child")
    killed.kill()
    killed.wait()
    with staging(tmp_path / "model.gguf"):
        assert held.exists()
    killed.stdin.close()  # ends the child, which shares this input
    # The end of its output is the end of the last process that holds it.
    assert killed.stdout.read() == ""
    with staging(tmp_path / "model.gguf"):
        assert not held.exists()


def test_staging_directories_of_one_process_do_not_remove_each_other(tmp_path: Path) -> None:
    with staging(tmp_path / "a") as one, staging(tmp_path / "a") as other:
        assert one.exists() and other.exists() and one != other
    assert not list(tmp_path.iterdir())


def test_other_directories_stay_whatever_their_names(tmp_path: Path) -> None:
    names = [".model.gguf.part", "model.gguf.abcdefgh.part", ".model.gguf.ABCDEFGH.part", ".model.abc.part"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".file.abcdefgh.part").write_text("x")
    os.symlink(tmp_path / names[0], tmp_path / ".link.abcdefgh.part")
    write_text(tmp_path / "other.txt", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*names, ".file.abcdefgh.part", ".link.abcdefgh.part", "other.txt"])


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PyorchError, match="is no file"):
        check_target(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(PyorchError, match=f"the output directory {tmp_path / 'file'} is a file: name another"):
        check_target(tmp_path / "file" / "new")
    check_target(tmp_path / "new")


def test_what_an_ended_run_left_is_discarded_and_what_another_writes_is_not(tmp_path: Path) -> None:
    part, target = tmp_path / "made.part", tmp_path / "made"
    part.write_bytes(b"half")
    with part.open("r+b") as other:
        assert files.take(other.fileno(), part, target)
        files.discard(part, target)
        assert part.exists()
    files.discard(part, target)
    files.discard(part, target)  # nothing is there any more
    assert not part.exists()


def test_a_file_that_lacks_bytes_is_told_from_one_whose_blocks_nobody_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, header = tmp_path / "whole", tmp_path / "header"
    whole.write_bytes(b"x" * (1 << 20))
    header.write_bytes(b"x" * 4096)
    os.truncate(header, 1 << 20)
    assert files.has_holes([str(header)]) and not files.has_holes([str(whole)])
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "stat", lambda path: SimpleNamespace(st_blocks=0, st_size=1 << 20))
        found = [files.has_holes([str(path)]) for path in (header, whole)]
    assert found == [True, False]
