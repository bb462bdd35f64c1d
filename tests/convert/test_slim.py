"""A slim model and its pack are the model; without its pack it is refused, by stock llama.cpp too."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import Zoo
from buddy_lists import complete_buddies
from devices import DeviceProcess
from ggufs import split
from models import CHECKPOINT, assert_same_bits, small_model
from mutations import flip
from processes import python

from pyorch import files
from pyorch.cli import main
from pyorch.convert import pack as packing
from pyorch.convert.expert_outputs import LayerExperts
from pyorch.convert.pack_plan import chunks_of
from pyorch.convert.slim import write_slim
from pyorch.errors import FormatError, PyorchError
from pyorch.llama import managed
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.devices import Device
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, packs

TOKENS = [1, 5, 9, 2, 30, 7, 4, 3, 8, 11]


def slim_of(model: Path, directory: Path, codec: str = "none") -> Path:
    """A slim model and its pack, away from the model."""
    target = directory / "slim.gguf"
    packing.pack(model, container.default_path(target, packs.KIND), codec=codec)
    with ModelMap(model) as model_map:
        write_slim(model_map, target)
    return target


@pytest.fixture(scope="module")
def slim(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slim_of(small_moe, tmp_path_factory.mktemp("slim"))


@pytest.fixture(scope="module")
def compressed(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command."""
    target = tmp_path_factory.mktemp("compressed") / "slim.gguf"
    assert main(["pack", str(small_moe), "--codec", "table", "--slim", str(target)]) == 0
    return target


@pytest.mark.parametrize(("name", "type_name", "codec"), [
    ("olmoe", "Q4_0", "none"), ("mixtral", "F32", "none"), ("gpt-oss-mxfp4", "MXFP4", "none"),
    ("mixtral", "F32", "zstd"), ("qwen3-next-fused", "BF16", "table"), ("qwen3-next-fused", "BF16", "nibble"),
])
def test_the_pair_computes_what_the_model_does(
    zoo: Zoo, tmp_path: Path, name: str, type_name: str, codec: str
) -> None:
    model = zoo.path(name, type_name)
    pair = slim_of(model, tmp_path, codec)
    with ModelMap(model) as whole, ModelMap(pair) as rest:
        assert pair.stat().st_size < whole.info.dense_bytes + (1 << 20)
        assert container.fingerprint(whole) == container.fingerprint(rest)
        assert rest.info.slim and (rest.info.expert_bytes, rest.info.dense_bytes) == (
            whole.info.expert_bytes, whole.info.dense_bytes)
    logits = []
    ways = ((model, "40%", False), (pair, "40%", False), (pair, "auto", False), (pair, "40%", True))
    for path, budget, mapped in ways:
        with (small_model(path, budget, use_mmap=mapped) as loaded,
              Context(loaded.llama.model, n_ctx=64, n_threads=1) as ctx):
            logits.append(ctx.decode(TOKENS))
    for other in logits[1:]:
        assert_same_bits(other, logits[0])
    if codec == "nibble":
        with pytest.raises(FormatError, match="is slim, its experts are in its pack: .* holds nibbles, from which dev"):
            small_model(pair, "40%", use_extra_bufts=False)


@pytest.mark.parametrize("options", [
    {}, {"budget": "resident"}, {"budget": "auto"}, {"pools": "0.5,0.3,0.2,0", "policy": "lfu"}, {"budget": "15%"},
])
def test_a_compressed_pair_computes_what_the_model_does_in_every_mix_of_forms(
    compressed: Path, resident: Model, prompt_tokens: list[int], options: dict[str, str]
) -> None:
    def logits(model: Model) -> np.ndarray:
        with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=16, n_threads=1) as ctx:
            return np.concatenate([ctx.decode(prompt_tokens), *(ctx.decode([token]) for token in prompt_tokens[:8])])

    with small_model(compressed, **{"budget": "40%", **options}) as pair:
        assert_same_bits(logits(pair), logits(resident))
        experts = pair.stats().experts
        assert experts.decoded_bytes > 0 and experts.failures == 0 and experts.peak_bytes <= experts.budget_bytes
        assert (experts.evictions == 0) == (options.get("budget") in ("auto", "resident"))
        assert (experts.stored_bytes > 0) == ("pools" in options)


