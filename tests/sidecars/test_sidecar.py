"""Sidecars belong to one model, one kind and one version, and are there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from ggufs import split
from mutations import anatomy, nested, set_metadata

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, memory_plan

METADATA = {"name": "Ünï", "count": 1 << 40, "share": 0.1, "layers": [1, 2, 70000], "words": ["a", "b"]}
ARRAYS = {
    "blk.0.ids": np.arange(-6, 6, dtype=np.int32).reshape(3, 4),
    "blk.0.q": np.linspace(0, 1, 10, dtype=np.float32),
    "counts": np.array([1 << 40], np.int64),
}


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


@pytest.mark.parametrize("name", ["model.gguf", "model", "model.", ".gguf", "a.b.gguf", "Ünï \n.gguf", "olmoe-0.5"])
def test_what_is_written_beside_a_model_is_found_there_whatever_its_name(
    small_moe: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).symlink_to(small_moe)
    with ModelMap(tmp_path / name) as model_map:
        path = container.default_path(model_map.path, "maps")
        assert path.parent == tmp_path and path != tmp_path / name and model_map.sidecars() == {}
        path.touch()
        assert model_map.sidecars() == {"maps": path}
    assert memory_plan.default_path(tmp_path / name).name == path.name.replace(".maps.gguf", ".plan.json")


@pytest.fixture
def written(model_map: ModelMap, tmp_path: Path) -> Path:
    path = tmp_path / "model.buddies.gguf"
    container.write(path, "buddies", 3, model_map, METADATA, ARRAYS)
    return path


def test_a_file_that_is_overwritten_in_place_leaves_what_was_read_of_it(written: Path, model_map: ModelMap) -> None:
    _, arrays = container.read(written, "buddies", 3, model_map)
    maps = Path("/proc/self/maps")
    if maps.is_file():  # else a page behind the new end would end this process
        assert str(written) not in maps.read_text()
    with written.open("r+b") as file:
        file.truncate(4)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])


def refusal(path: Path, model_map: ModelMap, kind: str = "buddies", version: int = 3) -> str:
    with pytest.raises(FormatError) as refused:
        container.read(path, kind, version, model_map)
    sentence = str(refused.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence


def test_what_is_written_is_read(written: Path, model_map: ModelMap) -> None:
    metadata, arrays = container.read(written, "buddies", 3, model_map)
    assert metadata == METADATA
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)


@pytest.mark.parametrize("name", ARRAYS)
def test_other_numbers_in_an_array_are_refused(written: Path, model_map: ModelMap, name: str) -> None:
    whole, at = written.read_bytes(), anatomy(written.read_bytes()).at[name]
    n_bytes = ARRAYS[name].nbytes
    for damaged in (bytes(n_bytes), bytes([whole[at] ^ 1]) + whole[at + 1 : at + n_bytes]):
        written.write_bytes(whole[:at] + damaged + whole[at + n_bytes :])
        assert "is damaged, its numbers are not those that were written" in refusal(written, model_map)


def test_its_default_place_is_where_the_model_looks(small_moe: Path, model_map: ModelMap) -> None:
    path = container.default_path(small_moe, "maps")
    container.write(path, "maps", 1, model_map, METADATA, ARRAYS)
    assert model_map.sidecars()["maps"] == path
    path.unlink()


def test_a_fingerprint_goes_through_matrices_in_an_order_of_its_own(model_map: ModelMap) -> None:
    """Else what older versions wrote would be another model's whenever the map's order changes."""
    def content(path: str, offset: int, size: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    digest = hashlib.sha256(b"qwen2moe")
    for layer in model_map.layers:
        indices = {role.name: index for index, role in enumerate(layer.roles)}
        for name in ("up", "gate", "down"):
            where = model_map.expert_range(layer.il, 0, indices[name])
            kind = layer.roles[indices[name]].type
            digest.update(f"\nblk.{layer.il}.{name} {kind} 64*{where.size}\n".encode())
            digest.update(content(where.path, where.offset, min(where.size, 4096)))
        router = model_map.tensor_range(f"blk.{layer.il}.ffn_gate_inp.weight")
        digest.update(content(router.path, router.offset, router.size))
    assert container.fingerprint(model_map) == digest.hexdigest()


def test_a_model_in_shards_has_the_fingerprint_of_the_whole(
    small_moe: Path, model_map: ModelMap, tmp_path: Path
) -> None:
    shards = split(small_moe, tmp_path / "split.gguf", max_tensors=40)
    with ModelMap(shards[0]) as of_shards:
        assert of_shards.info.n_files > 1
        assert container.fingerprint(of_shards) == container.fingerprint(model_map)


def test_another_quantization_is_another_model(written: Path, small_moe_q4: Path) -> None:
    with ModelMap(small_moe_q4) as other:
        assert str(small_moe_q4) in refusal(written, other)


@pytest.mark.parametrize("tensor", ["blk.7.ffn_gate_inp.weight", "blk.3.ffn_down_exps.weight"])
def test_other_weights_are_another_model(written: Path, small_moe: Path, tmp_path: Path, tensor: str) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(small_moe, other)
    with ModelMap(other) as model_map:
        where = model_map.tensor_range(tensor)
        with other.open("r+b") as file:
            file.seek(where.offset)
            byte = file.read(1)[0]
            file.seek(where.offset)
            file.write(bytes([byte ^ 1]))
        assert "another model" in refusal(written, model_map)


def test_another_version_is_refused(written: Path, model_map: ModelMap) -> None:
    assert "version 3" in refusal(written, model_map, version=4)


def test_another_kind_is_refused(written: Path, model_map: ModelMap) -> None:
    assert "maps" in refusal(written, model_map, kind="maps")


def test_a_missing_file_is_refused(tmp_path: Path, model_map: ModelMap) -> None:
    assert refusal(tmp_path / "absent.gguf", model_map).endswith("no such file")


def test_a_directory_is_refused(tmp_path: Path, model_map: ModelMap) -> None:
    refusal(tmp_path, model_map)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_gguf_is_refused(tmp_path: Path, model_map: ModelMap, content: bytes) -> None:
    path = tmp_path / "model.buddies.gguf"
    path.write_bytes(content)
    assert "does not begin with GGUF" in refusal(path, model_map)


def test_a_model_is_no_sidecar(small_moe: Path, model_map: ModelMap) -> None:
    assert "not a sidecar" in refusal(small_moe, model_map)


def test_wherever_a_sidecar_is_cut_off_it_is_refused(written: Path, model_map: ModelMap) -> None:
    content = written.read_bytes()
    counts = gguf.GGUFReader(written).get_tensor(2)
    end = int(counts.data_offset + counts.n_bytes)  # behind it there is only padding
    del counts
    for length in [*range(4, end, 37), end - 1]:
        written.write_bytes(content[:length])
        assert "cut off" in refusal(written, model_map)
    written.write_bytes(content[:end])
    container.read(written, "buddies", 3, model_map)


@pytest.mark.parametrize("n", [4, 2**32, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("key", ["buddies.layers", "buddies.words"])
def test_a_list_longer_than_the_file_is_refused(written: Path, model_map: ModelMap, key: str, n: int) -> None:
    # A reader that makes one element after another would be busy for hours.
    written.write_bytes(set_metadata(written.read_bytes(), f"length of {key}", n))
    assert "damaged" in refusal(written, model_map)


@pytest.mark.parametrize("what", ["buddies.name", "pyorch.sidecar.fingerprint", "a key", "a tensor's name"])
def test_text_that_is_not_utf_8_is_refused(written: Path, model_map: ModelMap, what: str) -> None:
    content = written.read_bytes()
    place = next(place for place in reversed(anatomy(content).places) if place.what == what and not place.format)
    written.write_bytes(content[: place.offset] + b"\xff" * place.size + content[place.offset + place.size :])
    assert "damaged" in refusal(written, model_map)


def test_lists_in_lists_in_lists_are_refused(written: Path, model_map: ModelMap) -> None:
    written.write_bytes(nested(written.read_bytes(), levels=100_000))
    assert "damaged" in refusal(written, model_map)


def test_a_disk_that_is_full_leaves_what_was_there(written: Path, model_map: ModelMap, monkeypatch) -> None:
    before = written.read_bytes()

    def fail(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(PyorchError, match="No space left"):
        container.write(written, "buddies", 3, model_map, {}, ARRAYS)
    assert written.read_bytes() == before and list(written.parent.iterdir()) == [written]


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path, model_map: ModelMap) -> None:
    with pytest.raises(PyorchError, match="create it first"):
        container.write(tmp_path / "absent" / "x.gguf", "buddies", 3, model_map, METADATA, ARRAYS)
