"""SIGTERM leaves what Ctrl-C leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

from pyorch import files
from pyorch.signals import terminable


@pytest.fixture(autouse=True)
def sigterm_ends_the_process() -> Iterator[None]:
    """Whatever those before left it to do."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def test_sigterm_ends_the_block_and_means_afterwards_what_it_meant_before() -> None:
    ended = []
    with pytest.raises(SystemExit) as exit_, terminable():
        with terminable():  # the outer one ends too
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                ended.append("inner")
    assert exit_.value.code == 143 and ended == ["inner"] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_who_heeds_sigterm_already_goes_on_to() -> None:
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("here"))
    with terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ["here"]


def test_threads_write_files_too(tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: files.write_text(tmp_path / "written", "text"))
    thread.start()
    thread.join()
    assert (tmp_path / "written").read_text() == "text"


@pytest.mark.parametrize(("begin", "left"), [
    ("files.staging(path) as directory:\n    (directory / 'half').write_text('half')", []),
    ("files.continued(path) as (part, descriptor):\n    os.write(descriptor, b'half')", [".target.part"]),
])
def test_a_program_that_is_terminated_leaves_nothing_but_what_it_goes_on_with(
    tmp_path: Path, begin: str, left: list[str]
) -> None:
    program = (f"import os, signal\nfrom pathlib import Path\nfrom pyorch import files\n"
               f"path = Path({str(tmp_path)!r}) / 'target'\nwith {begin}\n    os.kill(os.getpid(), signal.SIGTERM)\n"
               "    raise AssertionError")
    done = python("-c", program)
    assert done.returncode == 143 and done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == left
