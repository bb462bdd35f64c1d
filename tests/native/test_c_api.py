"""The C API, as a program in C99 sees it: native/tests/api/c_api.c."""

from __future__ import annotations

import subprocess
from pathlib import Path

from native_build import built_tests
from processes import HANG_SECONDS

from pyorch.library import choices


def test_a_c99_program_needs_nothing_but_the_headers(small_moe: Path) -> None:
    program = built_tests("c_api") / "bin" / "c_api"
    done = subprocess.run([program, small_moe], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr

    # What the program lists is what Python offers.
    lists = (choices.policies(), choices.predictors(), choices.speculation(),
             *(choices.substitution(setting) for setting in ("mode", "order", "miss")),
             choices.gatings())
    expected = [
        f"{number} {choice.name} {int(choice.needs)} {int(choice.uses)} {int(choice.executable)}"
        for number, of_one_kind in enumerate(lists) for choice in of_one_kind.values()
    ]
    assert done.stdout.splitlines() == expected
