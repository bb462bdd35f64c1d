"""Files that several commands are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch.cli import main


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("import os\nimport sys\n" * 40)
    return path


@pytest.fixture(scope="session")
def trace(small_moe: Path, text: Path) -> Path:
    """Of that text, with all that a trace can hold but for router inputs."""
    path = text.with_name("full.trace")
    command = ["profile", small_moe, "--data", text, "--router", "full", "--states", "--threads", 1, "-o", path]
    assert main([str(word) for word in command]) == 0
    return path
