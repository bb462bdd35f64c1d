"""What users get wrong: each is one sentence on stderr and exit status 2, and nothing is loaded."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from ggufs import split, write_dense_model, write_moe_model
from models import CHECKPOINT
from mutations import anatomy, set_metadata
from processes import pyorch
from terminals import Terminal

from pyorch.cli import COMMANDS, main, make_parser, with_nested
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import FormatError, PyorchError
from pyorch.llama import memory
from pyorch.llama.model import load
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.container import default_path
from pyorch.sidecars.predictor import DefaultVectors, PredictorFile


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Runs a command that must fail; returns its sentence."""

    def run(*argv: object) -> str:
        assert main([str(word) for word in argv]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("pyorch: error: ") and printed.err.count("\n") == 1, printed.err
        return printed.err.removeprefix("pyorch: error: ").strip()

    return run


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("run", "-p", "x")])
def test_no_such_file(refused, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert refused(*command, tmp_path / "absent.gguf") == f"{tmp_path}/absent.gguf: no such file"


def test_what_was_probably_meant_is_said(refused, tmp_path: Path) -> None:
    (tmp_path / "olmoe.gguf").write_bytes(b"GGUF")
    assert refused("inspect", tmp_path / "olmo.gguf").endswith(f"no such file; did you mean {tmp_path}/olmoe.gguf?")
    assert refused("advise", tmp_path).endswith(f"not a GGUF file; {tmp_path}/olmoe.gguf is one")
    assert f"pyorch convert {CHECKPOINT} -o " in refused("run", CHECKPOINT, "-p", "x")


@pytest.mark.parametrize(("command", "flag", "said"), [
    ("run", "-ngl", "--device auto"), ("bench", "--n-cpu-moe=4", "--device auto"), ("run", "-c", "--ctx N"),
    ("verify", "-m", "MODEL, without a flag"), ("serve", "-ngl", "--device auto"),
])
def test_flags_of_llama_cpp_are_named_as_here(refused, small_moe: Path, command: str, flag: str, said: str) -> None:
    assert said in refused(command, small_moe, flag, "9")


def test_a_directory_is_no_model(refused, small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) in refused("run", tmp_path, "-p", "x")
    assert "is a directory" in refused("pack", ".")
    for directory in (".", "/"):
        assert "is a directory" in refused("pack", small_moe, "--slim", directory)
        assert "is a directory" in refused("pack", small_moe, "-o", directory)


def test_a_name_that_is_no_text_is_said(refused, tiny_moe: Path) -> None:
    path = tiny_moe.rename(tiny_moe.with_name(os.fsdecode(b"\xff.gguf")))
    assert "is no name in UTF-8" in refused("run", path, "-p", "x", "--budget", "60%")


def test_a_pipe_is_no_model(refused, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is no file" in refused("inspect", tmp_path / "pipe.gguf")


def test_a_pipe_is_no_sidecar(refused, small_moe: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "pipe.gguf is no file" in refused("pack", small_moe, "--check", "-o", tmp_path / "pipe.gguf")
    assert "pipe.gguf is no file" in refused("run", small_moe, "-p", "x", "--budget", "50%", "--lossy", "buddies",
                                             "--buddies-file", tmp_path / "pipe.gguf")


def test_a_dense_model_has_nothing_to_divide(refused, dense_model: Path) -> None:
    assert "is a dense model: it has no experts" in refused("plan", dense_model, "--budget", "40%")
    assert "is a dense model: leave it out" in refused("run", dense_model, "-p", "x", "--pools", "1,0,0,0")


def test_not_a_gguf(refused, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    assert refused("run", path, "-p", "x") == f"{path} is not a GGUF file: it does not begin with GGUF"


def test_an_empty_file(refused, tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    assert str(path) in refused("run", path, "-p", "x")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_gguf(refused, small_moe: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "truncated.gguf"
    path.write_bytes(small_moe.read_bytes()[: int(share * small_moe.stat().st_size)])
    sentence = refused("run", path, "-p", "x")
    assert str(path) in sentence and "truncated" in sentence


def test_a_header_without_weights_says_so_and_nothing_else(tiny_moe: Path) -> None:
    content = tiny_moe.read_bytes()
    known = anatomy(content)
    for end, said in (
        (known.data, f"is truncated: it has {known.data} of {len(content)} bytes, which are its header only"),
        (known.tensors[-1][2] - 1, "is a truncated or damaged GGUF: its header cannot be read to the end"),
        (known.metadata[-1][2], "is a truncated or damaged GGUF: its header cannot be read to the end"),
    ):
        tiny_moe.write_bytes(content[:end])
        for command in ("inspect", "verify"):  # one whose log nobody has taken, one whose log pyorch has
            done = pyorch(command, tiny_moe)
            assert (done.returncode, done.stderr) == (2, f"pyorch: error: {tiny_moe} {said}\n")


def test_a_missing_shard(refused, small_moe: Path, tmp_path: Path) -> None:
    shards = split(small_moe, tmp_path / "split.gguf", max_tensors=30)
    assert len(shards) > 3
    shards[2].unlink()
    assert str(shards[2].name) in refused("run", shards[0], "-p", "x")


def test_a_damaged_header(refused, small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    content = bytearray(small_moe.read_bytes())
    content[8:24] = b"\xff" * 16  # numbers of tensors and of metadata
    path.write_bytes(content)
    assert str(path) in refused("run", path, "-p", "x")


def test_an_architecture_that_llama_cpp_does_not_know(refused, small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    path.write_bytes(small_moe.read_bytes().replace(b"qwen2moe", b"qwen9moe"))
    sentence = refused("run", path, "-p", "x", "--budget", "50%")
    assert str(path) in sentence and "qwen9moe" in sentence


@pytest.fixture
def tiny_moe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_moe_model(path)
    return path


def test_a_shard_behind_the_first_one_names_that(refused, small_moe: Path, tmp_path: Path) -> None:
    shards = split(small_moe, tmp_path / "split.gguf", max_tensors=60)
    said = f"{shards[1]} is shard 2 of {len(shards)}: name the first one, ending in -00001-of-{len(shards):05}.gguf"
    assert refused("run", shards[1], "-p", "x") == refused("inspect", shards[1]) == said


@pytest.mark.parametrize("command", [("inspect",), ("run", "-p", "x"), ("run", "-p", "x", "--budget", "60%")])
@pytest.mark.parametrize("n", [0, 513, 100_000, 2**31 - 1, 2**32 - 1])
def test_a_number_of_layers_that_cannot_be(refused, tiny_moe: Path, command: tuple[str, ...], n: int) -> None:
    tiny_moe.write_bytes(set_metadata(tiny_moe.read_bytes(), "dots1.block_count", n))
    assert refused(*command, tiny_moe) == f"{tiny_moe}: dots1.block_count is {n}, and must be from 1 to 512"


@pytest.mark.parametrize("budget", ["auto", "60%"])
def test_what_llama_cpp_asserts_of_a_model_is_a_sentence(refused, tiny_moe: Path, budget: str) -> None:
    whole = tiny_moe.read_bytes()
    for key, value, needed in (
        ("attention.head_count_kv", 2, "ggml_nelements(a) == ne0*ne1*ne2 (ggml.c:"),
    ):
        tiny_moe.write_bytes(set_metadata(whole, f"dots1.{key}", value))
        sentence = refused("run", tiny_moe, "-p", "x", "--budget", budget)
        assert str(tiny_moe) in sentence and f"a condition of llama.cpp does not hold: {needed}" in sentence
        assert "GGML_ASSERT" not in sentence
        assert "/llama.cpp/" not in sentence, "whose directories these were tells nothing"


@pytest.mark.parametrize("command", [("inspect",), ("run", "-p", "x"), ("run", "-p", "x", "--budget", "60%")])
@pytest.mark.parametrize(("key", "value", "right"), [
    ("rope.dimension_count", 0, "an even number from 2 to 16"),  # llama.cpp never ends
    ("rope.dimension_count", 15, "an even number from 2 to 16"),  # or ends the process
    ("rope.dimension_count", 32, "an even number from 2 to 16"),
    ("attention.head_count", 0, "from 1 to 64"),
])
def test_heads_that_cannot_be(
    refused, tiny_moe: Path, command: tuple[str, ...], key: str, value: int, right: str
) -> None:
    tiny_moe.write_bytes(set_metadata(tiny_moe.read_bytes(), f"dots1.{key}", value))
    assert refused(*command, tiny_moe) == f"{tiny_moe}: dots1.{key} is {value}, and must be {right}"


@pytest.mark.parametrize("command", [("inspect",), ("advise",), ("run", "-p", "x")])
@pytest.mark.parametrize("n_used", [0, 9])
def test_a_top_k_that_cannot_be(refused, tiny_moe: Path, command: tuple[str, ...], n_used: int) -> None:
    tiny_moe.write_bytes(set_metadata(tiny_moe.read_bytes(), "dots1.expert_used_count", n_used))
    assert refused(*command, tiny_moe) == (f"{tiny_moe}: dots1.expert_used_count is {n_used} for layer 1, and must be "
                                           "from 1 to 8, its number of experts")


def test_a_top_k_that_is_not_said(refused, tiny_moe: Path) -> None:
    tiny_moe.write_bytes(tiny_moe.read_bytes().replace(b"dots1.expert_used_count", b"dots1.expert_used_cOunt"))
    assert refused("prepare", tiny_moe) == (
        f"{tiny_moe}: dots1.expert_used_count does not say how many experts layer 1 uses for a token")


@pytest.mark.parametrize("budget", ["auto", "60%"])
def test_a_router_whose_gating_function_is_not_said(refused, tiny_moe: Path, budget: str) -> None:
    write_moe_model(tiny_moe, gating=False)
    sentence = refused("run", tiny_moe, "-p", "x", "--budget", budget)
    unknown = "the gating function of its routers is not known: it has no dots1.expert_gating_func"
    assert sentence == f"{tiny_moe}: {unknown}"


def test_an_epsilon_below_zero(refused, tiny_moe: Path) -> None:
    bits = 0xBF800000  # of the float -1
    tiny_moe.write_bytes(set_metadata(tiny_moe.read_bytes(), "dots1.attention.layer_norm_rms_epsilon", bits))
    assert "layer_norm_rms_epsilon is -1, and must be 0 or more" in refused("run", tiny_moe, "-p", "x")


@pytest.mark.parametrize(("option", "value"), [
    ("--threads", 100_000), ("--threads", 0), ("--threads", -1), ("--ctx", 0), ("--ctx", -5), ("--ctx", 2**40),
    ("--ubatch", -3), ("--ubatch", 2**31),
])
def test_a_size_that_cannot_be(refused, tiny_moe: Path, option: str, value: int) -> None:
    said = refused("run", tiny_moe, "-p", "x", option, value, "--budget", "60%")
    assert f"{option} is {value}, and must be a whole number from 1" in said


def test_a_port_that_cannot_be(refused, tiny_moe: Path) -> None:
    assert '"65536" is not a whole number from 0 to 65535' in refused("serve", tiny_moe, "--port", 65536)


@pytest.mark.parametrize(("given", "said"), [
    (("--", "-np", "0"), "llama-server refuses -np 0: invalid value for n_parallel; it takes -np, --parallel N"),
    (("--", "-np"), "llama-server refuses -np: expected value for argument"),
    (("--", "-fa", "maybe"), "llama-server refuses -fa maybe: unknown value for --flash-attn: 'maybe'; it takes -fa"),
    (("--", "--temp", "x"), "llama-server refuses --temp x: that is no number"),
    (("--", "--grammar-file", "/nowhere"), "llama-server refuses --grammar-file /nowhere: failed to open file"),
    (("--", "--foo"), "llama-server has no flag --foo"),
    (("--", "-np", "1000000000"), "-np is 1000000000, and must be 256 or less"),
    (("--", "-t", "1000000000"), "-t is 1000000000, and must be 512 or less"),
    (("--", "-tb", "513"), "-tb is 513, and must be 512 or less"),
    (("--", "--threads-http", "1000000000"), "--threads-http is 1000000000, and must be 1024 or less"),
    (("--", "-cram", "1000000000"), "-cram is 1000000000 (MiB), and must be"),
    (("--port", "8123", "--port", "8124"), "--port: it is given more than once, as 8123 and 8124"),
    (("--port", "8123", "--", "--port", "8124"), "--port is given more than once, as 8124 and 8123"),
    (("--", "--host", "::1", "--host", "::"), "--host is given more than once, as ::1 and ::"),
])
@pytest.mark.parametrize("several", [False, True])
def test_flags_that_a_server_refuses(
    refused, small_moe: Path, given: tuple[str, ...], said: str, several: bool
) -> None:
    assert said in refused("serve", *(("--models", small_moe.parent) if several else (small_moe,)), *given)


@pytest.mark.parametrize(("option", "flag"), [("--ctx", "-c"), ("--ubatch", "-ub"), ("--threads", "--threads")])
def test_an_option_that_is_given_as_a_flag_of_llama_server_too(
    refused, small_moe: Path, option: str, flag: str
) -> None:
    said = refused("serve", small_moe, option, 32, "--", flag, 64)
    assert said == f"{option} 32 is given, and {flag} after `--`: give one of them"


@pytest.mark.parametrize(("words", "said"), [
    ("run MODEL -p a --ctx 256 --ctx 512", "argument --ctx: it is given more than once, as 256 and 512: give it once"),
    ("run MODEL -p a --prompt b", "as a and b: give it once"),
    ("run MODEL -p a --budget 40% --budget 60%", "as 40% and 60%"),
    ("serve MODEL --ctx 256 --ctx-size 512", "as 256 and 512"),
    ("serve MODEL -- -c 256 --ctx-size 512", "-c is given more than once, as 256 and 512: give it once"),
    ("serve MODEL -- -np 2 -np 3", "-np is given more than once, as 2 and 3: give it once"),
    ("profile MODEL --data a b --data c -o d", "as a b and c: give all values behind one"),
    ("eval arc MODEL --data a --csv b --csv c", "as b and c"),
    ("models rm MODEL --config a --config b", "--config FILE has its place before the command"),
    ("--config a --config b inspect MODEL", "as a and b"),
])
def test_an_option_with_one_value_is_given_once(refused, tiny_moe: Path, words: str, said: str) -> None:
    assert said in refused(*(tiny_moe if word == "MODEL" else word for word in words.split()))


def test_every_option_of_every_command_with_one_value_is_given_once() -> None:
    seen = 0
    for _, parser in with_nested(make_parser(COMMANDS)):
        for action in parser._actions:
            if isinstance(action, argparse._StoreAction) and action.option_strings and action.nargs is None:
                values = action.choices or ("1", "2")
                with pytest.raises(PyorchError, match="it is given more than once"):
                    namespace = argparse.Namespace()
                    for value in list(values)[:2]:
                        action(parser, namespace, value, action.option_strings[0])
                seen += 1
    assert seen > 100


def test_an_option_may_be_repeated_with_the_value_that_it_has(tiny_moe: Path) -> None:
    assert main(["inspect", str(tiny_moe), "--ctx", "256", "--ctx", "256"]) == 0


@pytest.mark.parametrize("words", [
    "run MODEL -p x --ctx DIGITS", "run MODEL -p x -n DIGITS", "run MODEL -p x --temp DIGITS",
    "run MODEL -p x --budget DIGITS", "run MODEL -p x --budget DIGITS% --prefetch auto:DIGITS",
    'run MODEL -p x --json-schema {"minLength":DIGITS}', "run MODEL -p x --pools DIGITS,1,1,1",
    "serve MODEL --port DIGITS", "serve MODEL -- -np DIGITS", "serve MODEL --grace DIGITS",
    "advise MODEL --compute-ms DIGITS", "advise MODEL --compute-ms inf", "--config TOML inspect MODEL",
    "profile MODEL --data LINES -o OUT", "cluster up --config TOML",
])
def test_a_number_of_thousands_of_digits_is_a_short_sentence(
    refused, tiny_moe: Path, tmp_path: Path, words: str
) -> None:
    digits = "1" * 5001
    (tmp_path / "TOML").write_text(f"threads = {digits}")
    (tmp_path / "LINES.jsonl").write_text(f'{{"text": "a", "n": {digits}}}')
    paths = {"MODEL": tiny_moe, "TOML": tmp_path / "TOML", "LINES": tmp_path / "LINES.jsonl", "OUT": tmp_path / "out"}
    said = refused(*(paths.get(word, word.replace("DIGITS", digits)) for word in words.split()))
    assert "set_int_max_str_digits" not in said and "convert" not in said and len(said) < 600, said
    assert not paths["OUT"].exists()


def test_an_empty_prompt(refused, small_moe: Path) -> None:
    assert "the prompt is empty" in refused("run", small_moe, "-p", "")


@pytest.mark.parametrize("command", [("run", "-p", "x", "--ctx"), ("serve", "--port", 0, "--ctx")])
def test_a_ubatch_that_no_memory_holds_names_the_widest_that_fits(refused, small_moe: Path, command: tuple) -> None:
    said = refused(command[0], small_moe, *command[1:], 2_000_000, "--ubatch", 2**31 - 1, "--budget", "60%",
                   *(("--", "-np", 1, "-b", 2**31 - 1) if command[0] == "serve" else ()))
    found = re.search(r"it fits where (\d+) tokens are computed at once \(--ubatch \1, in Python n_ubatch=\1\)$", said)
    assert found and 32 <= int(found[1]) < 2_000_000


def test_a_ubatch_is_no_wider_than_its_context(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(small_moe), "-p", "x", "-n", "1", "--ctx", "256", "--temp", "0", "--budget", "60%"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert main([*words, "--ubatch", str(10**9)]) == 0
    assert capsys.readouterr().out == expected


def test_text_of_a_damaged_model_does_not_break_the_sentence(refused, tiny_moe: Path) -> None:
    tiny_moe.write_bytes(tiny_moe.read_bytes().replace(b"gpt-2", b"\ngpt2"))
    assert "unknown pre-tokenizer" in refused("run", tiny_moe, "-p", "x", "--budget", "60%")


@pytest.mark.parametrize("damage", ["text", "length"])
def test_a_damaged_sidecar_is_blamed_and_not_the_model(refused, tiny_moe: Path, damage: str) -> None:
    sidecar = default_path(tiny_moe, "predictor")
    with ModelMap(tiny_moe) as model_map:
        vectors = {layer.il: np.ones((layer.n_expert, 64), np.float32) for layer in model_map.layers}
        counts = {layer.il: np.ones(layer.n_expert, np.int64) for layer in model_map.layers}
        hybrid = dict.fromkeys(vectors, False)
        PredictorFile(DefaultVectors(vectors, counts, 1), hybrid=hybrid).write(sidecar, model_map)
    whole = sidecar.read_bytes()
    if damage == "text":
        sidecar.write_bytes(whole.replace(b"predictor.n_tokens", b"predictor.n_token\xff"))
    else:
        sidecar.write_bytes(set_metadata(whole, "length of predictor.hybrid", 2**40))
    sentence = f"{sidecar} is damaged or cut off: make it again"
    assert refused("run", tiny_moe, "-p", "x", "--budget", "60%", "--prefetch", "quasi-hidden") == sentence
    # Who named no predictor is told, and goes on.
    done = pyorch("run", tiny_moe, "-p", "x", "-n", "1", "--budget", "60%")
    assert done.returncode == 0 and f"pyorch: note: {sentence}" in done.stderr


@pytest.mark.parametrize("budget", ["1%", "1KiB", "0"])
def test_a_budget_below_the_floor(refused, small_moe: Path, budget: str) -> None:
    assert "is below the floor of 312 KiB" in refused("run", small_moe, "-p", "x", "--budget", budget)


def test_a_budget_that_is_nonsense(refused, small_moe: Path) -> None:
    assert 'budget "fast" is not understood' in refused("run", small_moe, "-p", "x", "--budget", "fast")


def test_a_memory_limit_below_dense_weights_and_floor(
    refused, small_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: memory.MemoryLimit("cgroup /job", 128 << 20, 101 << 20))
    sentence = refused("run", small_moe, "-p", "x")
    assert "101 MiB are free under the limit of 128 MiB (cgroup /job)" in sentence


def test_a_memory_limit_below_what_the_context_needs(refused, small_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: memory.MemoryLimit("cgroup /job", 128 << 20, 150 << 20))
    sentence = refused("run", small_moe, "-p", "x", "--ctx", "500000")
    assert "a context of 500224 tokens needs" in sentence and "the largest that fits has" in sentence


@pytest.mark.parametrize("budget", ["auto", "50%", "resident"])
def test_a_context_that_no_memory_holds_names_the_largest_that_fits(refused, small_moe: Path, budget: str) -> None:
    said = refused("run", small_moe, "-p", "x", "--budget", budget, "--ctx", 2000000000)
    assert re.search(r"a context of 2000000000 tokens needs .*: the largest that fits has (\d+) tokens "
                     r"\(--ctx \1, in Python n_ctx=\1\)$", said)
    said = refused("serve", small_moe, "--budget", budget, "--port", 0, "--", "-c", 2000000000)
    assert "a context of 2000000000 tokens needs" in said


def test_a_context_below_nothing(refused, small_moe: Path) -> None:
    assert "-c is -5, and must be 0 (as trained) or more" in refused(
        "serve", small_moe, "--budget", "50%", "--port", 0, "--", "-c", -5)


def test_a_prompt_longer_than_the_context(refused, small_moe: Path) -> None:
    said = refused("run", small_moe, "-p", "word " * 600, "--ctx", "256", "--budget", "50%")
    assert "room for 256: make it larger (--ctx N" in said


def test_a_prompt_file_that_is_absent(refused, small_moe: Path, tmp_path: Path) -> None:
    sentence = refused("run", small_moe, "-f", tmp_path / "no.txt")
    assert sentence == f"{tmp_path}/no.txt cannot be read: No such file or directory"


def test_a_script_that_is_absent(refused, tmp_path: Path) -> None:
    assert refused("exec", tmp_path / "no.py") == f"{tmp_path}/no.py: no such script"


def test_a_path_that_is_no_text(small_moe: Path, tmp_path: Path) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    directory.mkdir()
    (directory / "model.gguf").symlink_to(small_moe)
    packed = pyorch("pack", directory / "model.gguf", text=False)
    assert packed.returncode == 0 and packed.stdout.startswith(os.fsencode(directory)), packed.stderr
    assert pyorch("pack", directory / "model.gguf", "--check", text=False).returncode == 0


def test_a_name_so_long_that_no_sidecar_can_have_it(small_moe: Path, tmp_path: Path) -> None:
    model = tmp_path / f"{'x' * 245}.gguf"
    model.symlink_to(small_moe)
    assert main(["inspect", str(model)]) == 0


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="null character"):
        load(f"{tmp_path}/x\0.gguf")


def test_a_name_with_line_breaks_and_what_terminals_obey_stays_in_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "a\nb\x1b[2J.gguf")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a\\nb\\x1b[2J.gguf" in error


def test_names_in_a_model_stay_in_their_line(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its file and of its metadata, on a terminal too."""
    path = tmp_path / "a\nb\x1b[2J.gguf"
    write_dense_model(path)  # whose general.name is that of the file
    monkeypatch.chdir(tmp_path)
    for command in (["inspect", path.name], ["inspect", path.name, "--verbose"], ["models"]):
        assert main(command) == 0
        output = capsys.readouterr().out
        assert r"a\nb\x1b[2J" in output and "\x1b" not in output and "a\nb" not in output
    terminal = Terminal()
    show([Facts([("model", path.name)]), Table(("model",), [(path.name,)], left=("model",))], terminal.stream)
    shown = terminal.text()
    assert shown.count(r"a\nb\x1b[2J") == 2 and "\x1b[2J" not in shown
    assert main(["models", "rm", "--yes", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_an_unknown_policy(small_moe: Path) -> None:
    with pytest.raises(Exception, match='policy "random" is not known: use lru, lfu, finemoe or learned'):
        load(small_moe, budget="50%", policy="random")


def test_a_dense_model_runs_with_a_note(dense_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(dense_model), "-p", "abc", "-n", "4", "--temp", "0", "--ctx", "64"]) == 0
    assert "is a dense model: it has no experts to manage" in capsys.readouterr().err
    with load(dense_model, n_ctx=64) as model:
        assert model.engine is None and not model.layers and model.stats().experts is None


def test_shards_run_as_the_whole_file_does(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = split(small_moe, tmp_path / "split.gguf", max_tensors=60)
    texts = []
    for path in (small_moe, shards[0]):
        assert main(["run", str(path), "-p", "def main", "-n", "16", "--temp", "0", "--budget", "20%"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()


def test_the_process_works_after_every_refusal(small_moe: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copy(small_moe, broken)
    with broken.open("r+b") as file:
        file.truncate(100_000)
    for _ in range(3):
        assert main(["run", str(broken), "-p", "x"]) == 2
    with load(small_moe, budget="50%", n_ctx=64) as model:
        assert "".join(model.generate("import", max_tokens=4))


@pytest.mark.parametrize(("arguments", "reason"), [
    ((), "a command is needed"),
    (("run",), "the following arguments are required: MODEL"),
    (("run", "MODEL", "--bugdet", "4"), "arguments: --bugdet 4 (did you mean --budget?); pyorch run --help"),
    (("eval", "arc", "MODEL", "--data", "x", "--jsno"), "(did you mean --json?); pyorch eval arc --help shows"),
    (("serve", "MODEL", "--threads-batch", "4"), "(did you mean --threads?; flags of llama-server follow after --"),
    (("run", "MODEL", "-p", "x", "--fast"), "unrecognized arguments: --fast; pyorch run --help shows"),
    (("eval", "arc", "MODEL", "--data", "x", "--fast"), "--fast; pyorch eval arc --help shows"),
    (("pack", "MODEL", "--check"), "makes the pack that --check reads"),
    (("demo", "nowhere"), "nowhere does not exist: name the directory of a Hugging Face checkpoint"),
    (("run", "MODEL", "-p", "x", "-n", "0"), '"0" is not a whole number of 1 or more'),
    (("run", "MODEL", "-p", "x", "-n", "many"), '"many" is not a whole number of 1 or more'),
    (("run", "MODEL", "-p", "x", "--temp", "-1"), '"-1" is not a number of 0 or more'),
    (("run", "MODEL", "-p", "x", "--top-p", "nan"), '"nan" is not a number of 0 or more and of at most 1'),
    (("run", "MODEL", "-p", ""), "the prompt is empty"),
    (("run", "MODEL", "-p", "\udcff"), "the prompt is not UTF-8 text"),
    (("verify", "MODEL", "--tokens", "-3"), '"-3" is not a whole number of 0 or more'),
    (("inspect", "MODEL", "--ctx", "-1"), '"-1" is not a whole number of 1 or more'),
    (("serve", "MODEL", "--stats-every", "0"), '"0" is not a number above 0'),
    (("convert", "--json"), "HF_DIR and -o FILE are needed"),
    (("eval",), "the following arguments are required: KIND"),
])
def test_arguments_that_cannot_be(refused, small_moe: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*(small_moe if word == "MODEL" else word for word in arguments))
