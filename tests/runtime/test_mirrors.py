"""Copies of a model on other disks: the same bits, whichever is read and whichever fails."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from ggufs import split
from models import assert_same_bits, small_model
from processes import python

from pyorch.cli import main
from pyorch.convert import pack as packing
from pyorch.convert.slim import write_slim
from pyorch.errors import FormatError, PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime import mirrors
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.mirrors import Mirrors
from pyorch.sidecars import container, packs

READS = ("io_uring:2:64KiB", "threads:2:64KiB")
LEFT_OUT = "pyorch: note: cannot read {}: the file was changed after it was loaded; it is left out"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared before is not known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def original(small_moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_moe, tmp_path / "model.gguf"))


def copy_of(path: Path, disk: str) -> Path:
    folder = path.parent / disk
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(path, folder))


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    with Context(model.llama.model, n_threads=1) as ctx:
        return np.concatenate([ctx.decode(tokens), *(ctx.decode([token]) for token in tokens[:6])])


@pytest.fixture
def expected(resident: Model, prompt_tokens: list[int]) -> np.ndarray:
    return logits(resident, prompt_tokens)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
def test_logits_from_a_file_and_a_folder_on_other_disks_are_those_of_the_resident_model(
    original: Path, prompt_tokens: list[int], expected: np.ndarray, reads: str, direct_io: bool
) -> None:
    others = [copy_of(original, "one"), copy_of(original, "two").parent]
    with small_model(original, "20%", mirror=others, reads=reads, direct_io=direct_io) as model:
        assert_same_bits(logits(model, prompt_tokens), expected)


def logits_without(
    original: Path, failing: Path, tokens: list[int], harm: str = "os.truncate(path, os.path.getsize(path) // 2)",
    **options: object,
) -> tuple[np.ndarray, list[str]]:
    """Of a model, one of whose files is harmed after it was opened; and what the library says, which goes to the
    stderr that its process began with."""
    saved = original.with_name("logits.npy")
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import numpy as np
from models import small_model
from test_mirrors import logits
with small_model({str(original)!r}, "30%", **{options!r}) as model:
    path = {str(failing)!r}
    {harm}
    first, again = logits(model, {tokens!r}), logits(model, {tokens!r})
    np.save({str(saved)!r}, np.stack([first, again]))
"""
    done = python("-c", program, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return np.load(saved), [line for line in done.stderr.splitlines() if "note" in line]


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("lost", ["the original", "the mirror"])
def test_a_copy_that_fails_is_left_out_with_one_line_and_nothing_is_lost(
    original: Path, prompt_tokens: list[int], expected: np.ndarray, reads: str, lost: str
) -> None:
    mirror = copy_of(original, "one")
    failing = original if lost == "the original" else mirror
    actual, lines = logits_without(original, failing, prompt_tokens, mirror=str(mirror), reads=reads)
    for one in actual:
        assert_same_bits(one, expected)
    assert len(lines) == 1 and lines[0].startswith(LEFT_OUT.format(failing))


def test_a_copy_that_was_written_to_is_not_read_on_whatever_its_samples_say(
    original: Path, prompt_tokens: list[int], expected: np.ndarray
) -> None:
    mirror = copy_of(original, "one")
    actual, lines = logits_without(original, mirror, prompt_tokens, "os.utime(path)", mirror=str(mirror))
    for one in actual:
        assert_same_bits(one, expected)
    assert len(lines) == 1 and lines[0].startswith(LEFT_OUT.format(mirror))


def test_the_last_copy_that_fails_fails_the_request(original: Path, prompt_tokens: list[int]) -> None:
    mirror = copy_of(original, "one")
    with small_model(original, "20%", mirror=mirror) as model, Context(model.llama.model, n_threads=1) as ctx:
        for path in (original, mirror):
            os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(PyorchError, match="the file was changed after it was loaded"):
            ctx.decode(prompt_tokens)


def files_of(kind: str, small_moe: Path, folder: Path) -> tuple[Path, list[Path]]:
    """A model, and all files that its experts are read from."""
    if kind == "split":
        shards = split(small_moe, folder / "model.gguf", max_tensors=20)
        return shards[0], shards
    model = Path(shutil.copy(small_moe, folder / "model.gguf"))
    if kind == "slim":
        slim = folder / "slim.gguf"
        made = packing.pack(model, container.default_path(slim, packs.KIND))
        with ModelMap(model) as model_map:
            write_slim(model_map, slim)
        model.unlink()
        return slim, [made.path]
    made = packing.pack(model, layout="native" if kind == "native pack" else "plain",
                        codec="table" if kind == "compressed pack" else "none")
    return model, [made.path]


@pytest.mark.parametrize("kind", ["split", "slim", "pack", "native pack", "compressed pack"])
def test_whatever_experts_are_read_from_has_copies(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int], expected: np.ndarray, kind: str
) -> None:
    path, files = files_of(kind, small_moe, tmp_path)
    copies = [copy_of(file, "one") for file in files]
    assert len(files) > 1 or kind != "split"
    actual, lines = logits_without(path, files[-1], prompt_tokens, mirror=str(copies[0].parent))
    for one in actual:
        assert_same_bits(one, expected)
    assert len(lines) == 1 and lines[0].startswith(LEFT_OUT.format(files[-1]))


