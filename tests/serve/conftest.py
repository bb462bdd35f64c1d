from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from servers import ServerProcess, serve_models


@pytest.fixture(scope="module")
def folder(small_moe: Path, dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With three models, one of them damaged."""
    folder = tmp_path_factory.mktemp("models")
    os.link(small_moe, folder / "sparse.gguf")
    shutil.copyfile(dense_model, folder / "dense.gguf")
    (folder / "damaged.gguf").write_bytes(small_moe.read_bytes()[:5000])
    return folder


@pytest.fixture(scope="module")
def several(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server of the models in the folder."""
    server = ServerProcess(serve_models(folder), tmp_path_factory.mktemp("server") / "log")
    yield server
    server.stop()


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
