"""Commands on damaged files work, or say in one sentence what is wrong: some hundred cases of scripts/fuzz.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz.py"


# Kinds of as many cases share a process, which has everything imported.
@pytest.mark.parametrize(("count", "kinds"), [
    (40, ("gguf", "sidecar")), (8, ("pack", "plan", "trace")), (8, ("quantize",)),
])
def test_a_damaged_file_works_or_is_refused_in_a_sentence(count: int, kinds: tuple[str, ...]) -> None:
    done = python(SCRIPT, *kinds, "--count", count)
    assert done.returncode == 0, done.stdout
    assert f"{count * len(kinds)} cases, 0 of them break the rule" in done.stderr
