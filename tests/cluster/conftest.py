"""What tests of clusters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def private_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where clusters are is remembered in a directory of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
