"""Reads the content of a Hugging Face checkpoint from its JSON and the heads of its weight files.

It finds missing, short and damaged files in milliseconds, before the converter starts, which needs torch. The
converter finds missing tensors.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pyorch.convert import architectures
from pyorch.errors import FormatError, PyorchError, because

# Bits per element of the safetensors dtypes that the converter reads.
_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}

# Quantizations of checkpoints that the converter reads (conversion/base.py).
READABLE = ("bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")

# The head of a safetensors file is JSON of some hundred bytes per tensor; a larger one is invalid.
_MAX_HEAD_BYTES = 100 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that the converter can read."""

    path: Path
    architecture: str  # the Hugging Face class, such as OlmoeForCausalLM
    n_elements: int  # of all weights; packed types (MXFP4 in U8) count by the byte
    file_bytes: int  # of all weight files
    has_mtp: bool  # layers that predict further tokens (MTP, NextN) may be among the weights


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads `path`/config.json and the heads of the weight files.

    Raises:
        FormatError: config.json or a weight file is missing or damaged.
        PyorchError: There is no such directory, or its architecture is unknown.
    """
    if not path.exists():
        raise PyorchError(f"{path} does not exist: name the directory of a Hugging Face checkpoint")
    if not path.is_dir():
        raise PyorchError(f"{path} is not a directory: name the directory of a Hugging Face checkpoint")
    if not (path / "config.json").is_file():
        raise FormatError(f"{path} has no config.json: it is not the directory of a Hugging Face checkpoint")
    config = _read_json(path / "config.json")
    architecture = architecture_of(config, str(path))
    files = _weight_files(path)
    elements: dict[str, int] = {}
    for file in files:
        if not os.access(file, os.R_OK):
            raise FormatError(f"{file} cannot be read: permission denied")
        elements.update(_safetensors_elements(file) if file.suffix == ".safetensors" else _torch_elements(file))
    return Checkpoint(path, architecture, sum(elements.values()), sum(file.stat().st_size for file in files),
                      _may_have_mtp(config, elements))


def _may_have_mtp(config: dict, names: Iterable[str]) -> bool:
    """Returns whether there are weights of layers that predict further tokens, regardless of num_nextn_predict_layers.

    They are named mtp, or come after the model's last layer. The names of the weights in a .bin are unknown.
    """
    n_layers = config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers")

    def is_mtp(name: str) -> bool:
        numbered = re.search(r"\blayers\.(\d+)\.", name)
        behind = numbered is not None and isinstance(n_layers, int) and int(numbered[1]) >= n_layers
        return behind or "mtp." in name or name.endswith(".bin")

    return any(map(is_mtp, names))


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise FormatError(f"{path} is not valid JSON: {because(error)}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


def architecture_of(config: dict, where: str) -> str:
    """Returns the class of a checkpoint. where: its name, for messages.

    Raises:
        FormatError: config.json names no class.
        PyorchError: The converter does not know the class, or cannot read its quantization.
    """
    names = config.get("architectures") or (config.get("text_config") or {}).get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise FormatError(f'{where}/config.json names no model class: it needs "architectures": ["...ForCausalLM"]')
    if names[0] not in architectures.known():
        close = difflib.get_close_matches(names[0], architectures.known(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise PyorchError(
            f"architecture {names[0]} is not one that llama.cpp's converter knows{hint}; "
            f"it knows these mixtures of experts: {', '.join(architectures.known_moe())}; "
            "`pyorch convert --list-architectures` prints all"
        )
    quantized = config.get("quantization_config") or {}
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method is not None and method not in READABLE:
        raise PyorchError(f"{where} is quantized with {method}, which llama.cpp's converter cannot read; it reads "
                          f"{', '.join(READABLE)} and checkpoints that are not quantized")
    return names[0]


def _weight_files(path: Path) -> list[Path]:
    """Returns the files that the converter will read: those of the index if there is one."""
    for prefix, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index_path = path / f"{prefix}{suffix}.index.json"
        if index_path.is_file():
            weight_map = _read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise FormatError(f'{index_path} has no "weight_map"')
            files = [path / name for name in sorted(set(weight_map.values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise FormatError(f"{path} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:4])}"
                                  f"{', ...' if len(missing) > 4 else ''}")
            return files
        files = sorted(path.glob(f"{prefix}*{suffix}"))
        if files:
            return files
    raise FormatError(f"{path} has no weights: neither model*.safetensors nor pytorch_model*.bin")


def _safetensors_elements(path: Path) -> dict[str, int]:
    """Counts the elements of each tensor in a safetensors file. FormatError: the head contradicts the file's size."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        head_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or head_bytes > min(_MAX_HEAD_BYTES, file_bytes - 8):
            raise FormatError(f"{path} is damaged: its {file_bytes} bytes do not begin with a safetensors header")
        try:
            head = json.loads(file.read(head_bytes))
            tensors = {name: entry for name, entry in head.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            elements = {}
            for name, entry in tensors.items():
                count = math.prod(entry["shape"])
                begin, stop = entry["data_offsets"]
                bits = _DTYPE_BITS.get(entry["dtype"])
                if bits is not None and stop - begin != count * bits // 8:
                    raise FormatError(f"{path} is damaged: tensor {name} of shape {entry['shape']} and type "
                                      f"{entry['dtype']} has {stop - begin} bytes")
                elements[name] = count
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise FormatError(f"{path} is damaged: its safetensors header cannot be read") from None
    if file_bytes != 8 + head_bytes + end:
        raise FormatError(f"{path} is damaged or incomplete: its header describes {8 + head_bytes + end} bytes, "
                          f"the file has {file_bytes}")
    return elements


def _torch_elements(path: Path) -> dict[str, int]:
    """Estimates the elements of the file with 16 bits each, because the exact numbers are in a pickle."""
    if not zipfile.is_zipfile(path):
        raise FormatError(f"{path} is damaged: it is not the zip archive that torch.save writes")
    return {path.name: path.stat().st_size // 2}
