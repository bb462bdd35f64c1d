"""Every script that measures or takes pictures says what it wants, and does nothing then."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python

SCRIPTS = Path(__file__).parents[2] / "scripts"
MEASURING = sorted(path.name for path in SCRIPTS.glob("measure_*.py"))


@pytest.mark.parametrize("script", ["live_view_picture.py", *MEASURING])
def test_help_is_shown(script: str) -> None:
    done = python(SCRIPTS / script, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and done.stderr == ""
