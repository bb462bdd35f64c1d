"""The command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import HANG_SECONDS, pyorch, python

from pyorch.cli import COMMANDS, main, make_parser, nested
from pyorch.cli.numbers import rate, share
from pyorch.llama.model import load
from pyorch.settings.budget import BENCH_BUDGETS, VERIFY_BUDGETS, Budget


def kinds(command: str) -> list[tuple[str, str]]:
    """Those of a command that has kinds, such as ("eval", "arc")."""
    return [(command, kind) for kind in nested(nested(make_parser([command]))[command])]


# What --help is asked of.
HELPED = [(command,) for command in COMMANDS] + [words for command in COMMANDS for words in kinds(command)]

# For each line a fork, which begins with nothing of ours.
_IMPORTED = """
import argparse, cffi, dataclasses, json, os, sys
before = set(sys.modules)
for words in map(json.loads, sys.stdin):
    if os.fork() == 0:
        output = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        found = None
        try:
            from pyorch.cli import main
            main(words)
        except SystemExit:
            found = sorted(set(sys.modules) - before)
        finally:
            os.write(output, json.dumps(found).encode() + b"\\n")
            os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported() -> Iterator[Callable[..., set[str]]]:
    """The modules that a command imports to show its help."""
    with subprocess.Popen([sys.executable, "-c", _IMPORTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          bufsize=1) as process:
        def ask(*words: str) -> set[str]:
            print(json.dumps([*words, "--help"]), file=process.stdin, flush=True)
            return set(json.loads(process.stdout.readline()))

        yield ask
        process.stdin.close()


def test_help_imports_no_command(imported: Callable[..., set[str]]) -> None:
    assert not {name for name in imported() if name.startswith("pyorch.cli.")}


@pytest.mark.parametrize("words", HELPED)
def test_help_of_a_command_imports_neither_other_packages_nor_the_runtime(
    words: tuple[str, ...], imported: Callable[..., set[str]]
) -> None:
    """numpy alone would take longer than all that is needed. The library, by cffi, lists what can be chosen."""
    modules = imported(*words)
    others = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert others <= {"pyorch", "cffi", "_cffi_backend", "pycparser"}
    parts = {".".join(name.split(".")[:2]) for name in modules if name.startswith("pyorch.")}
    assert parts <= {"pyorch.cli", "pyorch.cluster", "pyorch.convert", "pyorch.files", "pyorch.library",
                     "pyorch.settings", "pyorch.signals", "pyorch.sizes", "pyorch.errors", "pyorch.starting",
                     "pyorch._libs"}


@pytest.mark.parametrize("words", HELPED)
def test_every_command_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    usage, _, example = shown.partition("example:")
    assert f"usage: pyorch {' '.join(words)}" in " ".join(usage.split()) and f"pyorch {words[0]}" in example
    # A script's output is its own, and so is completion's; what a cluster does is asked of its status; the others have
    # kinds.
    silent = {("exec",), ("completion",), ("eval",), ("cluster",)}
    silent |= {("cluster", action) for action in ("up", "serve", "measure", "down")}
    assert "--json" in usage or words in silent


@pytest.mark.parametrize(("command", "budgets"), [("bench", BENCH_BUDGETS), ("verify", VERIFY_BUDGETS)])
def test_help_tells_the_budgets_that_are_compared(command: str, budgets: tuple[Budget, ...], capsys) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"(default: {','.join(map(str, budgets))}" in " ".join(capsys.readouterr().out.split())


def test_help_of_exec_leaves_threads_to_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["exec", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "compute with N threads (default: as many as the script asks for)" in shown


def test_help_begins_with_what_everybody_wants_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out.partition("\noptions:")[2]
    places = [shown.index(f"\n{words}") for words in ("  -p TEXT", "  --budget", "experts:", "  --policy", "lossy:")]
    assert places == sorted(places)


@pytest.mark.parametrize("words, screens", [([], 1), (["run"], 2), (["serve"], 2)])
def test_help_fits_on_a_screen_or_two(
    words: list[str], screens: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60 * screens
    where = shown.splitlines()[-1].partition("Documentation: ")[2]
    assert Path(where).is_file() if not words else not where


@pytest.mark.parametrize("command", [("run", "MODEL", "--lossy"), ("tune", "MODEL", "--lever")])
def test_keys_of_lossy_settings_are_listed_when_asked_for(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(key in shown for key in ("heaviest", "max_replaced (rho)", "min_entropy (tau)", "sacred"))


def test_help_tells_no_default_where_something_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = capsys.readouterr().out.partition("options:")[2].partition("--budget SIZE ")[2]
    assert text and "(default:" not in text.partition("--threads")[0]


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyz"]) == 2
    assert capsys.readouterr().err == 'pyorch: error: "xyz" is not a command; pyorch --help lists them all\n'
    assert main(["prepair", "--json"]) == 2
    assert '"prepair" is not a command: did you mean prepare?; pyorch --help' in capsys.readouterr().err
    assert main(["pull", "hf:x/y"]) == 2
    assert '"pull" is not a command: did you mean run hf:ORG/NAME?' in capsys.readouterr().err
    assert main(["ps"]) == 2
    assert '"ps" is not a command: did you mean models?' in capsys.readouterr().err
    assert main(["map"]) == 2
    assert '"map" is not a command: did you mean maps?' in capsys.readouterr().err
    assert main(["ma"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(("words", "sentence"), [
    ("bench m.gguf --repeat often", '--repeat: "often" is not a whole number of 1 or more;'),
    ("profile m.gguf --data d -o t --minutes long", '--minutes: "long" is not a number'),
    ("eval arc m.gguf --data d --speed-tokens 1.5", '--speed-tokens: "1.5" is not a whole number of 0 or more;'),
    ("tune m.gguf --data d --min-accuracy most", '"most" is not a share above 0 and at most 1, such as 0.5 or 50%;'),
    ("eval perplexity m.gguf --data d --cache-rate 150%", '"150%" is not a share above 0 and at most 1'),
    ("run m.gguf hello", 'unrecognized arguments: hello (a prompt follows after -p, as in -p "Once upon a time");'),
    ("serve m.gguf -np 4", "unrecognized arguments: -np 4 (flags of llama-server follow after --, as in -- -np 4);"),
    ("cluster up -np 4", "(flags of llama-server follow after --, as in -- -np 4);"),
])
def test_what_an_option_cannot_take_is_refused_in_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_shares_can_be_given_as_parts_of_a_hundred() -> None:
    assert share("95%") == share("0.95") == 0.95 and share("100%") == share("1") == 1


def test_rates_are_bytes_a_second() -> None:
    assert rate("1GB/s") == 1e9 and rate("512MiB/S") == 512 << 20 and rate("1000") == 1000
    for text in ("40%", "-1GB/s", "0", "1 GB/min"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not understood"):
            rate(text)


def test_a_bare_number_as_a_budget_is_told_from_a_share(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(small_moe), "-p", "x", "--budget", "40"]) == 2
    assert capsys.readouterr().err.endswith("or more; as a share of the experts it is 40%\n")


def test_run_streams_text_to_stdout_and_statistics_to_stderr(
    small_moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(small_moe), "-p", "import os", "-n", "8", "--budget", "25%", "--temp", "0", "--ctx", "128"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    for word in ("prefill", "decode", "tok/s", "hit rate", "read per token", "budget   3072 KiB", "memory"):
        assert word in printed.err
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == printed.out.removesuffix("\n")
    assert result["stats"]["experts"]["misses"] > 0 and set(result["stats"]["layers"]) == {str(il) for il in range(8)}


def test_a_model_that_has_not_run_has_rates_of_zero(small_moe: Path) -> None:
    with load(small_moe, budget="50%") as model:
        stats = model.stats()
        assert model.llama.n_ctx() == 1024  # what it was trained with
    assert (stats.prefill_tokens, stats.prefill_rate, stats.decode_tokens, stats.decode_rate) == (0, 0, 0, 0)
    assert stats.bytes_read_per_token == 0 and stats.experts.hit_rate != stats.experts.hit_rate


def test_a_seed_makes_sampling_repeatable(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        main(["run", str(small_moe), "-p", "def ", "-n", "12", "--temp", "1.5", "--seed", str(seed), "--budget", "50%"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_chat_answers_every_line_until_the_input_ends(small_moe: Path) -> None:
    done = pyorch("run", small_moe, "--chat", "-n", "4", "--budget", "50%", input="import os\nprint\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("> ") == 3 and done.stdout.count("\n") >= 2


def test_a_header_without_weights_is_told(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = tmp_path / "header.gguf"
    with small_moe.open("rb") as whole, header.open("wb") as file:
        file.write(whole.read(1 << 20))
        file.truncate(small_moe.stat().st_size)
    assert main(["inspect", str(header)]) == 0
    assert "a header without weights" in capsys.readouterr().out
    assert main(["models", "list", str(tmp_path)]) == 0
    assert "qwen2moe, without weights" in capsys.readouterr().out


def test_inspect_tells_what_the_file_holds(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_moe.with_name("small-moe.buddies.gguf").touch()
    assert main(["inspect", str(small_moe), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["arch"], report["n_moe_layers"], report["n_expert"], report["n_expert_used"]) == (
        "qwen2moe",
        8,
        64,
        6,
    )
    assert report["expert_bytes"] == 3 * 128 * 32 * 2 and report["experts_bytes"] == 8 * 64 * report["expert_bytes"]
    assert report["file_bytes"] == small_moe.stat().st_size > report["experts_bytes"] + report["dense_bytes"]
    assert report["kv_cache_bytes"] == 1024 * 8 * 2 * (32 + 32) * 2  # tokens (as trained), layers, heads, K and V, F16
    assert report["sidecars"] == {"buddies": str(small_moe.with_name("small-moe.buddies.gguf"))}
    small_moe.with_name("small-moe.buddies.gguf").unlink()
    assert main(["inspect", str(small_moe)]) == 0
    assert "64 a layer, 6 used for a token, 24 KiB each (bf16)" in capsys.readouterr().out


def test_verify_says_bit_identical_at_every_budget(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(small_moe), "--budget", "13%,60%", "--tokens", "8"]) == 0
    assert capsys.readouterr().out.count("are bit-identical to the resident model's") == 2


def test_verify_finds_a_single_wrong_bit(
    small_moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyorch.eval import verify

    decoded = verify.decoded

    def one_bit_off(model, prompt, n_tokens, n_threads, on_token, chosen=None):
        tokens, logits = decoded(model, prompt, n_tokens, n_threads, on_token, chosen)
        if chosen is not None:  # by the model that is compared
            logits.view("u4")[20, 7] ^= 1
        return tokens, logits

    monkeypatch.setattr(verify, "decoded", one_bit_off)
    assert main(["verify", str(small_moe), "--budget", "60%", "--tokens", "4", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert (
        not report["identical"]
        and report["first_difference"]["position"] == 20
        and report["first_difference"]["token"] == 7
    )
    assert report["top1_agreement"] == 1 and 0 < report["max_abs_difference"] < 1e-5


def test_output_to_a_full_disk_is_an_error_in_a_sentence(small_moe: Path) -> None:
    with open("/dev/full", "w") as full:
        done = pyorch("inspect", small_moe, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (2, "pyorch: error: the output: No space left on device\n")


def test_a_closed_pipe_is_quiet(small_moe: Path) -> None:
    command = f"{sys.executable} -m pyorch run {small_moe} -p import -n 200 --temp 1 --budget 50% | head -c 1"
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True,
                          timeout=HANG_SECONDS)
    assert (done.returncode, done.stderr) == (141, b"")  # as of a program that the signal ends


def test_descriptors_that_are_closed_lead_nowhere(small_moe: Path, tmp_path: Path) -> None:
    """A file that is opened next must not get what was meant for them."""
    command = f"{sys.executable} -m pyorch pack {small_moe} -o {tmp_path / 'out.experts.gguf'} >&- 2>&- <&-"
    assert subprocess.run(command, shell=True, timeout=HANG_SECONDS).returncode == 0
    assert pyorch("pack", small_moe, "--check", "-o", tmp_path / "out.experts.gguf").returncode == 0
    command = f"{sys.executable} -m pyorch run {small_moe} -p import -n 2 --budget 50% 2>&-"
    printed = subprocess.run(command, shell=True, timeout=HANG_SECONDS, capture_output=True, text=True)
    assert printed.returncode == 0 and "tok/s" not in printed.stdout


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_moe: Path) -> None:
    from pyorch.llama.model import Model

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "generate", interrupted)
    assert main(["run", str(small_moe), "-p", "x", "--budget", "50%"]) == 130
    assert capsys.readouterr().err == ""


def test_llama_cpp_is_silent_unless_its_log_is_asked_for(small_moe: Path) -> None:
    """Its log and its warnings go to the descriptors, past Python."""
    command = ("run", small_moe, "-p", "import os", "-n", "4", "--temp", "0", "--budget", "50%", "--threads", "1")
    quiet, verbose = pyorch(*command), pyorch(*command, "--verbose")
    said = [line.split()[0] for line in quiet.stderr.splitlines()]
    assert said == ["prefill", "decode", "experts", "budget", "memory"]
    assert "llama_model_loader" in verbose.stderr and quiet.stdout == verbose.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_numpy_computes_on_one_thread_but_for_scripts_that_exec_runs(tmp_path: Path) -> None:
    count = "import os; n = len(os.listdir('/proc/self/task'))"
    program = f"{count}; import numpy; print(len(os.listdir('/proc/self/task')) - n)"
    script = tmp_path / "script.py"
    shown = "import os; print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    script.write_text(shown)
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    begin = "import sys; sys.argv = ['pyorch', 'completion', 'fish']; from pyorch.__main__ import main; main(); "
    for words, given, expected in ((("-c", begin + program), {}, "0"),
                                   (("-c", begin + shown), {"OPENBLAS_NUM_THREADS": "3"}, "3"),
                                   (("-m", "pyorch", "exec", str(script)), {}, "None")):
        done = python(*words, env=kept | given, check=True)
        assert done.stdout.splitlines()[-1] == expected, done.stderr