@pytest.mark.parametrize("place", [0, 0.37, 0.999999])
def test_a_copy_with_another_byte_anywhere_is_refused(original: Path, place: float) -> None:
    mirror = copy_of(original, "one")
    with mirror.open("r+b") as file:
        file.seek(int(place * mirror.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(FormatError, match=f"{mirror} is no copy of {original}: their bytes differ"):
        small_model(original, "20%", mirror=mirror)


def test_engines_compare_samples_by_themselves(original: Path) -> None:
    mirror = copy_of(original, "one")
    with mirror.open("r+b") as file:
        file.write(b"FUGG")
    with ModelMap(original) as model_map:
        model_map.add_copy(0, 1, mirror)
        with pytest.raises(FormatError, match=f"{mirror} is no copy of {original}"):
            Engine(model_map, model_map.info.expert_bytes)


def test_all_is_compared_once_and_again_where_a_copy_was_changed(original: Path) -> None:
    mirror, compared = copy_of(original, "one"), []
    with ModelMap(original) as model_map:
        for _ in range(2):
            mirrors.add_mirrors(model_map, [mirror], lambda *step: compared.append(step))
        assert [step[1] for step in compared][-1] == original.stat().st_size
        once = len(compared)
        os.utime(mirror, (1, 1))
        mirrors.add_mirrors(model_map, [mirror], lambda *step: compared.append(step))
        assert len(compared) == 2 * once


def test_a_copy_that_changes_while_it_is_compared_is_refused(original: Path) -> None:
    mirror = copy_of(original, "one")

    def change(*_: object) -> None:
        os.utime(mirror, (1, 1))

    with ModelMap(original) as model_map, pytest.raises(FormatError, match="changed while they were compared"):
        mirrors.add_mirrors(model_map, [mirror], change)


def test_what_is_no_copy_is_refused_in_a_sentence(original: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    short = copy_of(original, "one")
    os.truncate(short, 4096)
    link = tmp_path / "link.gguf"
    twice = copy_of(original, "two")
    link.symlink_to(twice)
    with pytest.raises(FormatError, match=f"{link} was named before"):
        small_model(original, "20%", mirror=[twice, link])
    for path, sentence in {
        empty: "has no copy of what experts are read from: model.gguf",
        short: "has 4096 bytes, and is no copy",
        tmp_path / "none.gguf": "there is no such file",
        original: "is the file that experts are read from",
    }.items():
        with pytest.raises(FormatError, match=sentence):
            small_model(original, "20%", mirror=path)


def test_the_flag_is_repeated_and_refused_with_exit_status_2(
    original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mirror, missing = copy_of(original, "one"), tmp_path / "none.gguf"
    command = ["run", str(original), "-p", "a", "-n", "2", "--budget", "30%", "--mirror", str(mirror)]
    assert main(command) == 0
    assert main([*command, "--mirror", str(missing)]) == 2
    assert f"{missing} is to be a copy of model.gguf, and there is no such file" in capfd.readouterr().err


def test_paths_are_one_several_or_joined() -> None:
    several = Mirrors((Path("/a"), Path("/b/c")))
    assert Mirrors.parse("/a:/b/c") == Mirrors.parse(["/a", Path("/b/c")]) == several
    assert str(several) == "/a:/b/c"
    for wrong in ("", [], "/a:", ["/a"] * 17):
        with pytest.raises(ValueError):
            Mirrors.parse(wrong)
