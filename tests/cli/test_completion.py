"""Completion: what a shell is told, and that it understands the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_SECONDS

from pyorch.cli import COMMANDS, _parse, make_parser, with_nested
from pyorch.cli.completion import candidates
from pyorch.errors import PyorchError

# Completes the words behind it in a shell that is no terminal: a candidate in each line.
ASK = {
    "bash": 'eval "$(pyorch completion bash)"; COMP_WORDS=(pyorch "$@"); COMP_CWORD=$#; _pyorch 2>/dev/null;'
            'printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'pyorch completion fish | source; complete -C "pyorch $argv" | string split -f 1 \\t',
}


def names(*words: str) -> list[str]:
    return [name for name, _ in candidates(list(words))]


def test_commands_and_flags_are_completed() -> None:
    assert names("prep") == ["prepare"] and names("--config", "x.toml", "cal") == ["calibrate"]
    assert names("") == list(COMMANDS) and names("eval", "ar") == ["arc"] and names("nothing", "x") == []
    assert set(names("run", "m.gguf", "--bu")) == {"--buddies-file", "--budget", "--buffered"}
    assert names("pack", "m.gguf", "--layout", "") == ["plain", "native"]
    assert dict(candidates(["run", "--policy"]))["--policy"] == "eviction policy"
    with pytest.raises(PyorchError, match=r"required: bash\|zsh\|fish; pyorch completion --help"):
        _parse(["completion"])
    for words, _ in with_nested(make_parser(COMMANDS)):
        assert not words or "--help" in names(*words, "--")


def test_values_are_completed_that_are_known() -> None:
    assert {"lru", "lfu", "learned"} <= set(names("run", "m.gguf", "--policy", ""))
    assert names("bench", "m.gguf", "--policy", "lru,lear") == ["lru,learned"]
    assert names("convert", "x", "--quantize", "Q4_K") == ["Q4_K_M", "Q4_K_S"]
    assert names("run", "--prefetch", "quasi") == ["quasi-hidden"] and "heaviest" in names("run", "--lossy", "")
    assert names("eval", "arc", "m.gguf", "--lossy", "gh") == ["ghosts"]
    assert names("prepare", "m.gguf", "--only", "maps,pl") == ["maps,plan"]
    assert "qwen2" in names("convert", "x", "--pre-tokenizer", "qw")
    for words, parser in with_nested(make_parser(COMMANDS)):
        for flag in {"--policy", "--quantize", "--device", "--reads", "--cpus"} & parser._option_string_actions.keys():
            offered = names(*words, flag, "")
            assert offered and names(*words, flag, "zzz") == [], (words, flag)


def test_models_are_completed_where_one_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "hub/models--allenai--OLMoE-1B/snapshots/123/olmoe-q4.gguf"
    cached.parent.mkdir(parents=True)
    for path in (cached, tmp_path / "small.gguf", tmp_path / "small.maps.gguf", tmp_path / "small.txt"):
        path.touch()
    (tmp_path / "smaller").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert names("run", "--budget", "40%", "sm") == ["small.gguf", "smaller/"]
    assert names("inspect", "OLM") == ["OLMoE-1B"]
    assert names("config", "ser") == ["serve"] and names("config", "serve", "sm") == ["small.gguf", "smaller/"]
    assert names("config", "eval", "arc", "sm") == ["small.gguf", "smaller/"]
    assert names("config", "eval", "a") == ["arc"]
    assert names("models", "rm", "small.gguf", "sm") == ["small.gguf", "smaller/"]
    assert names("models", "rm", "hf:") == ["hf:allenai/OLMoE-1B"]
    assert names("run", "small.gguf", "") == names("run", "-p", "sm") == []


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_understands_its_script(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    ours = tmp_path / "pyorch"
    ours.write_text(f'#!/bin/sh\nexec {sys.executable} -m pyorch "$@"\n')
    ours.chmod(0o755)
    (tmp_path / "a model.gguf").touch()
    for words, expected in ((["verif"], {"verify"}), (["run", "--sy"], {"--system"}), (["run", "a"], {"a model.gguf"})):
        done = subprocess.run([program, "-c", ASK[shell], *(["bash"] if shell == "bash" else []), *words], cwd=tmp_path,
                              env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
                              capture_output=True, text=True, timeout=HANG_SECONDS)
        assert {line.replace("\\ ", " ") for line in done.stdout.splitlines()} == expected, done.stderr


def test_completing_loads_no_model_library() -> None:
    program = ("import sys; from pyorch.cli import main; main(['completion', 'words', 'run', '--']);"
               "print(sorted({'numpy', 'rich', 'llama_cpp', 'huggingface_hub', 'torch'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
