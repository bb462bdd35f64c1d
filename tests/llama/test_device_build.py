"""A build with CUDA, on a machine without a GPU: `make test-cuda-build`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from models import small_model

from pyorch import _libs
from pyorch.errors import PyorchError

CUDA = _libs.lib_dir() / f"libggml-cuda{_libs.SUFFIX}"

pytestmark = pytest.mark.skipif(not CUDA.exists(), reason="this build is without CUDA")


def test_kernels_of_cuda_are_loaded_and_say_that_no_gpu_is_there(small_moe: Path) -> None:
    assert ctypes.CDLL(str(CUDA)).ggml_backend_cuda_get_device_count() == 0
    with pytest.raises(PyorchError, match="no device CUDA0"):
        small_model(small_moe, "50%", device="CUDA0")
    with small_model(small_moe, "50%") as model:
        assert "".join(model.generate("import os", max_tokens=4, temperature=0))
