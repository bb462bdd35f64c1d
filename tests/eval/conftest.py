"""What several modules of evaluation share."""

from __future__ import annotations

from pathlib import Path

import pytest
from buddy_lists import complete_buddies

from pyorch.runtime.model_map import ModelMap


@pytest.fixture(scope="session")
def buddies_file(small_moe: Path) -> Path:
    """Random lists of buddies: for what happens with them, not for how good they are."""
    path = small_moe.with_name("random.gguf")
    with ModelMap(small_moe) as model_map:
        complete_buddies().write(path, model_map)
    return path
