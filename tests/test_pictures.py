"""Pictures appear whole or not at all, and all of a set or none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pyorch import pictures
from pyorch.errors import PyorchError

pytest.importorskip("matplotlib")


def empty(figure_class):
    return figure_class(figsize=(1, 1))


def on_a_full_disk(figure_class):
    class Figure(figure_class):
        def savefig(self, path: Path, **options: object) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return Figure()


def test_they_are_written_by_name_into_a_directory_that_is_made(tmp_path: Path) -> None:
    made = pictures.save({"one": empty, "two": empty}, tmp_path / "a" / "b")
    assert made == [tmp_path / "a/b/one.png", tmp_path / "a/b/two.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made) and len(list(made[0].parent.iterdir())) == 2


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_file_is_what_its_name_says(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pictures.save_as(empty, tmp_path / f"sweep.{suffix}")
    assert (tmp_path / f"sweep.{suffix}").read_bytes().startswith(magic)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    first, = pictures.save({"one": empty}, tmp_path)
    before = first.read_bytes()
    for save in (lambda: pictures.save({"one": on_a_full_disk, "two": empty}, tmp_path),
                 lambda: pictures.save({"two": empty, "one": on_a_full_disk}, tmp_path),
                 lambda: pictures.save_as(on_a_full_disk, first)):
        with pytest.raises(PyorchError, match=f"{tmp_path} cannot be written: No space left on device"):
            save()
        assert list(tmp_path.iterdir()) == [first] and first.read_bytes() == before


def test_a_directory_that_cannot_be_is_said_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reason = f"^{tmp_path / 'file'} is a file, and a folder is needed there: name another folder$"
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PyorchError, match=reason):
            pictures.check(directory)
        with pytest.raises(PyorchError, match=reason):
            pictures.save({"one": None}, directory)
