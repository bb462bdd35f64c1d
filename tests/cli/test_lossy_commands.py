"""Commands with lossy settings: asked for by flags or a tuned setting, named as lossy, refused in a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from buddy_lists import random_buddies
from processes import pyorch as pyorch_process

from pyorch.cli import main
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.tuned_setting import TunedSetting, write_tuned

PROMPT = "import os\n\ndef main():"


@pytest.fixture(scope="module")
def model(small_moe: Path, tmp_path_factory) -> Path:
    """The small model with buddy lists beside it."""
    path = tmp_path_factory.mktemp("lossy") / "model.gguf"
    os.link(small_moe, path)
    with ModelMap(path) as model_map:
        random_buddies(1).write(path.with_name("model.buddies.gguf"), model_map)
    return path


Command = Callable[..., SimpleNamespace]  # words to returncode: int; stdout, stderr: str


@pytest.fixture
def pyorch(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process."""

    def run(*words: object) -> SimpleNamespace:
        capsys.readouterr()
        returncode = main([str(word) for word in words])
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=returncode, stdout=printed.out, stderr=printed.err)

    return run


def test_run_says_what_was_substituted(pyorch: Command, model: Path):
    run = ("run", model, "-p", PROMPT, "-n", 24, "--budget", "25%", "--threads", 1, "--seed", 1, "--temp", 0)
    done = pyorch(*run, "--lossy", "rho=2")
    assert done.returncode == 0 and "lossy  " in done.stderr, done.stderr
    lossy = json.loads(pyorch(*run, "--lossy", "rho=2", "--json").stdout)["stats"]["substitution"]
    assert lossy["substituted"] > 0 and lossy["tokens"] > 0
    lossless = pyorch(*run)
    said = json.loads(pyorch(*run, "--json").stdout)
    assert "lossy" not in lossless.stderr and said["stats"]["substitution"] is None and said["device"] is None


@pytest.mark.parametrize("setting", [("--lossy", "mode=random"), ("--speculate", "--prefetch", "quasi-hidden")])
def test_verify_tells_the_cost_of_a_lossy_setting_and_that_bits_differ(
    pyorch: Command, model: Path, setting: tuple[str, ...]
):
    done = pyorch("verify", model, "--budget", "25%", "--threads", 1, *setting)
    assert done.returncode == 1, done.stderr
    assert "lossy" in done.stdout and "KL divergence" in done.stdout and "bit-identical" not in done.stdout


def test_bench_compares_lossy_with_lossless(pyorch: Command, model: Path):
    done = pyorch("bench", model, "--budget", "25%", "--lossy", "buddies", "--tokens", 8, "--prompt-tokens", 16,
                  "--repeat", 1, "--threads", 1)
    assert done.returncode == 0, done.stderr
    line, = (line for line in done.stdout.splitlines() if "same most probable token" in line)
    assert line.startswith("budget 25%, lossy buddies: decode") and "changed slots/token" in done.stdout


def test_exec_substitutes_in_a_script_that_knows_nothing_of_it(model: Path, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, llama_cpp\nfrom pyorch.llama import interception\n"
        "llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)\n"
        f"llm({PROMPT!r}, max_tokens=24)\n"
        "print(interception.find(llm.model).engine.substitution_stats().substituted)\n"
    )
    done = pyorch_process("exec", "--budget", "25%", "--lossy", "rho=2", script, model)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr


def test_a_tuned_setting_brings_its_setting_and_its_budget(pyorch: Command, model: Path, tmp_path: Path):
    tuned = TunedSetting("rho=1,tau=p10", "25%", 0.25, "acc_norm", 10, 0.8, 0.8, None, None, None, None)
    with ModelMap(model) as model_map:
        write_tuned(tmp_path / "tuned.json", tuned, model_map)
    run = ("run", model, "-p", PROMPT, "-n", 24, "--threads", 1, "--json", "--tuned", tmp_path / "tuned.json")
    stats = json.loads(pyorch(*run).stdout)["stats"]
    assert stats["substitution"]["substituted"] > 0
    with ModelMap(model) as model_map:
        assert stats["experts"]["budget_bytes"] == model_map.info.slots_bytes // 4
    other = json.loads(pyorch(*run, "--budget", "50%").stdout)["stats"]["experts"]
    assert other["budget_bytes"] == 2 * stats["experts"]["budget_bytes"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--lossy", "max_replaced=many"), 'max_replaced="many" is not a whole number'),
        (("--lossy", "cosine=1"), '"cosine" is not known'),
        (("--buddies-file", "x.gguf"), "such as --lossy buddies"),
        (("--lossy", "buddies", "--buddies-file", "nowhere.gguf"), "nowhere.gguf"),
        (("--tuned", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_a_mistake_gets_a_sentence(pyorch: Command, model: Path, flags: tuple[str, ...], sentence: str):
    done = pyorch("run", model, "-p", PROMPT, "-n", 1, "--budget", "50%", *flags)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_lists_that_are_missing_or_another_models_are_refused(
    pyorch: Command, model: Path, small_moe: Path, tmp_path: Path
):
    alone = tmp_path / "alone.gguf"
    os.link(small_moe, alone)
    done = pyorch("run", alone, "-p", PROMPT, "-n", 1, "--budget", "50%", "--lossy", "buddies")
    assert done.returncode == 2 and "pyorch buddies" in done.stderr
    damaged = tmp_path / "alone.buddies.gguf"
    damaged.write_bytes(model.with_name("model.buddies.gguf").read_bytes()[:2000])
    done = pyorch("run", alone, "-p", PROMPT, "-n", 1, "--budget", "50%", "--lossy", "buddies")
    assert done.returncode == 2 and "alone.buddies.gguf" in done.stderr and "Traceback" not in done.stderr


def test_exec_takes_what_run_takes(small_moe: Path, tmp_path: Path) -> None:
    """A tuned setting, expert maps that are learned, and threads, for a script that knows of none."""
    with ModelMap(small_moe) as model_map:
        write_tuned(tmp_path / "tuned.json", TunedSetting(
            "mode=random,rho=1", "30%", 0.3, "acc_norm", 10, 0.8, 0.8, None, None, None, None), model_map)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, llama_cpp\nfrom pyorch.llama import interception\n"
        "llm = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=2, verbose=False)\n"
        "llm('import os', max_tokens=8, temperature=0)\n"
        "settings = interception.find(llm.model).plan.settings\n"
        "print(settings.budget, settings.substitution, llama_cpp.llama_n_threads(llm.ctx))\n"
    )
    maps = tmp_path / "learned.gguf"
    done = pyorch_process("exec", "--tuned", tmp_path / "tuned.json", "--threads", "1", "--prefetch", "expert-map:1:1",
                  "--maps", maps, script, small_moe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["30%", "mode=random,max_replaced=1", "1"]
    with ModelMap(small_moe) as model_map:
        assert ExpertMaps.read(maps, model_map).n_maps > 0
