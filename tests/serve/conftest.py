from __future__ import annotations

from pathlib import Path

import pytest
from servers import ServerProcess


@pytest.fixture
def start(tmp_path: Path):
    """Starts servers, and ends those that the test leaves."""
    servers: list[ServerProcess] = []

    def start(command: list[str]) -> ServerProcess:
        servers.append(ServerProcess(command, tmp_path / f"{len(servers)}.log"))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()
