"""A device that one file of tests shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from devices import DeviceProcess


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    process = DeviceProcess(tmp_path_factory.mktemp("device") / "log")
    yield process
    process.stop()
