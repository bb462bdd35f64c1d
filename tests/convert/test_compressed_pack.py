"""Compressed packs hold every bit of every expert, and say what is wrong with them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from architectures import Zoo
from mutations import flip, retyped
from processes import python

from pyorch.cli import main
from pyorch.convert import compression
from pyorch.convert import pack as packing
from pyorch.convert.pack import check
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, packs


@pytest.fixture
def model(small_moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_moe, tmp_path / "model.gguf"))


@pytest.fixture(scope="module")
def packed(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packing.pack(small_moe, tmp_path_factory.mktemp("packed") / "made", codec="table", shards=2).path


@pytest.fixture
def pack_path(packed: Path, model: Path) -> Path:
    """A copy of it beside the model, to be damaged."""
    return Path(shutil.copy(packed, container.default_path(model, packs.KIND)))


def index_of(path: Path, il: int) -> tuple[int, np.ndarray]:
    """Where the rows of a layer lie in its pack, and the rows."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == packs.index_name(il))
    return int(tensor.data_offset), tensor.data.view(packs.CHUNK)[:, 0].copy()


def data_offset(path: Path, il: int) -> int:
    tensors = gguf.GGUFReader(path).tensors
    return next(int(tensor.data_offset) for tensor in tensors if tensor.name == packs.data_name(il))


@pytest.mark.parametrize(("name", "type_name"), [("mixtral", "F32"), ("qwen3-next-fused", "BF16"),
                                                 ("olmoe", "Q4_0"), ("gpt-oss-mxfp4", "MXFP4")])
@pytest.mark.parametrize("codec", ["zstd", "table", "nibble"])
def test_every_matrix_of_every_type_comes_back(zoo: Zoo, tmp_path: Path, name: str, type_name: str, codec: str) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(zoo.path(name, type_name))
    made = packing.pack(model, codec=codec, shards=3 if codec != "nibble" else None)
    assert check(model).damaged == ()
    assert made.ratio <= 1 and made.n_bytes == made.path.stat().st_size
    if codec == "table" and type_name in ("F32", "BF16"):
        assert made.codecs == ("table",) and made.ratio < 0.92
    if codec == "nibble":
        assert made.codecs == (("nibble",) if type_name == "BF16" else ("stored",))


def test_a_tensor_with_a_matrix_of_too_many_rare_exponents_is_stored_as_it_is(model: Path) -> None:
    _spoil(model, "blk.2.ffn_up_exps.weight", expert=60)
    made = packing.pack(model, codec="nibble")
    assert made.codecs == ("stored", "nibble") and check(model).damaged == ()
    with ModelMap(model) as model_map:
        whole = model_map.layer(2).slot_bytes
        model_map.attach_pack(made.path)
        assert model_map.layer(3).slot_bytes < model_map.layer(2).slot_bytes < whole
        assert packs.part_sizes(model_map) is None
    assert made.reason == ("1 tensor stored as in the model (blk.2.ffn_up_exps), where an expert has more rare "
                           "exponents than nibble has room for")
    assert [kind.codec for kind in made.kinds] == ["nibble", "nibble", "stored"]  # the last: rows of 32 gain nothing


def test_layers_that_are_packed_stand_when_a_later_tensor_is_found_unfit(model: Path) -> None:
    """Also those of a run that was interrupted behind it."""
    _spoil(model, "blk.2.ffn_up_exps.weight", expert=60)
    _spoil(model, "blk.5.ffn_up_exps.weight", expert=0)
    with ModelMap(model) as model_map:
        of_layers = np.cumsum([0, *(layer.n_expert * layer.expert_bytes for layer in model_map.layers)])
    seen = []

    def until_layer_6(_: str, done: int, total: int) -> None:
        seen.append(done)
        if done > of_layers[6]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model, codec="nibble", on_progress=until_layer_6)
    back = [(before, after) for before, after in itertools.pairwise(seen) if after < before]
    assert [after for _, after in back] == [of_layers[2]], "more than layer 2 began anew"
    again = packing.pack(model, codec="nibble")
    assert again.n_continued >= 6 * 64 and again.codecs == ("stored", "nibble") and check(model).damaged == ()
    fresh = packing.pack(model, model.with_name("fresh.gguf"), codec="nibble")
    assert again.path.read_bytes() == fresh.path.read_bytes()


