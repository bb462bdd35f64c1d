"""How the build prepares the sources of zstd and lz4: native/cmake/codec_sources.py."""

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
def codec_sources():
    sys.dont_write_bytecode = True  # a new file under native/ would count as a change to build
    sys.path.insert(0, str(CMAKE))
    yield importlib.import_module("codec_sources")
    sys.path.remove(str(CMAKE))


@pytest.fixture
def make_source(codec_sources, tmp_path, monkeypatch):
    """Makes a small archive with these files, in the place of the real one of lz4."""

    def make(*names: str):
        pin = codec_sources.read_pin(codec_sources.SOURCES["lz4"].pin_file)
        path = tmp_path / pin.archive_name
        with tarfile.open(path, "w:gz") as tar:
            for name in names:
                member = tarfile.TarInfo(f"lz4-{pin.version}/{name}")
                member.size = 4
                tar.addfile(member, io.BytesIO(b"text"))
        pin_file = tmp_path / "lz4.txt"
        pin_file.write_text(replace(pin, sha256=importlib.import_module("llama_source").sha256_of(path)).line)
        monkeypatch.setenv("PYORCH_LZ4_SDIST", str(path))
        return replace(codec_sources.SOURCES["lz4"], pin_file=pin_file)

    return make


def test_only_what_is_built_is_taken_out(codec_sources, make_source, tmp_path):
    wanted = codec_sources.SOURCES["lz4"].files
    codec_sources.update(tmp_path / "lz4", make_source(*wanted, "lz4libs/xxhash.c", "setup.py"))
    assert {path.name for path in (tmp_path / "lz4").iterdir()} == {*wanted.values(), ".pyorch-source"}


def test_an_archive_without_a_source_is_refused(codec_sources, make_source, tmp_path):
    source = make_source(*list(codec_sources.SOURCES["lz4"].files)[1:])
    with pytest.raises(codec_sources.SourceError, match=r"holds no lz4libs/lz4\.c"):
        codec_sources.update(tmp_path / "lz4", source)
    assert not (tmp_path / "lz4").exists()


def test_another_archive_is_refused_by_its_hash(codec_sources, make_source, tmp_path, monkeypatch):
    make_source("lz4libs/lz4.c")
    with pytest.raises(codec_sources.SourceError, match="PYORCH_LZ4_SDIST names .*whose sha256 is"):
        codec_sources.update(tmp_path / "lz4", codec_sources.SOURCES["lz4"])
