"""Shares: what one server of several has of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mutations import flip

from pyorch.cli import main
from pyorch.convert.pack import check, pack
from pyorch.convert.share import share_for, write_share
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, packs


@pytest.fixture
def model(small_moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_moe, tmp_path / "model.gguf"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share/model.gguf"


def thirds(model: Path, which: int = 0) -> dict[int, np.ndarray]:
    with ModelMap(model) as model_map:
        return share_for(model_map.layers, {il: np.arange(64) % 3 == which for il in range(8)})


def test_a_share_has_its_experts_byte_for_byte_and_no_others(model: Path, target: Path) -> None:
    share = thirds(model)
    written = write_share(model, target, share)
    sizes = target.stat().st_size, container.default_path(target, packs.KIND).stat().st_size
    assert (written.n_experts, written.n_bytes, written.written) == (8 * 22, sum(sizes), True)
    with ModelMap(model) as whole, packs.open_model(target, share=True) as part:
        assert container.fingerprint(part) == container.fingerprint(whole)
        found = packs.share_of(part)
        assert {il: row.tolist() for il, row in found.items()} == {il: row.tolist() for il, row in share.items()}
        for layer in whole.layers:
            for expert in range(layer.n_expert):
                if share[layer.il][expert]:
                    assert part.read_expert(layer.il, expert) == whole.read_expert(layer.il, expert)
                    continue
                with pytest.raises(FormatError, match=f"share of the experts, without expert {expert} of layer"):
                    part.read_expert(layer.il, expert)
        assert packs.contents(part).stored_bytes == sum(
            int(share[layer.il].sum()) * layer.expert_bytes for layer in whole.layers)
    checked = check(target)
    assert (checked.n_experts, checked.damaged) == (8 * 22, ())


def test_a_damaged_expert_of_a_share_is_found(model: Path, target: Path) -> None:
    write_share(model, target, thirds(model))
    path = container.default_path(target, packs.KIND)
    with ModelMap(path) as packed:
        flip(path, packed.tensor_range(packs.data_name(2)).offset + 100)
    assert [name.split(" of ")[-1][:6] for name in check(target).damaged] == ["blk.2."]


def test_what_is_there_stays_and_an_interrupted_run_goes_on(model: Path, target: Path) -> None:
    def interrupt(_step: str, done: int, total: int) -> None:
        assert total in (8 * 22 * expert_bytes, 8 * 21 * expert_bytes)
        if done > total // 3:
            raise KeyboardInterrupt

    share = thirds(model)
    with ModelMap(model) as whole:
        expert_bytes = whole.layers[0].expert_bytes
    path = container.default_path(target, packs.KIND)
    with pytest.raises(KeyboardInterrupt):
        write_share(model, target, share, interrupt)
    assert not target.exists() and not path.exists()
    part = path.with_name(f".{path.name}.part")
    left = part.stat().st_size
    write_share(model, target, share)
    first = path.read_bytes()
    assert left < len(first) and not part.exists()
    assert not write_share(model, target, share).written
    with pytest.raises(KeyboardInterrupt):  # of another plan nothing is gone on with
        write_share(model, target, thirds(model, 1), interrupt)
    assert path.read_bytes() == first
    assert write_share(model, target, thirds(model, 2)).written
    with packs.open_model(target, share=True) as part_map:
        assert packs.share_of(part_map)[0].tolist() == (np.arange(64) % 3 == 2).tolist()
    assert check(target).damaged == ()


def test_a_share_whose_index_is_damaged_is_made_anew(model: Path, target: Path) -> None:
    share = thirds(model)
    write_share(model, target, share)
    path = container.default_path(target, packs.KIND)
    whole = path.read_bytes()
    with ModelMap(path) as packed:
        flip(path, packed.tensor_range(packs.index_name(3)).offset)
    assert write_share(model, target, share).written and path.read_bytes() == whole


def test_a_share_has_an_expert_of_each_layer_and_all_of_those_that_no_plan_speaks_of(small_moe: Path) -> None:
    with ModelMap(small_moe) as model_map:
        share = share_for(model_map.layers, {il: np.zeros(64, bool) for il in range(7)})
    assert [int(row.sum()) for row in share.values()] == [1] * 7 + [64]


def test_a_share_is_refused_where_it_is_of_no_use(
    model: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_share(model, target, thirds(model))
    for command in (["run", target, "-p", "x"], ["advise", target], ["bench", target], ["serve", target]):
        assert main(list(map(str, command))) == 2
        assert "has a share of the experts, for one server of a cluster: `pyorch cluster up --plan` runs it" in (
            capsys.readouterr().err)
    assert main(["inspect", str(target)]) == 0
    assert "176 experts of all layers, for one server of a cluster" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"] == 176
    with pytest.raises(PyorchError, match="is slim already"):
        write_share(target, target.with_name("again.gguf"), thirds(model))

    shutil.copy(container.default_path(target, packs.KIND), container.default_path(model, packs.KIND))
    with ModelMap(model) as whole:
        assert "belongs beside the slim model that was written with it" in packs.attach(whole)
        assert whole.pack is None
    assert main(["pack", str(model), "--check"]) == 2
    assert "has a share of the experts, without 336 of 512, and belongs beside" in capsys.readouterr().err


def test_a_pack_that_lacks_experts_is_none_of_a_whole_model(model: Path) -> None:
    path = pack(model).path
    with ModelMap(path) as packed, path.open("r+b") as file:
        begin = packed.tensor_range(packs.index_name(2)).offset
        file.seek(begin)
        rows = np.frombuffer(file.read(3 * packs.CHUNK.itemsize), packs.CHUNK).copy()
        rows["offset"] = packs.NOWHERE
        file.seek(begin)
        file.write(rows.tobytes())
    with ModelMap(model) as whole:
        assert "lacks experts, and belongs beside the slim model of a share" in packs.attach(whole)


def test_other_files_stay_what_they_are(model: Path, target: Path) -> None:
    target.write_text("something else")
    with pytest.raises(PyorchError, match="exists, and is not the slim model of this share"):
        write_share(model, target, thirds(model))
    assert target.read_text() == "something else" and not container.default_path(target, packs.KIND).exists()
    target.unlink()
    whole = pack(model, container.default_path(target, packs.KIND)).path.read_bytes()
    assert write_share(model, target, thirds(model)).written
    assert container.default_path(target, packs.KIND).read_bytes() != whole
