"""How the build prepares the source of zstd: native/cmake/zstd_source.py."""

from __future__ import annotations

import importlib
import io
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[2] / "native/cmake"


@pytest.fixture(scope="module")
def zstd_source():
    sys.dont_write_bytecode = True  # a new file under native/ would count as a change to build
    sys.path.insert(0, str(CMAKE))
    yield importlib.import_module("zstd_source")
    sys.path.remove(str(CMAKE))


@pytest.fixture
def make_archive(zstd_source, tmp_path, monkeypatch):
    """Makes a small archive with these files, in the place of the real one, and the file that pins it."""

    def make(*names: str):
        pin = zstd_source.read_pin(zstd_source.PIN_FILE)
        path = tmp_path / pin.archive_name
        with tarfile.open(path, "w:gz") as tar:
            for name in names:
                member = tarfile.TarInfo(f"zstandard-{pin.version}/{name}")
                member.size = 4
                tar.addfile(member, io.BytesIO(b"text"))
        pin_file = tmp_path / "zstandard.txt"
        pin_file.write_text(replace(pin, sha256=importlib.import_module("llama_source").sha256_of(path)).line)
        monkeypatch.setenv("PYORCH_ZSTD_SDIST", str(path))
        return pin_file

    return make


def test_only_what_is_built_is_taken_out(zstd_source, make_archive, tmp_path):
    wanted = zstd_source.FILES
    zstd_source.update(tmp_path / "zstd", make_archive(*wanted, "zstd/zdict.h", "setup.py"))
    assert {path.name for path in (tmp_path / "zstd").iterdir()} == {*wanted.values(), ".pyorch-source"}


def test_an_archive_without_a_source_is_refused(zstd_source, make_archive, tmp_path):
    pin_file = make_archive(*(name for name in zstd_source.FILES if name != "zstd/zstd.c"))
    with pytest.raises(zstd_source.SourceError, match=r"holds no zstd/zstd\.c"):
        zstd_source.update(tmp_path / "zstd", pin_file)
    assert not (tmp_path / "zstd").exists()


def test_another_archive_is_refused_by_its_hash(zstd_source, make_archive, tmp_path):
    make_archive("zstd/zstd.c")
    with pytest.raises(zstd_source.SourceError, match="PYORCH_ZSTD_SDIST names .*whose sha256 is"):
        zstd_source.update(tmp_path / "zstd")