def _spoil(model: Path, name: str, expert: int) -> None:
    """Gives a matrix of an expert every exponent alike often."""
    tensor = next(tensor for tensor in gguf.GGUFReader(model, "r+").tensors if tensor.name == name)
    matrix = tensor.data[expert].view(np.uint16)
    matrix[:] = np.arange(matrix.size, dtype=np.uint16).reshape(matrix.shape) % 254 + 1 << 7


def test_flipped_bits_of_nibbles_are_found_and_named(model: Path) -> None:
    path = packing.pack(model, codec="nibble").path
    _, rows = index_of(path, 3)
    flip(path, data_offset(path, 3) + int(rows["offset"][30]) + 100)
    damaged, = check(model).damaged
    assert re.fullmatch(rf"expert {rows['expert'][30]} of blk\.3\.ffn_\w+_exps", damaged)


def test_experts_in_16_bits_become_as_small_as_their_exponents_allow(model: Path) -> None:
    """The paper finds 2.55 to 2.65 bits in an exponent, so a bound of 0.66 to 0.67."""
    zstd, table = (packing.pack(model, model.with_name(f"{codec}.gguf"), codec=codec) for codec in ("zstd", "table"))
    assert zstd.ratio < table.ratio < 0.71 and zstd.ratio <= 0.70
    for kind in zstd.kinds:
        assert 2.4 < kind.entropy < 2.9 and kind.bound == (8 + kind.entropy) / 16
        assert 0 < kind.above_bound < 0.06 and kind.encode > 0 and kind.decode > 0
    raw = sum(layer.n_expert * layer.expert_bytes for layer in ModelMap(model).layers)
    assert zstd.n_bytes < 0.75 * raw  # index and all


def test_quantized_matrices_are_stored_as_they_are_unless_they_gain(small_moe_q4: Path, tmp_path: Path) -> None:
    made = packing.pack(small_moe_q4, tmp_path / "q4.experts.gguf", codec="zstd")
    assert made.codecs == ("stored",) and made.ratio == 1
    plain = packing.pack(small_moe_q4, tmp_path / "plain.experts.gguf")
    assert made.path.read_bytes() == plain.path.read_bytes()
    assert made.reason.startswith("none: zstd does not make these experts (q4_") and plain.reason == ""
    assert packing.pack(small_moe_q4, plain.path, codec="auto").reason.startswith("none: no codec makes these experts")