def test_a_compressed_pair_is_used_where_reading_the_model_itself_would_pay_more(
    compressed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slim model has no such choice: neither a plan nor a load knows it."""
    pair = tmp_path / "pair.gguf"
    for name in ("gguf", "experts.gguf"):
        pair.with_name(f"pair.{name}").symlink_to(compressed.with_name(f"slim.{name}"))
    speeds = ("--read-bandwidth", "100GB/s", "--decode-bandwidth", "1MB/s", "--workers", "1")
    assert main(["plan", str(pair), "--budget", "40%", *speeds, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["compressed"] for row in rows) and "without a pack" not in {row["name"] for row in rows}
    with small_model(pair, "40%") as loaded:
        assert loaded.map.pack is not None and loaded.stats().pools_from == "pair.plan.json"
    with ModelMap(pair) as model_map:
        floor = model_map.info.floor_bytes
        packs.require(model_map)
        assert floor < model_map.info.floor_bytes
    assert main(["run", str(pair), "-p", "import", "-n", "1", "--budget", str(floor)]) == 2
    assert "is below the floor of" in capsys.readouterr().err


def test_a_split_model_becomes_one_slim_file(small_moe: Path, slim: Path, tmp_path: Path) -> None:
    shards = split(small_moe, tmp_path / "model.gguf", max_tensors=20)
    other = slim_of(shards[0], tmp_path)
    with small_model(slim, "50%") as first, small_model(other, "50%") as second:
        with (Context(first.llama.model, n_ctx=64, n_threads=1) as a,
              Context(second.llama.model, n_ctx=64, n_threads=1) as b):
            assert_same_bits(b.decode(TOKENS), a.decode(TOKENS))


@pytest.mark.parametrize("pair", ["slim", "compressed"])
def test_commands_take_the_pair_as_one_model(
    pair: str, request: pytest.FixtureRequest, small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slim = request.getfixturevalue(pair)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where it is kept what a disk needs
    assert main(["inspect", str(slim), "--disk"]) == 0
    assert "experts" in capsys.readouterr().out
    assert main(["run", str(slim), "-p", "import", "-n", "4", "--temp", "0", "--budget", "40%", "--threads", "1"]) == 0
    assert main(["pack", str(slim), "--check"]) == 0
    assert "each as" in capsys.readouterr().out
    assert main(["pack", str(slim)]) == 2
    assert "is slim: its experts are in its pack already" in capsys.readouterr().err
    pack = container.default_path(slim, packs.KIND)
    assert main(["pack", str(small_moe), "--codec", "table", "-o", str(pack)]) == 2
    assert "is the name of the pack that holds its experts" in capsys.readouterr().err
    assert main(["convert", str(slim), "-o", str(slim.with_name("q8.gguf")), "--quantize", "Q8_0"]) == 2
    assert "quantize the model that it was made of" in capsys.readouterr().err


def test_it_is_refused_without_its_pack(slim: Path, small_moe_q4: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(slim, tmp_path / "alone.gguf"))
    with pytest.raises(FormatError, match="is slim, its experts are in its pack: .*alone.experts.gguf: no such file"):
        small_model(alone, "50%")
    packing.pack(small_moe_q4, tmp_path / "alone.experts.gguf")
    with pytest.raises(FormatError, match="is slim.*belongs to another model"):
        small_model(alone, "50%")
    with ModelMap(alone) as model_map, pytest.raises(FormatError, match="is slim: its experts are in a pack"):
        model_map.expert_range(0, 0, 0)


@pytest.mark.parametrize(("made", "plane"), [("slim", 0), ("compressed", 1), ("compressed", 2)])
def test_a_damaged_chunk_of_each_kind_fails_the_decode_and_is_named(
    made: str, plane: int, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process lives: mended, the pair is loaded and decodes."""
    slim = request.getfixturevalue(made)
    pair = Path(shutil.copy(slim, tmp_path / "model.gguf"))
    pack = Path(shutil.copy(container.default_path(slim, packs.KIND), container.default_path(pair, packs.KIND)))
    with ModelMap(pair) as model_map, ModelMap(pack) as packed:
        _, arrays = container.read(pack, packs.KIND, packs.VERSION, model_map)
        chunks = chunks_of(arrays, packed, model_map.layers[2])
        places = [next(row for row in chunks[expert, 1] if row["plane"] == plane) for expert in range(64)]
    for place in places:
        flip(pack, int(place["offset"] + place["stored"] // 2))
    with small_model(pair, "50%") as model, Context(model.llama.model, n_ctx=64, n_threads=1) as ctx:
        with pytest.raises(PyorchError, match=r"cannot read expert \d+ of blk.2.ffn_\w+_exps.weight from .*"
                                              "model.experts.gguf: what was read is damaged"):
            ctx.decode(TOKENS)
        assert model.stats().experts.failures > 0
    for place in places:
        flip(pack, int(place["offset"] + place["stored"] // 2))
    with small_model(pair, "50%") as model, Context(model.llama.model, n_ctx=64, n_threads=1) as ctx:
        assert np.isfinite(ctx.decode(TOKENS)).all()
    flip(pack, int(places[7]["offset"]))
    assert main(["pack", str(pair), "--check"]) == 2
    assert re.search(r"is damaged in 1 place: .*expert 7 of blk\.2\.ffn_", capsys.readouterr().err)


@pytest.mark.parametrize("made", ["slim", "compressed"])
def test_a_pack_is_read_as_long_as_what_it_holds_is_what_was_packed(
    made: str, request: pytest.FixtureRequest, resident: Model, tmp_path: Path
) -> None:
    """Its times and its mode say nothing of that, its checksums do: who puts back what was there is not noticed."""
    slim = request.getfixturevalue(made)
    pair = Path(shutil.copy(slim, tmp_path / "model.gguf"))
    pack = Path(shutil.copy(container.default_path(slim, packs.KIND), container.default_path(pair, packs.KIND)))
    content = pack.read_bytes()
    with Context(resident.llama.model, n_ctx=64, n_threads=1) as ctx:
        expected = ctx.decode(TOKENS)
    with small_model(pair, "20%", prefetch="none") as model, Context(model.llama.model, n_ctx=64, n_threads=1) as ctx:
        pack.chmod(0o640)
        os.utime(pack, (1, 1))
        assert_same_bits(ctx.decode(TOKENS), expected)
        os.truncate(pack, len(content) // 4)
        with pytest.raises(PyorchError, match=f"from {pack}: the file was changed after it was loaded"):
            ctx.decode(TOKENS)
        pack.write_bytes(content)
        model.engine.wait_idle()
        ctx.clear()
        assert_same_bits(ctx.decode(TOKENS), expected)


def test_experts_of_a_compressed_pair_are_compared_as_those_of_the_model(compressed: Path, small_moe: Path) -> None:
    with ModelMap(small_moe) as whole, packs.open_model(compressed) as pair:
        inputs = np.random.default_rng(3).normal(size=(2, whole.layer(5).n_in)).astype(np.float32)
        for expert in (0, 63):
            found, expected = (LayerExperts(model_map, 5).outputs(expert, inputs) for model_map in (pair, whole))
            assert np.array_equal(found, expected) and np.abs(found).max() > 0


def test_llama_cpp_without_our_engine_refuses_it(slim: Path) -> None:
    """Even with the pack beside it: whether it is mapped or read."""
    assert container.default_path(slim, packs.KIND).exists()
    program = ("import llama_cpp\n"
               "for mapped in (True, False):\n"
               f"    try: llama_cpp.Llama({str(slim)!r}, use_mmap=mapped, verbose=True)\n"
               "    except ValueError as error: print(error)\n")
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Failed to load model from file") == 2, done.stderr
    assert done.stderr.count("data is not within the file bounds, model is corrupted or incomplete") >= 2


def test_what_says_to_read_the_model_itself_is_refused(slim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(slim), "-p", "import", "-n", "1", "--no-pack"]) == 2
    assert "is slim, its experts are in its pack only: leave out --no-pack" in capsys.readouterr().err
    with pytest.raises(PyorchError, match="leave out --no-pack"):
        small_model(slim, "50%", packed=False)


def test_verify_eval_and_tune_compare_with_all_experts_in_memory(
    slim: Path, small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say that it is not llama.cpp's own load. What they find is what they find with the whole model."""
    told: list[str] = []
    monkeypatch.setattr(managed.fatal, "notice", told.append)
    pair = tmp_path / "pair.gguf"
    for name in ("gguf", "experts.gguf"):
        pair.with_name(f"pair.{name}").symlink_to(slim.with_name(f"slim.{name}"))
    with ModelMap(pair) as model_map:
        complete_buddies().write(container.default_path(pair, "buddies"), model_map)
    facts, text = tmp_path / "facts.jsonl", CHECKPOINT / "text-test.txt"
    facts.write_text("".join((CHECKPOINT / "facts-train.jsonl").read_text().splitlines(keepends=True)[:4]))

    def run(*command: object) -> str:
        capsys.readouterr()
        assert main([*map(str, command), "--threads", "1"]) == 0
        return capsys.readouterr().out

    assert "are bit-identical to the resident model's" in run("verify", pair, "--budget", "30%", "--tokens", 2)
    perplexity, accuracy = (
        [json.loads(run("eval", kind, model, *options, "--budget", "30%", "--json")) for model in (pair, small_moe)]
        for kind, *options in (("perplexity", "--data", text, "--tokens", 130, "--compare", small_moe),
                               ("arc", "--data", facts)))
    assert perplexity[0]["perplexity"] == perplexity[1]["perplexity"]
    assert perplexity[0]["kl_divergence"] == perplexity[1]["kl_divergence"] == 0
    assert accuracy[0] == accuracy[1]
    assert len(told) == 1
    run("tune", pair, "--data", facts, "--lever", "rho=1|2", "--candidates", 1, "--cache-rate", 0.5,
        "--speed-tokens", 0, "--min-accuracy", 0.1, "--max-kl", 100, "-o", tmp_path / "tuned.json")
    assert len(told) == 1 and f"{pair} is slim, llama.cpp by itself cannot load it" in told[0]


def test_the_report_names_both_files(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "slim.gguf"
    assert main(["pack", str(small_moe), "--slim", str(target), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(container.default_path(target, packs.KIND))
    assert report["slim"] == {"path": str(target), "n_bytes": target.stat().st_size}


def test_room_is_needed_for_both(
    small_moe: Path, slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only the pack has room nothing is begun: the rest of the model would be missing in the end."""
    pair = slim.stat().st_size + container.default_path(slim, packs.KIND).stat().st_size
    for free, status in ((pair - 1, 2), (pair, 0)):
        free += files.FEW_BYTES
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        assert main(["pack", str(small_moe), "--slim", str(tmp_path / "slim.gguf")]) == status
        assert any(tmp_path.iterdir()) == (status == 0)
    assert "free, what is to be written needs about" in capsys.readouterr().err


@pytest.mark.parametrize("left", [0.3, 0.9, 0.999])
def test_a_truncated_one_is_refused(slim: Path, tmp_path: Path, left: float) -> None:
    content = slim.read_bytes()
    cut = tmp_path / "slim.gguf"
    cut.write_bytes(content[: int(len(content) * left)])
    with pytest.raises(FormatError, match="truncated|damaged"):
        ModelMap(cut)


def test_the_model_is_not_overwritten(small_moe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Path(shutil.copy(small_moe, tmp_path / "model.gguf"))
    before = model.read_bytes()
    assert main(["pack", str(model), "--slim", str(model)]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert model.read_bytes() == before
    assert main(["pack", str(model), "--slim", str(tmp_path / "s.gguf"), "-o", "x"]) == 2
    capsys.readouterr()
    assert main(["pack", str(model), "--slim", str(tmp_path / "model.experts.gguf")]) == 2
    assert f"is the name of a sidecar (experts) of {model}: name another file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


def test_its_pack_is_overwritten_by_no_command(
    slim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the only copy of the experts."""
    pair = tmp_path / "pair.gguf"
    pack = container.default_path(pair, packs.KIND)
    shutil.copy(slim, pair)
    shutil.copy(container.default_path(slim, packs.KIND), pack)
    before = pack.read_bytes()
    for command in (("plan", pair, "--budget", "40%"), ("calibrate", pair, "--data", __file__),
                    ("maps", pair, __file__), ("profile", pair, "--data", __file__)):
        assert main([*map(str, command), "-o", str(pack)]) == 2
        assert f"{pack} is the pack of the model: name another file" in capsys.readouterr().err, command
    assert pack.read_bytes() == before and len(list(tmp_path.iterdir())) == 2


def test_without_a_pack_nothing_slim_is_left(dense_model: Path, tmp_path: Path) -> None:
    assert main(["pack", str(dense_model), "--slim", str(tmp_path / "s.gguf")]) == 2
    assert not any(tmp_path.iterdir())


def test_a_slim_model_goes_onto_a_device_with_little_memory(
    slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many of its layers fit cannot be asked before it has an engine."""
    process = DeviceProcess(tmp_path / "log")
    monkeypatch.setattr(Device, "total_bytes", lambda _: 4 << 30)
    monkeypatch.setattr(Device, "free_bytes", lambda _: 268 << 20)
    try:
        with small_model(slim, "50%", device=process.name, vram_budget="50%") as model:
            assert model.device and "".join(model.generate("import os", max_tokens=4))
    finally:
        process.stop()
