"""What loading a model reads of its files: as the C API is asked, and as Python's audit events tell."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from conftest import small_model

import pyorch
from pyorch.runtime import model_map as model_maps
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.predictor import DefaultVectors, PredictorFile


class CountingLibrary:
    """The C API, and the files of which it was asked for a model map."""

    def __init__(self, library) -> None:
        self._library = library
        self.opened: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self._library, name)

    def pyorch_model_map_open(self, path: bytes, out) -> int:
        self.opened.append(os.fsdecode(path))
        return self._library.pyorch_model_map_open(path, out)


@pytest.fixture(scope="module")
def opened() -> Iterator[list[str]]:
    """The predictor files that Python opens, in order."""
    paths: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(".predictor.gguf"):
            paths.append(os.fspath(arguments[0]))

    sys.addaudithook(hook)
    yield paths


@pytest.fixture(scope="module")
def with_predictor(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model with default vectors beside it."""
    path = tmp_path_factory.mktemp("reads") / "model.gguf"
    shutil.copy(small_moe, path)
    with ModelMap(path) as model_map:
        n_embd = model_map.hparam("embedding_length")
        vectors = {layer.il: np.ones((layer.n_expert, n_embd), np.float32) for layer in model_map.layers}
        counts = {layer.il: np.ones(layer.n_expert, np.int64) for layer in model_map.layers}
        PredictorFile(DefaultVectors(vectors, counts, 1)).write(path.with_name("model.predictor.gguf"), model_map)
    return path


@contextmanager
def counted(opened: list[str], path: Path) -> Iterator[list[int]]:
    before = opened.count(str(path))
    result = [0]
    yield result
    result[0] = opened.count(str(path)) - before


def test_loading_reads_the_predictor_file_once(with_predictor: Path, opened: list[str]) -> None:
    sidecar = with_predictor.with_name("model.predictor.gguf")
    with ModelMap(with_predictor) as model_map, counted(opened, sidecar) as once:
        PredictorFile.read(sidecar, model_map)
    assert once[0] > 0
    with counted(opened, sidecar) as loading, small_model(with_predictor, "50%", prefetch="auto"):
        pass
    assert loading == once


def test_speculating_reads_the_predictor_file_once(with_predictor: Path, opened: list[str]) -> None:
    sidecar = with_predictor.with_name("model.predictor.gguf")
    with ModelMap(with_predictor) as model_map, counted(opened, sidecar) as once:
        PredictorFile.read(sidecar, model_map)
    with counted(opened, sidecar) as loading, small_model(with_predictor, "50%", speculate=True) as model:
        model.speculate(None)
        model.set_prefetch("quasi-hidden")
    assert loading == once


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "50%"},
        {"budget": "100%"},
        {"budget": "auto"},
        {"budget": "resident"},
        {"budget": "50%", "n_ubatch": 64},
    ],
)
def test_loading_reads_the_model_map_once(
    with_predictor: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CountingLibrary(model_maps.lib)
    monkeypatch.setattr(model_maps, "lib", library)
    with small_model(with_predictor, **options):
        assert library.opened.count(str(with_predictor)) == 1


def test_a_model_under_manage_has_its_map_read_once(with_predictor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = CountingLibrary(model_maps.lib)
    monkeypatch.setattr(model_maps, "lib", library)
    with pyorch.manage(budget="50%"):
        llama_cpp.Llama(str(with_predictor), n_ctx=64, verbose=False).close()
    assert library.opened.count(str(with_predictor)) == 1
