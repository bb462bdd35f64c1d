"""Packs are written whole or gone on with, and hold every byte of every expert."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from architectures import Zoo
from ggufs import split
from mutations import flip

from pyorch import files
from pyorch.cli import main
from pyorch.convert import pack as packing
from pyorch.convert.pack import check
from pyorch.errors import FormatError, PyorchError
from pyorch.sidecars import container, packs


@pytest.fixture
def model(small_moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_moe, tmp_path / "model.gguf"))


def part_of(model: Path) -> Path:
    return model.with_name(".model.experts.gguf.part")


@pytest.mark.parametrize(("name", "type_name"), [("olmoe", "Q4_0"), ("olmoe", "Q8_0"), ("mixtral", "F32"),
                                                 ("gpt-oss-mxfp4", "MXFP4"), ("qwen3-next-fused", "BF16")])
def test_every_matrix_is_found_by_the_index(zoo: Zoo, tmp_path: Path, name: str, type_name: str) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(zoo.path(name, type_name))
    made = packing.pack(model)
    assert made.path == tmp_path / "model.experts.gguf" and made.n_continued == 0
    assert check(model).damaged == ()

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made.path).tensors}
    of_model = {tensor.name: tensor.data for tensor in gguf.GGUFReader(model).tensors}
    with packing.ModelMap(model) as model_map:
        for layer in model_map.layers:
            records = tensors[packs.data_name(layer.il)]
            assert records.data_offset % packs.PAGE == 0
            data = records.data.view(np.uint8)
            index = tensors[packs.index_name(layer.il)].data.view(packs.CHUNK)[:, 0]
            assert sorted({(row["expert"], row["role"]) for row in index}) == [
                (expert, role) for expert in range(layer.n_expert) for role in range(len(layer.roles))]
            for row in index:
                name = f"blk.{layer.il}.ffn_{layer.roles[row['role']].name}_exps.weight"
                expected = of_model[name][row["expert"]].reshape(-1).view(np.uint8)
                assert np.array_equal(data[row["offset"] :][: row["stored"]], expected)
            # One read: the matrices of an expert lie in order, and share no page with another expert's.
            ends = {}
            for row in sorted(index, key=lambda row: row["offset"]):
                page = row["offset"] // packs.PAGE
                assert ends.get(page, row["expert"]) == row["expert"]
                ends[(row["offset"] + row["stored"] - 1) // packs.PAGE] = row["expert"]


def test_a_native_pack_holds_what_the_kernels_want(small_moe_q4: Path, model: Path) -> None:
    shutil.copy(small_moe_q4, model)
    plain = packing.pack(model, model.with_name("plain.experts.gguf")).path
    native = packing.pack(model, layout="native").path
    assert check(model).damaged == check(model, plain).damaged == ()
    with packing.ModelMap(model) as model_map:
        layer, size = model_map.layers[1], model_map.expert_range(1, 5, 0).size
        packed = []
        for path in (plain, native):
            tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
            offset = tensors[packs.index_name(1)].data.view(packs.CHUNK)[5 * len(layer.roles), 0]["offset"]
            packed.append(bytearray(tensors[packs.data_name(1)].data[offset:][:size].tobytes()))
        expected = bytearray(packed[0])
        if layer.roles[0].layout != packs.PLAIN:
            model_map.repack(1, 0, expected)
            assert expected != packed[0]
        assert packed[1] == expected


def test_a_split_model_has_one_pack(small_moe: Path, tmp_path: Path) -> None:
    shards = split(small_moe, tmp_path / "model.gguf", max_tensors=20)
    assert len(shards) > 2
    made = packing.pack(shards[0])
    assert check(shards[0]).damaged == ()
    whole = packing.pack(small_moe, tmp_path / "whole.experts.gguf")
    assert made.path.read_bytes() == whole.path.read_bytes()


def test_check_finds_a_flipped_bit_and_says_where(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(model)]) == 0
    assert main(["pack", str(model), "--check"]) == 0
    assert "512 experts of 8 layers" in capsys.readouterr().out
    path = container.default_path(model, packs.KIND)
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == packs.data_name(3))
    flip(path, tensor.data_offset + tensor.n_bytes // 2 + 5)
    assert main(["pack", str(model), "--check"]) == 2
    assert re.search(r"is damaged in 1 place: expert 32 of blk\.3\.ffn_\w+_exps", capsys.readouterr().err)


def test_check_compares_the_layout_that_is_asked_for(
    small_moe_q4: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(small_moe_q4, model)
    with packing.ModelMap(model) as model_map:
        repacked = any(role.layout != packs.PLAIN for layer in model_map.layers for role in layer.roles)
    for layout, other in (("plain", "native"), ("native", "plain")):
        assert main(["pack", str(model), "--layout", layout]) == 0
        assert main(["pack", str(model), "--layout", layout, "--check"]) == main(["pack", str(model), "--check"]) == 0
        capsys.readouterr()
        assert main(["pack", str(model), "--layout", other, "--check"]) == (2 if repacked else 0)
        if repacked:
            assert f"does not have the experts in the {other} layout" in capsys.readouterr().err


def test_a_pack_that_has_no_room_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(PyorchError, match="1024 KiB free, what is to be written needs about"):
        packing.pack(model)
    assert list(model.parent.iterdir()) == [model]


def test_check_finds_what_is_cut_off_meanwhile(model: Path) -> None:
    pack = packing.pack(model).path

    def cut_off(_step: str, _done: int, _total: int) -> None:
        os.truncate(pack, pack.stat().st_size // 2 if pack.stat().st_size > 8 << 20 else pack.stat().st_size)

    found = check(model, on_progress=cut_off)
    assert 0 < len(found.damaged) < 3 * found.n_experts


def test_an_interrupted_run_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = packing.pack(model, model.with_name("whole.experts.gguf")).path.read_bytes()
    n_seen = 0

    def interrupt(_step: str, done: int, total: int) -> None:
        nonlocal n_seen
        n_seen += 1
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model, on_progress=interrupt)
    assert part_of(model).exists() and not container.default_path(model, packs.KIND).exists()
    made = packing.pack(model)
    assert n_seen - 1 <= made.n_continued < made.n_experts and made.path.read_bytes() == whole
    assert not part_of(model).exists()


def test_what_a_killed_run_had_not_counted_is_packed_again(model: Path, tmp_path: Path) -> None:
    """Killed between two steps: data may be there or not, the rows of the index are not."""
    program = (
        "import os, sys; from pyorch.convert import pack; pack._STEP_BYTES = 4 << 20\n"
        "def die(_, done, total):\n    if done > total // 2: os._exit(9)\n"
        f"pack.pack({str(model)!r}, on_progress=die)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    made = packing.pack(model)
    assert 0 < made.n_continued < made.n_experts // 2
    assert check(model).damaged == ()


def change_rows(model: Path, column: str, value: int) -> None:
    """What the index says of the first expert, in what an interrupted run left."""
    with packing.ModelMap(model) as model_map:
        plan = packing.Plan(model_map, "plain", [packing.Scheme() for layer in model_map.layers for _ in layer.roles])
    with part_of(model).open("r+b") as file:
        file.seek(plan.index[0])
        rows = np.frombuffer(file.read(plan.layers[0].row_bytes), packs.CHUNK).copy()
        rows[column] = value
        file.seek(plan.index[0])
        file.write(rows.tobytes())


@pytest.mark.parametrize(("damage", "refused"), [
    (lambda model: os.truncate(part_of(model), part_of(model).stat().st_size - (2 << 20)), False),
    (lambda model: change_rows(model, "offset", 1 << 40), False),
    (lambda model: change_rows(model, "stored", -(1 << 63)), False),
    (lambda model: change_rows(model, "expert", 3), False),
    (lambda model: change_rows(model, "role", 1), True),
    (lambda model: change_rows(model, "raw", 1), True),
])
def test_what_was_damaged_since_a_run_was_interrupted_does_not_become_a_pack(
    model: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], refused: bool
) -> None:
    whole = packing.pack(model, model.with_name("whole.experts.gguf")).path.read_bytes()

    def interrupt(_step: str, done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model, on_progress=interrupt)
    damage(model)
    if refused:
        with pytest.raises(PyorchError, match="is a damaged pack: .* is discarded; run the same command again"):
            packing.pack(model)
        assert not container.default_path(model, packs.KIND).exists() and not part_of(model).exists()
    assert packing.pack(model).path.read_bytes() == whole


def test_what_another_model_left_is_not_gone_on_with(model: Path, small_moe_q4: Path) -> None:
    def interrupt(_step: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model, on_progress=interrupt)
    shutil.copy(small_moe_q4, model)
    assert packing.pack(model).n_continued == 0
    assert check(model).damaged == ()


def test_two_runs_do_not_write_one_pack(model: Path) -> None:
    with part_of(model).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PyorchError, match="another process is writing .*model.experts.gguf"):
            packing.pack(model)
    assert packing.pack(model).n_experts == 512


def test_a_full_disk_is_said_and_the_next_run_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n_left = os.pwrite, [8 << 20]

    def pwrite(descriptor: int, data: object, offset: int) -> int:
        n_left[0] -= len(data)
        if n_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_STEP_BYTES", 1 << 20)
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(PyorchError, match="No space left on device; the packed experts stay there"):
            packing.pack(model)
    assert packing.pack(model).n_continued > 0
    assert check(model).damaged == ()


def test_a_limit_on_file_sizes_is_said(model: Path) -> None:
    program = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
               "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
               f"from pyorch.cli import main; sys.exit(main(['pack', {str(model)!r}]))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and "File too large" in done.stderr and "Traceback" not in done.stderr


def test_convert_packs_what_it_wrote(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = model.with_name("q8.gguf")
    assert main(["convert", str(model), "-o", str(target), "--quantize", "Q8_0", "--pack"]) == 0
    assert "q8.experts.gguf: 512 experts" in capsys.readouterr().out
    assert check(target).damaged == ()


def test_the_model_is_not_overwritten(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["pack", str(model), "-o", str(model)]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert model.read_bytes() == before and not model.with_name(f".{model.name}.part").exists()


def test_the_part_of_a_pack_does_not_follow_links(model: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"kept")
    part_of(model).symlink_to(precious)
    with pytest.raises(PyorchError, match="cannot be written"):
        packing.pack(model)
    assert precious.read_bytes() == b"kept"


def test_a_dense_model_has_nothing_to_pack(dense_model: Path) -> None:
    with pytest.raises(PyorchError, match="no routed experts"):
        packing.pack(dense_model)
    with pytest.raises(FormatError, match="no such file"):
        check(dense_model)


def test_memory_does_not_grow_with_the_model(model: Path) -> None:
    """12 MiB of experts are packed with less than 4 MiB more than packing nothing takes."""
    program = (
        "from pyorch.convert import pack\n"
        "from pyorch.llama.memory import peak_bytes\n"  # getrusage would tell the parent's
        "from pyorch.runtime.model_map import ModelMap\n"
        "pack._STEP_BYTES = 1 << 20\n"
        f"path = {str(model)!r}\n"
        "with ModelMap(path) as m: pack.Plan(m, 'plain', [pack.Scheme() for layer in m.layers for _ in layer.roles])\n"
        "before = peak_bytes()\n"
        "pack.pack(path)\n"
        "print(peak_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 << 20
