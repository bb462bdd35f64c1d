"""The architectures of the packaged llama.cpp converter, read from its source, because importing it needs torch."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pyorch
from pyorch import _libs
from pyorch.errors import PyorchError

# Parts of class names that mark a mixture of experts; only for the list in a message.
_MOE_MARKS = (
    "moe", "mixtral", "afmoe", "arctic", "dbrx", "deepseekv2", "deepseekv3", "dots1", "gptoss", "grok1",
    "jamba", "kimilinear", "llama4forcausal", "minimax", "nemotronh", "qwen3next", "smallthinker", "step3p5",
)


def converter_dir() -> Path:
    """Returns the directory of convert_hf_to_gguf.py, conversion/ and gguf-py/."""
    # PYORCH_LIB_DIR may name a build's directory of libraries, which has no converter.
    homes = [_libs.lib_dir(), *(Path(home) / "lib" for home in pyorch.__path__)]
    for directory in (home / "llama.cpp-converter" for home in homes):
        if (directory / "convert_hf_to_gguf.py").is_file():
            return directory
    raise PyorchError(f"{homes[0]} lacks llama.cpp's converter: install pyorch again")


@lru_cache(maxsize=1)
def known() -> tuple[str, ...]:
    """Returns every Hugging Face class of a language model that converts, sorted."""
    source = (converter_dir() / "conversion" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "TEXT_MODEL_MAP":
            return tuple(sorted(ast.literal_eval(node.value)))
    raise PyorchError(f"{converter_dir()} does not say which architectures it knows: install pyorch again")


def known_moe() -> tuple[str, ...]:
    """Returns the known mixtures of experts that generate text."""
    causal = (name for name in known() if name.endswith("ForCausalLM") and "." not in name)
    return tuple(name for name in causal if any(mark in name.lower() for mark in _MOE_MARKS))


@lru_cache(maxsize=1)
def known_pre_tokenizers() -> tuple[str, ...]:
    """Returns the names of the pre-tokenizers (which split text before BPE), sorted, and llama.cpp's default."""
    source = (converter_dir() / "conversion" / "base.py").read_text(encoding="utf-8")
    return tuple(sorted({"default", *re.findall(r'^ +res = "([^"]+)"', source, re.MULTILINE)}))