def test_auto_chooses_what_brings_experts_in_soonest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is worth the best compression, a fast one none, where kernels are slow with what is compressed."""
    monkeypatch.setattr(compression.codecs, "nibble_pace", lambda n_in, n_out: 1.6)
    for bytes_per_second, codec in ((1e3, ("zstd",)), (1e13, ("stored",))):  # whatever decoding seems to take
        found = compression.disk.Bandwidth(bytes_per_second, "threads", 1, 1 << 20, True, 0.1)
        monkeypatch.setattr(compression.disk, "kept_bandwidth", lambda *_, found=found: found)
        made = packing.pack(model, codec="auto")
        assert made.codecs == codec and re.search(r"a GiB of experts takes \d+ ms from a disk of", made.reason)


def test_auto_takes_what_kernels_compute_from_where_they_are_fast_with_it(
    zoo: Zoo, small_moe_q4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.1 < compression.codecs.nibble_pace(2048, 512) < 50  # measured
    monkeypatch.setattr(compression.codecs, "nibble_pace", lambda n_in, n_out: 1.2)
    made = packing.pack(zoo.path("qwen3-next-fused", "BF16"), tmp_path / "made", codec="auto")
    assert made.codecs == ("nibble",) and "kernels take 1.20 times as long" in made.reason
    assert packing.pack(small_moe_q4, tmp_path / "q4", codec="auto").codecs == ("stored",)
    slim = tmp_path / "slim.gguf"  # which could go to no device
    assert main(["pack", str(zoo.path("qwen3-next-fused", "BF16")), "--codec", "auto", "--slim", str(slim)]) == 0
    with ModelMap(slim) as model_map:
        packs.require(model_map)
        assert "nibble" not in packs.contents(model_map).codecs


def test_flipped_bits_are_found_and_named(
    model: Path, pack_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, rows = index_of(pack_path, 3)
    begin = data_offset(pack_path, 3)
    of_expert = rows[(rows["expert"] == 7) & (rows["role"] == 1)]
    assert list(of_expert["plane"]) == [1, 2, 3]
    for row, name in zip(of_expert, ("shard 1 of the exponents of ", "shard 2 of the exponents of ",
                                     "signs and mantissas of ")):
        at = begin + int(row["offset"]) + int(row["stored"]) - 1
        flip(pack_path, at)
        damaged, = check(model).damaged
        assert re.fullmatch(rf"{name}expert 7 of blk\.3\.ffn_\w+_exps", damaged)
        flip(pack_path, at)
    flip(pack_path, begin)
    assert main(["pack", str(model), "--check"]) == 2
    assert "is damaged in 1 place: shard 1 of the exponents of expert 0" in capsys.readouterr().err


@pytest.mark.parametrize(("column", "change", "sentence"), [
    ("offset", lambda value: value + 64, "misplaces expert 5"),
    ("offset", lambda value: -64, "misplaces expert 5"),
    ("offset", lambda value: 2**62, "misplaces expert 5"),
    ("stored", lambda value: value - 1, "misplaces expert"),
    ("stored", lambda value: 2**62, "misplaces expert 5"),
    ("stored", lambda value: 0, "misplaces expert 5"),
    ("raw", lambda value: value * 2, "misplaces expert 5"),
    ("codec", lambda value: 2, "is compressed with lz4, which is no longer read: make it again with `pyorch pack`"),
    ("codec", lambda value: 5, "written by a newer version: chunks of its layer 3 have the codec 5"),
    ("codec", lambda value: 4, "misplaces expert 5"),
    ("codec", lambda value: 0, "misplaces expert 5"),
    ("codec", lambda value: -1, "written by a newer version"),
    ("plane", lambda value: 3, "misplaces expert"),
    ("plane", lambda value: 100, "written by a newer version"),
    ("expert", lambda value: 64, "index has expert 64"),
    ("expert", lambda value: 6, "misplaces expert"),
    ("role", lambda value: -1, "matrix -1"),
])
def test_a_damaged_index_is_refused(
    model: Path, pack_path: Path, column: str, change: Callable[[int], int], sentence: str
) -> None:
    at, rows = index_of(pack_path, 3)
    row = int(np.flatnonzero((rows["expert"] == 5) & (rows["plane"] == 1))[1])
    rows[column][row] = change(int(rows[column][row]))
    with pack_path.open("r+b") as file:
        file.seek(at)
        file.write(rows.tobytes())
    with ModelMap(model) as model_map, pytest.raises(FormatError, match=sentence):
        model_map.attach_pack(pack_path)


def test_chunks_of_two_experts_may_not_overlap(model: Path, pack_path: Path) -> None:
    at, rows = index_of(pack_path, 3)
    first, second = (rows["expert"] == 5), (rows["expert"] == 6)
    for column in ("offset", "stored"):
        rows[column][second] = rows[column][first]
    with pack_path.open("r+b") as file:
        file.seek(at)
        file.write(rows.tobytes())
    with ModelMap(model) as model_map, pytest.raises(FormatError, match="misplaces expert"):
        model_map.attach_pack(pack_path)


def test_a_list_of_codecs_that_is_none_is_refused(model: Path, pack_path: Path) -> None:
    pack_path.write_bytes(retyped(pack_path.read_bytes(), "experts.codecs", 6, b"\0\0\xc0\x7f"))
    with ModelMap(model) as model_map:
        assert packs.attach(model_map) == f"{pack_path} is damaged: its experts.codecs is no list; make it again"
        assert packs.contents(model_map) is None


def test_who_reads_the_index_survives_that_the_pack_is_cut_off_meanwhile(model: Path, pack_path: Path) -> None:
    """A page of a mapped file that is not there any more ends the process."""
    program = (
        "import os\nfrom pyorch.runtime.model_map import ModelMap\nfrom pyorch.sidecars import packs\n"
        f"with ModelMap({str(model)!r}) as model_map:\n"
        f"    metadata, arrays = packs.read({str(pack_path)!r}, model_map)\n"
        f"    os.truncate({str(pack_path)!r}, 0)\n"
        "    print(sum(int(arrays[packs.index_name(layer.il)].view(packs.CHUNK)['stored'].sum())\n"
        "              for layer in model_map.layers))\n"
    )
    with ModelMap(model) as model_map:
        stored = sum(int(index_of(pack_path, layer.il)[1]["stored"].sum()) for layer in model_map.layers)
    done = python("-c", program)
    assert done.returncode == 0 and int(done.stdout) == stored > 0, done.stderr


def test_a_pack_that_is_cut_off_or_another_models_is_refused(
    model: Path, pack_path: Path, small_moe_f32: Path
) -> None:
    with pytest.raises(FormatError, match="belongs to another model"):
        check(small_moe_f32, pack_path)
    os.truncate(pack_path, pack_path.stat().st_size - packs.PAGE)
    with pytest.raises(FormatError, match="damaged"):
        check(model)


def test_an_interrupted_run_goes_on_with_what_it_chose(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = compression.disk.Bandwidth(1e3, "threads", 1, 1 << 20, True, 0.1)  # the smallest pack, however it is decoded
    monkeypatch.setattr(compression.disk, "kept_bandwidth", lambda *_: slow)
    monkeypatch.setattr(compression.codecs, "nibble_pace", lambda n_in, n_out: 1.6)
    whole = packing.pack(model, model.with_name("whole.experts.gguf"), codec="auto").path.read_bytes()

    def interrupt(_step: str, done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model, codec="auto", on_progress=interrupt)
    assert not container.default_path(model, packs.KIND).exists()
    monkeypatch.setattr(compression, "choose", None)  # nothing is tried again
    made = packing.pack(model, codec="auto")
    assert made.n_experts // 3 <= made.n_continued < made.n_experts and made.path.read_bytes() == whole


def test_a_full_disk_is_said_and_the_next_run_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n_left = os.pwrite, [4 << 20]

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        n_left[0] -= len(data)
        if n_left[0] < 0:
            raise OSError(28, os.strerror(28))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_STEP_BYTES", 1 << 20)
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(PyorchError, match="No space left on device; the packed experts stay there"):
            packing.pack(model, codec="table")
    assert packing.pack(model, codec="table").n_continued > 0
    assert check(model).damaged == ()


def test_convert_compresses_the_pack_that_it_makes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "f16.gguf"
    options = ["--quantize", "F16", "--pack", "--codec", "table", "--json"]
    assert main(["convert", str(model), "-o", str(target), *options]) == 0
    made = json.loads(capsys.readouterr().out)["pack"]
    assert made["codecs"] == ["table"] and {kind["codec"] for kind in made["kinds"]} == {"table"}
    assert check(target).damaged == ()


@pytest.mark.parametrize(("options", "sentence"), [
    (["--codec", "table", "--level", "3"], "--level is for the codec zstd, not for table"),
    (["--codec", "zstd", "--level", "23"], "zstd has no level 23: use 1 to 22, or -50 to -1"),
    (["--codec", "zstd", "--level", "0"], "zstd has no level 0: use 1 to 22, or -50 to -1"),
    (["--codec", "zstd", "--shards", "65"], "there are 1 to 64 shards of a matrix, not 65"),
    (["--shards", "2"], "--shards is for compressed packs"),
    (["--codec", "nibble", "--shards", "2"], "--shards is for codecs that take exponents apart, not for nibble"),
    (["--check", "--codec", "zstd"], "--codec is not for --check"),
    (["--slim", "slim.gguf", "--codec", "table", "--level", "1"], "--level is for the codec zstd"),
])
def test_options_that_make_no_sense_are_refused(
    model: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["pack", str(model), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.gguf"]
