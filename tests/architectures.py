"""A small random model of every architecture: checkpoints of the real classes, converted and quantized."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

from pyorch.convert import children, quantization
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


def make_checkpoints(directory: Path, names: list[str]) -> None:
    """Makes directory/NAME for each name: about 15 MB, 4 MoE layers of 8 experts."""
    subprocess.run([sys.executable, CHECKPOINT_PROCESS, "make", directory, *names], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def logits_by_transformers(checkpoints: Path, sequences: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """float32[n_tokens, n_vocab] for a sequence of tokens of each checkpoint in the directory."""
    for name, sequence in sequences.items():
        (checkpoints / name / "tokens.json").write_text(json.dumps(sequence))
    subprocess.run([sys.executable, CHECKPOINT_PROCESS, "logits", checkpoints], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {name: np.load(checkpoints / name / "logits.npy") for name in sequences}


@lru_cache(maxsize=1)
def zoo_of(directory: Path, names: tuple[str, ...]) -> Zoo:
    """One for all test modules of a session. It is more than a gigabyte: nothing is kept for later."""
    atexit.register(shutil.rmtree, directory / "zoo", ignore_errors=True)
    return Zoo(directory / "zoo", [name for name in NAMES if name in names])


def asked_for(request) -> tuple[str, ...]:
    """The architectures that the selected tests are about, and those that tests about others use."""
    names = {item.callspec.params["name"] for item in request.session.items
             if hasattr(item, "callspec") and "name" in item.callspec.params}
    return tuple(sorted(names & set(NAMES) | {"olmoe", "mixtral"}))


class Zoo:
    """The models of some architectures in a directory. Types are made when they are asked for."""

    def __init__(self, directory: Path, names: list[str]):
        self._directory = directory
        self.names = names
        self.checkpoints = directory / "checkpoints"
        make_checkpoints(self.checkpoints, sorted({name.removesuffix("-fused") for name in names}))
        # All in one process: to start torch costs more than to convert.
        children.run_converter([self._job(name) for name in names])

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
        if not path.exists():
            quantize(plain, path, quantization.file_type(TYPES[type_name]).value, pure=True)
        return path


def tokens(n: int, seed: int = 0) -> list[int]:
    """Ids that are no special tokens."""
    return np.random.default_rng(seed).integers(8, 376, n).tolist()
