"""Commands on damaged files work, or say in one sentence what is wrong: some hundred cases of scripts/fuzz.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz.py"


@pytest.mark.parametrize(("kind", "count"), [("gguf", 40), ("sidecar", 40), ("pack", 40), ("plan", 20),
                                             ("trace", 20), ("quantize", 8)])
def test_a_damaged_file_works_or_is_refused_in_a_sentence(kind: str, count: int) -> None:
    done = python(SCRIPT, kind, "--count", count)
    assert done.returncode == 0, done.stdout
    assert f"{count} cases, 0 of them break the rule" in done.stderr
