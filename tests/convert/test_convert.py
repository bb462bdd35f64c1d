"""`pyorch convert`: what it writes, what it refuses, and that it leaves nothing half done."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import llama_cpp
import pytest
from ggufs import write_moe_model
from models import CHECKPOINT
from mutations import nested, set_metadata
from processes import HANG_SECONDS, is_alive, pyorch, python

from pyorch import files
from pyorch.cli import main
from pyorch.convert import architectures, children, quantization
from pyorch.convert.checkpoint import open_checkpoint
from pyorch.convert.quantize_process import QuantizeError, check_written, quantize
from pyorch.convert.to_gguf import convert
from pyorch.errors import FormatError, PyorchError
from pyorch.processes import started


@pytest.fixture(scope="module")
def checkpoint(zoo) -> Path:
    """A random OLMoE, 15 MB. Tests that damage it take a copy."""
    return zoo.checkpoints / "olmoe"


@pytest.fixture(scope="module")
def plain(zoo) -> Path:
    """It, as a GGUF of type F32."""
    return zoo.path("olmoe", "F32")


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def out(tmp_path) -> Path:
    """An output directory. Whatever a test does, no temporary file may stay in it."""
    directory = tmp_path / "out"
    directory.mkdir()
    yield directory
    assert [file.name for file in directory.iterdir() if file.name.startswith(".")] == []


def test_command_converts_and_quantizes(checkpoint, out):
    done = pyorch(
        "convert", checkpoint, "-o", out / "model.gguf", "--quantize", "q4_k_m", "--pre-tokenizer", "gpt-2", "--json")
    assert done.returncode == 0, done.stderr
    # The converter's chatter is for --verbose. On a busy machine lines say how far the command is.
    assert all(line == "pyorch: starting" or "%" in line for line in done.stderr.splitlines()), done.stderr
    result = json.loads(done.stdout)
    assert result["architecture"] == "OlmoeForCausalLM" and result["file_type"] == "Q4_K_M"
    assert result["files"] == [result["path"]] == [str(out / "model.gguf")]
    reader = gguf.GGUFReader(out / "model.gguf")
    kinds = {tensor.tensor_type for tensor in reader.tensors if "_exps" in tensor.name}
    assert gguf.GGMLQuantizationType.Q4_K in kinds
    assert not any(kind in kinds for kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32))


def test_auto_keeps_the_type_of_the_checkpoint_and_splits(checkpoint, out, torch_at_hand):
    steps = []
    result = convert(checkpoint, out / "model.gguf", pre_tokenizer="gpt-2", split_max_size="4M",
                     on_progress=lambda step, done, total: steps.append((step, done, total)))
    assert [file.name for file in result.files] == [
        f"model-{i:05}-of-{len(result.files):05}.gguf" for i in range(1, len(result.files) + 1)]
    assert len(result.files) > 2 and sorted(out.iterdir()) == sorted(result.files)
    assert result.n_bytes == sum(file.stat().st_size for file in result.files)
    kinds = {t.tensor_type for file in result.files for t in gguf.GGUFReader(file).tensors if "_exps" in t.name}
    assert kinds == {gguf.GGMLQuantizationType.BF16} and result.file_type == "BF16"
    assert steps and {step for step, _, _ in steps} == {"converting"} and steps[-1][1] == steps[-1][2] > 0


@pytest.mark.parametrize("name", ["Q8_0", "IQ4_XS", "MXFP4", "BF16", "Q2_0"])
def test_gguf_is_quantized(plain, out, name):
    result = convert(plain, out / "model.gguf", quantize=name, pure=True)
    wanted = gguf.GGMLQuantizationType[name]
    assert {t.tensor_type for t in gguf.GGUFReader(result.path).tensors if "_exps" in t.name} == {wanted}
    assert convert(result.path, out / "again.gguf", quantize="Q8_0").file_type == "Q8_0"


def test_gguf_files_are_read_with_the_package_of_the_libraries_release():
    done = python("-c", "import pyorch, gguf; print(gguf.__file__)", check=True)
    assert Path(done.stdout.strip()).is_relative_to(architectures.converter_dir())


def test_quantization_names_are_those_of_llama_cpp():
    for name in quantization.names():
        prefix = "LLAMA_FTYPE_ALL_" if name == "F32" else "LLAMA_FTYPE_MOSTLY_"
        assert quantization.file_type(name).value == getattr(llama_cpp, prefix + name)
    prefix = "LLAMA_FTYPE_MOSTLY_"
    known = {name.removeprefix(prefix) for name in dir(llama_cpp) if name.startswith(prefix)}
    assert known | {"F32"} == {*quantization.names(), "NVFP4"}


def test_a_tokenizer_that_transformers_5_saved_is_read_as_the_one_it_is(small_moe, tmp_path, out, torch_at_hand):
    again = Path(shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name))
    path = again / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # What 4 calls additional_special_tokens; the class is that of any tokenizer.json.
    config |= {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": False,
               "extra_special_tokens": config.pop("additional_special_tokens")}
    (again / "chat_template.jinja").write_text(config.pop("chat_template"))
    path.write_text(json.dumps(config, indent=2))
    read, expected = (
        gguf.GGUFReader(word) for word in (convert(again, out / "a.gguf", pre_tokenizer="gpt-2").path, small_moe)
    )
    assert read.fields.keys() == expected.fields.keys()
    for key in (key for key in expected.fields if key.startswith("tokenizer.")):
        assert read.fields[key].contents() == expected.fields[key].contents(), key


# What is refused. Each message is one sentence that names what was wrong.

@pytest.mark.parametrize(
    "damage",
    [
        lambda content: set_metadata(content, "length of tokenizer.ggml.tokens", 2**40),
        lambda content: nested(content, 100_000),
    ],
    ids=["length", "nested"],
)
def test_a_damaged_gguf_is_not_quantized(out, tmp_path, damage):
    path = tmp_path / "tiny.gguf"
    write_moe_model(path)
    path.write_bytes(damage(path.read_bytes()))
    refuse(path, out / "model.gguf", str(path), "damaged", error=FormatError, quantize="Q8_0")


def test_a_type_that_the_quantizer_does_not_make_is_not_offered(plain, out, capsys):
    refuse(plain, out / "model.gguf", "NVFP4 is not a quantization type", quantize="NVFP4")
    with pytest.raises(QuantizeError, match="invalid output file type"):
        quantize(plain, out / "model.gguf", quantization.by_value(39).value)
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert "NVFP4" not in capsys.readouterr().out


def test_what_the_quantizer_asserts_is_a_sentence(out, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_moe_model(path)
    path.write_bytes(set_metadata(path.read_bytes(), "dots1.expert_used_count", 9))
    with pytest.raises(QuantizeError, match=r"n_expert_used_max <= hparams\.n_expert"):
        quantize(path, out / "model.gguf", quantization.file_type("Q8_0").value)


@pytest.mark.parametrize(("gating", "changes", "reason"), [
    (False, {}, "it has no dots1.expert_gating_func"),
    (True, {"dots1.expert_feed_forward_length": 16}, "has wrong shape"),
    (True, {"length of tokenizer.ggml.tokens": 0}, "damaged"),
])
def test_a_quantized_file_that_llama_cpp_cannot_load_gets_no_name(out, tmp_path, gating, changes, reason):
    path = tmp_path / "tiny.gguf"
    write_moe_model(path, gating=gating)
    for key, value in changes.items():
        path.write_bytes(set_metadata(path.read_bytes(), key, value))
    refuse(path, out / "model.gguf", reason, quantize="Q8_0")
    assert list(out.iterdir()) == []



def refuse(source: Path, target: Path, *words: str, error: type = PyorchError, **options: object) -> None:
    with pytest.raises(error) as caught:
        convert(source, target, **options)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message and "Traceback" not in message


def test_refusal_is_one_line_and_status_2(tmp_path):
    done = pyorch("convert", tmp_path / "none", "-o", tmp_path / "model.gguf")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("pyorch: error: ") and done.stderr.count("\n") == 1
    assert "does not exist" in done.stderr


def test_unknown_tokenizer_is_refused_with_the_option_and_its_values(checkpoint, out, torch_at_hand, capfd):
    assert main(["convert", str(checkpoint), "-o", str(out / "model.gguf"), "--verbose"]) == 2
    log, error = capfd.readouterr().err.rstrip().rsplit("\n", 1)
    assert error.startswith("pyorch: error: ") and "--pre-tokenizer NAME" in error and "qwen2" in error
    assert "hf-to-gguf" in log  # which is what --verbose shows
    assert list(out.iterdir()) == []


def test_unknown_pre_tokenizer_is_refused(checkpoint, out):
    refuse(checkpoint, out / "model.gguf", "gtp-2 is not a pre-tokenizer", "did you mean gpt-2?", pre_tokenizer="gtp-2")


def test_unknown_architecture_is_refused_with_the_known_ones(copy, out):
    edit_config(copy, architectures=["OlmooeForCausalLM"])
    refuse(copy, out / "model.gguf", "OlmooeForCausalLM", "did you mean OlmoeForCausalLM?", "MixtralForCausalLM")


def test_all_architectures_are_listed():
    done = pyorch("convert", "--list-architectures")
    assert done.returncode == 0
    assert {"MixtralForCausalLM", "LlamaForCausalLM", "GptOssForCausalLM"} <= set(done.stdout.split())


def test_what_is_no_checkpoint_is_refused(copy, out):
    target = out / "model.gguf"
    refuse(copy / "none", target, "does not exist")
    refuse(copy / "model.safetensors", target, "is not a directory")
    refuse(out, target, "has no config.json", error=FormatError)
    (copy / "model.safetensors").unlink()
    refuse(copy, target, "has no weights", error=FormatError)
    edit_config(copy, architectures=None)
    refuse(copy, target, "names no model class", error=FormatError)
    for text in ('{"architectures": [', '{"architectures": ' + "[" * 100_000):
        (copy / "config.json").write_text(text)
        refuse(copy, target, "config.json is not valid JSON", error=FormatError)


def test_missing_shard_is_refused(copy, out):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(copy, out / "model.gguf", "lacks 1 of 2 weight files", "model-00002-of-00002.safetensors", error=FormatError)


@pytest.mark.parametrize("damage", ["truncated", "short head", "head is no JSON", "wrong offsets", "empty"])
def test_damaged_weights_are_refused(copy, out, damage):
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    n_head = int.from_bytes(data[:8], "little")
    if damage == "truncated":
        del data[-1000:]
    elif damage == "short head":
        data[:8] = (len(data) * 2).to_bytes(8, "little")
    elif damage == "head is no JSON":
        data[8:40] = b"\xff" * 32
    elif damage == "wrong offsets":
        head = data[8:8 + n_head].replace(b'"BF16"', b'"F32" ', 1)
        data[8:8 + n_head] = head
    else:
        data.clear()
    file.write_bytes(data)
    refuse(copy, out / "model.gguf", "model.safetensors is damaged", error=FormatError)


def test_missing_tensor_is_refused_by_name_of_the_tool(copy, out, torch_at_hand):
    edit_config(copy, num_experts=9)
    refuse(copy, out / "model.gguf", "llama.cpp's converter failed", "--verbose", pre_tokenizer="gpt-2")
    assert list(out.iterdir()) == []


def test_what_llama_cpp_cannot_load_gets_no_name(copy, out, torch_at_hand):
    """Its converter writes a tensor of another shape than the keys say."""
    heads = json.loads((copy / "config.json").read_text())["num_key_value_heads"]
    edit_config(copy, num_key_value_heads=heads // 2)
    refuse(copy, out / "model.gguf", "is not complete: llama.cpp cannot load it", "attn_k.weight' has wrong shape",
           "nothing was left there", error=FormatError, pre_tokenizer="gpt-2")
    assert list(out.iterdir()) == []


def test_bad_options_are_refused(checkpoint, plain, out):
    target = out / "model.gguf"
    refuse(checkpoint, target, "Q4_X is not a quantization type", "Q4_K_M", quantize="Q4_X")
    refuse(checkpoint, target, "q9 is not a type that the converter writes", outtype="q9")
    refuse(checkpoint, target, "4 apples is not a size", split_max_size="4 apples")
    refuse(plain, target, "is a GGUF already", "--quantize")
    refuse(plain, plain, "is the file to quantize", "name another file", quantize="Q8_0")
    damaged = damaged_gguf(plain, out.parent)
    refuse(damaged, target, "is truncated", error=FormatError, quantize="Q8_0")
    refuse(plain, target, "importance matrix", quantize="IQ2_XXS")
    assert list(out.iterdir()) == []


def damaged_gguf(whole: Path, directory: Path) -> Path:
    file = directory / "damaged.gguf"
    file.write_bytes(whole.read_bytes()[:-4096])
    return file


def test_unwritable_output_is_refused(checkpoint, tmp_path):
    refuse(checkpoint, tmp_path / "none" / "model.gguf", "does not exist")
    refuse(checkpoint, tmp_path, "is a directory")
    refuse(checkpoint, Path("/proc/model.gguf"), "/proc is not writable")


def test_small_disk_is_refused_before_work_begins(checkpoint, out, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 << 20))
    refuse(checkpoint, out / "model.gguf", "has 40 MiB free", "needs about 6", outtype="f32")


# Whole or not at all.

def test_full_disk_leaves_nothing(checkpoint, plain, out, torch_at_hand):
    """A limit on the size of files acts as a full disk: at first while converting, then while quantizing."""
    (out / "model.gguf").write_bytes(b"the old one")
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, previous[1]))
    try:
        refuse(checkpoint, out / "model.gguf", f"writing to {out} failed", "nothing was left", pre_tokenizer="gpt-2")
        refuse(plain, out / "model.gguf", f"writing to {out} failed", quantize="Q4_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    assert [file.name for file in out.iterdir()] == ["model.gguf"]
    assert (out / "model.gguf").read_bytes() == b"the old one"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system of 7 MB: needs root")
def test_full_file_system_leaves_nothing(plain, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this system does not let root mount")
    monkeypatch.setattr(files, "check_free_space", lambda *_: None)
    try:
        for quantize in ("BF16", "Q8_0"):  # 15 MB: fails amid tensors; 8 MB: fails at the last ones
            refuse(plain, disk / "model.gguf", f"writing to {disk} failed", "disk is full", quantize=quantize)
            assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_file_cut_short_by_the_quantizer_is_noticed(plain, tmp_path):
    short = tmp_path / "short.gguf"
    data = plain.read_bytes()
    for size in (len(data) - 4096, 1000, 0):
        short.write_bytes(data[:size])
        with pytest.raises(QuantizeError):
            check_written(short)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interruption_leaves_nothing(checkpoint, plain, out, stop):
    process = subprocess.Popen(
        [sys.executable, "-m", "pyorch", "convert", checkpoint, "-o", out / "model.gguf", "--pre-tokenizer", "gpt-2"],
        stderr=subprocess.PIPE, text=True,
        # Where the tests run in the background, a shell lets them ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    children_of = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    started: list[str] = []

    def has_torch(pid: str) -> bool:
        with contextlib.suppress(OSError):  # one that has just ended
            return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        return False

    while not any(map(has_torch, started)):  # the converter is under way
        assert process.poll() is None
        time.sleep(0.02)
        started = children_of.read_text().split()
    assert any(out.iterdir())  # the staging directory
    process.send_signal(stop)
    stderr = process.communicate(timeout=HANG_SECONDS)[1]
    assert process.returncode not in (0, 2)
    assert "Traceback" not in stderr
    if stop == signal.SIGKILL:
        while any(map(is_alive, started)):  # they end by themselves
            time.sleep(0.01)
        convert(plain, out / "other.gguf", quantize="Q8_0")
        (out / "other.gguf").unlink()
    assert list(out.iterdir()) == []
    assert not any(map(is_alive, started))


def test_a_child_that_computes_ends_when_its_parent_is_gone(tmp_path, torch_at_hand):
    """What it computes is to read from a pipe into which nobody writes."""
    pipe, directory = tmp_path / "model.gguf", tmp_path / "checkpoint"
    directory.mkdir()
    os.mkfifo(pipe)
    os.mkfifo(directory / "config.json")
    job = {"checkpoint": str(directory), "output": str(tmp_path / "out.gguf"), "outtype": "auto", "options": [],
           "pre_tokenizer": None, "has_mtp": True}
    quantizing = {"source": str(pipe), "output": str(tmp_path / "out.gguf"), "file_type": 7, "pure": False,
                  "keep_split": False, "imatrix": None}
    converter = [sys.executable, str(children.CONVERTER), str(architectures.converter_dir())]
    for command, work, reads in (
        (converter, {"jobs": [job], "mark": ("a", "b")}, directory / "config.json"),
        ([sys.executable, "-m", "pyorch.convert.quantize_process"], quantizing, pipe),
    ):
        child, connection = started(command)
        connection.send(work)
        descriptor = os.open(reads, os.O_WRONLY)  # waits until the child reads
        connection.close()
        assert child.wait(HANG_SECONDS) > 0
        os.close(descriptor)


def test_it_ends_where_nobody_sees_its_progress_any_more(plain, out):
    def on_progress(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(PyorchError, match="Broken pipe"):
        convert(plain, out / "q8.gguf", quantize="Q8_0", on_progress=on_progress)
    assert list(out.iterdir()) == []


def test_target_is_replaced_only_by_a_whole_file(plain, out):
    (out / "model.gguf").write_bytes(b"the old one")
    convert(plain, out / "model.gguf", quantize="Q8_0")
    assert (out / "model.gguf").read_bytes()[:4] == b"GGUF"


def test_only_a_gguf_that_was_converted_is_replaced(checkpoint, plain, out, torch_at_hand, capsys):
    target = out / "model.gguf"
    quantize = ["convert", str(plain), "-o", str(target), "--quantize", "Q8_0"]
    assert main(["convert", str(checkpoint), "-o", str(target), "--pre-tokenizer", "gpt-2"]) == 0
    assert main(quantize) == main(quantize) == 0
    write_moe_model(target)
    foreign = target.read_bytes()
    assert main(quantize) == 2
    error = capsys.readouterr().err
    assert f"{target} exists" in error and "--force" in error and target.read_bytes() == foreign
    assert main([*quantize, "--force"]) == 0 and target.read_bytes() != foreign


def test_shards_of_somebody_else_are_not_replaced(checkpoint, out, torch_at_hand, capsys):
    words = ["convert", str(checkpoint), "-o", str(out / "model.gguf"), "--pre-tokenizer", "gpt-2",
             "--split-max-size", "4M"]
    assert main(words) == main(words) == 0
    *_, last = sorted(out.iterdir())
    first = next(out.glob("*-00001-of-*"))
    write_moe_model(first)
    before = last.read_bytes()
    assert main(words) == 2
    assert f"{first} exists" in capsys.readouterr().err and last.read_bytes() == before
    # The shards of a source that is quantized into its own name.
    assert main(["convert", str(first), "-o", str(out / "model.gguf"), "--quantize", "Q8_0", "--force"]) == 2
    assert "the file to quantize" in capsys.readouterr().err and last.read_bytes() == before


def test_a_pack_beside_a_model_that_is_converted_anew_is_replaced_if_it_was_of_that(plain, out, capsys):
    target, pack = out / "model.gguf", out / "model.experts.gguf"
    words = ["convert", str(plain), "-o", str(target), "--pack", "--quantize"]
    assert main([*words, "Q8_0"]) == main([*words, "Q4_0"]) == 0
    target.unlink()
    before = pack.read_bytes()
    assert main([*words, "Q8_0"]) == 2
    assert f"{pack} exists" in capsys.readouterr().err and pack.read_bytes() == before and not target.exists()


def test_converter_process_that_dies_is_reported(checkpoint, out, monkeypatch):
    monkeypatch.setattr(children, "CONVERTER", Path(__file__).with_name("no_such_program.py"))
    refuse(checkpoint, out / "model.gguf", "llama.cpp's converter failed", "no_such_program.py")


def test_mtp_layers_are_looked_for_among_the_weights(copy):
    assert not open_checkpoint(copy).has_mtp
    edit_config(copy, num_nextn_predict_layers=1)
    assert not open_checkpoint(copy).has_mtp
    n_layers = json.loads((copy / "config.json").read_text())["num_hidden_layers"]
    edit_config(copy, num_hidden_layers=n_layers - 1)  # the last layer is then one behind the model
    assert open_checkpoint(copy).has_mtp


def edit_config(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
