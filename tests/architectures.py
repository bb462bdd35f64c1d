"""A small random model of every architecture: checkpoints of the real classes, converted and quantized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from shared import with_torch

from pyorch.convert import quantization
from pyorch.convert.checkpoint import open_checkpoint
from pyorch.convert.quantize_process import quantize

NAMES = (
    "mixtral", "qwen2-moe", "qwen3-moe", "qwen3-next", "olmoe", "deepseek-v2", "deepseek-v3", "gpt-oss",
    "gpt-oss-mxfp4", "phimoe", "granite-moe", "granite-moe-hybrid", "glm4-moe", "dots1", "ernie4.5-moe", "llama4",
    "dbrx", "jamba",
    "qwen3-next-fused",  # gate and up in one matrix, as the converter makes it when asked to
)

# The type of every matrix, by llama.cpp's name for the recipe. Q4_K_S is Q4_K alone when it is pure.
TYPES = {"F32": "F32", "BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K_S", "MXFP4": "MXFP4_MOE"}

CHECKPOINT_PROCESS = Path(__file__).with_name("checkpoint_process.py")


def types_of(name: str) -> tuple[str, ...]:
    """Experts that are in MXFP4 already stay so: a wider type would add nothing."""
    return ("MXFP4",) if name.endswith("-mxfp4") else tuple(TYPES)


def logits_by_transformers(checkpoints: Path, sequences: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """float32[n_tokens, n_vocab] for a sequence of tokens of each checkpoint in the directory."""
    for name, sequence in sequences.items():
        (checkpoints / name / "tokens.json").write_text(json.dumps(sequence))
    with_torch(CHECKPOINT_PROCESS, "logits", checkpoints)
    return {name: np.load(checkpoints / name / "logits.npy") for name in sequences}


def asked_for(items: list[pytest.Item]) -> tuple[str, ...]:
    """The architectures that the selected tests are about, and those that tests about others use."""
    names = {item.callspec.params["name"] for item in items
             if hasattr(item, "callspec") and "name" in item.callspec.params}
    return tuple(name for name in NAMES if name in names | {"olmoe", "mixtral"})


class Zoo:
    """The models of some architectures in a directory. Types are made when they are asked for."""

    def __init__(self, directory: Path, names: tuple[str, ...]):
        self._directory = directory
        self.names = names
        self.checkpoints = directory / "checkpoints"

    def make_checkpoints(self) -> list[dict]:
        """About 15 MB each, 4 MoE layers of 8 experts. Returns what converts them, for run_converter()."""
        with_torch(
            CHECKPOINT_PROCESS, "make", self.checkpoints, *sorted({name.removesuffix("-fused") for name in self.names})
        )
        return [self._job(name) for name in self.names]

    def _job(self, name: str) -> dict:
        checkpoint = self.checkpoints / name.removesuffix("-fused")
        return {
            "checkpoint": str(checkpoint), "output": str(self._directory / f"{name}.gguf"), "outtype": "f32",
            "pre_tokenizer": "gpt-2", "has_mtp": open_checkpoint(checkpoint).has_mtp,
            "options": ["--fuse-gate-up-exps"] if name.endswith("-fused") else [],
        }

    def path(self, name: str, type_name: str) -> Path:
        plain = self._directory / f"{name}.gguf"
        if type_name == types_of(name)[0]:  # as it was converted
            return plain
        path = self._directory / f"{name}-{type_name}.gguf"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                quantize(plain, path, quantization.file_type(TYPES[type_name]).value, pure=True)
        return path
