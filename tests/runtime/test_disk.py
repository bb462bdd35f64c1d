"""What a disk needs is measured once for each file system, and kept."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from processes import python

from pyorch.cli import main
from pyorch.errors import PyorchError
from pyorch.runtime import disk
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.reads import Reads
from scripts import model_headers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pyorch"


@pytest.fixture
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


def test_what_was_measured_is_found_again(model_map: ModelMap, cache: Path) -> None:
    assert disk.kept_bandwidth(model_map) is None
    chosen, ways = disk.measure_and_keep(model_map, seconds=0.05)
    assert chosen in ways and disk.kept_bandwidth(model_map) == chosen
    assert disk.kept_bandwidth(model_map, "threads") is None  # another reader needs something else


def test_the_least_that_suffices_is_chosen() -> None:
    def way(rate: float, depth: int, size: int) -> disk.Bandwidth:
        return disk.Bandwidth(rate, "io_uring", depth, size, True, 0.1)

    least = way(98, 4, 1 << 20)
    ways = [way(90, 1, 1 << 20), way(96, 4, 1 << 19), way(100, 8, 1 << 20), least, way(99, 8, 1 << 19)]
    assert disk.least_that_suffices(ways) == least


def kept_as(**changes: object) -> str:
    good = disk.Bandwidth(1e9, "threads", 2, 1 << 20, True, 0.0)
    return json.dumps(dataclasses.asdict(good) | changes)


@pytest.mark.parametrize("damage", [
    "", "{}", "[1]", '{"bytes_per_second": 1}', "\0", "[" * 100_000, kept_as(depth=2.0), kept_as(depth=True),
    kept_as(request_bytes=1048576.0), kept_as(bytes_per_second=float("inf")),
])
def test_a_damaged_file_counts_as_none(model_map: ModelMap, cache: Path, damage: str) -> None:
    disk.measure_and_keep(model_map, seconds=0.05)
    (kept,) = cache.iterdir()
    kept.write_text(damage)
    assert disk.kept_bandwidth(model_map) is None


def test_a_way_that_is_measured_no_more_counts_as_none(model_map: ModelMap, cache: Path) -> None:
    chosen, _ = disk.measure_and_keep(model_map, seconds=0.05)
    (kept,) = cache.iterdir()
    kept.write_text(json.dumps(dataclasses.asdict(chosen) | {"depth": 3}))
    assert disk.kept_bandwidth(model_map) is None


def test_where_there_is_no_home_nothing_is_kept(model_map: ModelMap, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(disk, "_WORTH_BYTES", 0)
    assert disk.reads_for(model_map, Reads(), direct_io=True) == Reads()


def test_the_disk_of_a_pack_is_measured_to_the_end(small_moe: Path, tmp_path: Path) -> None:
    """Checksums are verified on other threads than the one that reads, which must hear of their end."""
    model = Path(shutil.copy(small_moe, tmp_path / "model.gguf"))
    program = f"""
from pyorch.convert.pack import pack
from pyorch.runtime import disk
from pyorch.settings.reads import Reads
from pyorch.sidecars import packs
pack({str(model)!r})
with packs.open_model({str(model)!r}) as model_map:
    assert packs.attach(model_map) == ""
    print(disk.measure(model_map, Reads("auto", 1, 1 << 20), 0.05).bytes_per_second > 0)
"""
    done = python("-c", program)
    assert done.stdout == "True\n", done.stderr


def test_a_small_model_is_not_worth_a_second(model_map: ModelMap, cache: Path) -> None:
    assert disk.reads_for(model_map, Reads(), direct_io=True) == Reads()
    assert not cache.exists()


def test_what_reads_stays_open_although_depth_and_size_are_known(
    model_map: ModelMap, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured with io_uring may be forbidden in the sandbox that finds the measurement."""
    monkeypatch.setattr(disk, "_WORTH_BYTES", 0)
    kept, _ = disk.measure_and_keep(model_map, seconds=0.05)
    assert disk.reads_for(model_map, Reads(), direct_io=True) == Reads("auto", kept.depth, kept.request_bytes)


def test_what_cannot_be_kept_is_no_error(model_map: ModelMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert disk.measure_and_keep(model_map, seconds=0.05)[0].bytes_per_second > 0
    assert disk.kept_bandwidth(model_map) is None


def test_a_disk_is_not_measured_for_no_time(model_map: ModelMap) -> None:
    with pytest.raises(PyorchError, match="more than 0 seconds"):
        disk.measure(model_map, Reads(), 0)


def test_inspect_shows_what_the_disk_needs(small_moe: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(small_moe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk"] is None
    assert main(["inspect", str(small_moe), "--disk"]) == 0
    assert "suffices" in capsys.readouterr().out
    assert main(["inspect", str(small_moe)]) == 0
    assert "GB/s with" in capsys.readouterr().out


@pytest.mark.parametrize("reader", ["io_uring", "threads"])
def test_a_disk_is_measured_where_experts_of_some_layers_are_larger(tmp_path: Path, reader: str) -> None:
    """As in Q4_K_M, whose first layers have Q6_K: memory that a small expert was read into takes a large one next."""
    header = model_headers.Header(tmp_path / "mixed.gguf", "olmoe", 4, 512, 4, 4, 512)
    header.experts(8, 2, 512)
    model_headers.around(header, 256, 512, model_headers.Types.F16, model_headers.Types.F16)
    for il in range(4):
        down = model_headers.Types.F32 if il % 2 else model_headers.Types.F16
        model_headers.experts(header, il, 8, 512, 512, model_headers.Types.F16, down)
    header.close()
    with ModelMap(tmp_path / "mixed.gguf") as model_map:
        assert len({layer.expert_bytes for layer in model_map.layers}) == 2
        assert disk.measure(model_map, Reads(reader, 4, 1 << 20), 0.1).bytes_per_second > 0
