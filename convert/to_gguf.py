"""Converts a Hugging Face checkpoint, or a GGUF of another type, to a GGUF with llama.cpp's tools."""

from __future__ import annotations

import difflib
import glob
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as llama

from pyorch import files
from pyorch.convert import architectures, children, quantization
from pyorch.convert.checkpoint import open_checkpoint
from pyorch.convert.imatrix import read_imatrix
from pyorch.errors import FormatError, PyorchError
from pyorch.llama import logs, measure
from pyorch.runtime.model_map import ModelMap, shards_of

OnProgress = Callable[[str, int, int], None]  # "converting" or "quantizing", done, total

_TRIED_CTX = 32  # tokens of a context that is made to test the model
_SPLIT_SIZE = re.compile(r"[1-9][0-9]*[MG]")
_OF_SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5}\.gguf)$")


@dataclass(frozen=True)
class Conversion:
    """The written GGUF.

    Attributes:
        files: One, or the shards in order.
        architecture: The Hugging Face class. "": the source was a GGUF.
        file_type: Such as Q4_K_M; for auto, the converter's choice.
        n_bytes: Of all files.
    """

    files: tuple[Path, ...]
    architecture: str
    file_type: str
    n_bytes: int
    seconds: float

    @property
    def path(self) -> Path:
        """The file to load."""
        return self.files[0]


def convert(
    source: str | os.PathLike, target: str | os.PathLike, *, outtype: str = "auto", quantize: str | None = None,
    pure: bool = False, pre_tokenizer: str | None = None, split_max_size: str | None = None,
    imatrix: str | os.PathLike | None = None, verbose: bool = False, on_progress: OnProgress | None = None,
) -> Conversion:
    """Converts the checkpoint directory `source` to the GGUF `target`. A GGUF as `source` is quantized.

    `target` appears whole or not at all: files are made in a directory next to it, synced and renamed.

    Args:
        source: The checkpoint directory, or a GGUF.
        target: The GGUF. With split_max_size, the files have -00001-of-0000N in their names.
        outtype: bf16, f16, f32, q8_0, or auto for the 16-bit type that loses nothing.
        quantize: A name of quantization.names(), applied afterwards.
        pure: Quantize every matrix to exactly that type.
        pre_tokenizer: Used if llama.cpp does not recognize the checkpoint's.
        split_max_size: The largest shard, such as "4G" or "500M".
        imatrix: A file of llama.cpp's llama-imatrix, for the quantizer.
        verbose: Show the logs of llama.cpp's tools.
        on_progress: Called with the bytes done.

    Raises:
        FormatError: The source is damaged.
        PyorchError: An option is invalid, a tool failed, or the target cannot be written.
    """
    source, target = Path(source).expanduser().absolute(), Path(target).expanduser().absolute()
    begin = time.monotonic()
    kind = quantization.file_type(quantize) if quantize else None
    if imatrix is not None:
        if kind is None:
            raise PyorchError("an importance matrix is for quantizing: name the type with --quantize")
        imatrix = Path(imatrix).expanduser().absolute()
        read_imatrix(imatrix)
        files.check_no_source(target, [imatrix], "the importance matrix")
    if split_max_size and not _SPLIT_SIZE.fullmatch(split_max_size):
        raise PyorchError(f"{split_max_size} is not a size of shards: write it as 500M or 4G")
    outtype_bits = quantization.outtype_bits(outtype)
    if pre_tokenizer is not None and pre_tokenizer not in (known := architectures.known_pre_tokenizers()):
        meant = difflib.get_close_matches(pre_tokenizer, known, 1)
        raise PyorchError(f"{pre_tokenizer} is not a pre-tokenizer that llama.cpp knows"
                          f"{f': did you mean {meant[0]}?' if meant else ';'} --pre-tokenizer list shows all "
                          f"{len(known)} names")
    files.check_target(target)

    checkpoint = None
    if source.is_file() and source.suffix == ".gguf":
        if kind is None:
            raise PyorchError(f"{source} is a GGUF already: name the type to quantize it to with --quantize")
        shards = shards_of(source)
        for name in (target, *_shards_at(target, len(shards))):
            files.check_no_source(name, shards, "the file to quantize")
        need = _gguf_elements(source) * kind.bits_per_weight / 8
    else:
        checkpoint = open_checkpoint(source)
        need = checkpoint.n_elements * (outtype_bits + (kind.bits_per_weight if kind else 0)) / 8

    with files.staging(target) as staging:
        files.check_free_space(target.parent, int(need))
        converted, quantized = staging / "converted", staging / "quantized"
        try:
            made = [source]  # the one file, or the shards in their order
            if checkpoint is not None:
                converted.mkdir()
                job = {
                    "checkpoint": str(source), "output": str(converted / target.name),
                    "outtype": outtype, "options": ["--split-max-size", split_max_size] if split_max_size else [],
                    "pre_tokenizer": pre_tokenizer, "has_mtp": checkpoint.has_mtp,
                }
                children.run_converter([job], verbose=verbose,
                                       on_progress=on_progress and partial(on_progress, "converting"))
                made = sorted(converted.iterdir())
            if kind is not None:
                # llama.cpp appends the number of a shard and .gguf to a prefix
                name = target.stem if len(made) > 1 else target.name
                quantized.mkdir()
                job = {
                    "source": str(made[0]), "output": str(quantized / name),
                    "file_type": kind.value, "pure": pure, "keep_split": len(made) > 1,
                    "imatrix": None if imatrix is None else str(imatrix),
                }
                children.run_quantizer(job, verbose=verbose,
                                       on_progress=on_progress and partial(on_progress, "quantizing"))
                made = sorted(quantized.iterdir())
            n_bytes = sum(file.stat().st_size for file in made)
            with ModelMap(made[0]) as model_map:
                _check_loads(model_map, source)
                file_type = kind or quantization.by_value(model_map.metadata("general.file_type", int))
            published = files.publish(made, target.parent)
        except (OSError, children.WriteError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PyorchError(f"writing to {target.parent} failed: {reason}; nothing was left there") from None
    return Conversion(tuple(published), checkpoint.architecture if checkpoint else "", file_type.name, n_bytes,
                      time.monotonic() - begin)


def shards_beside(target: Path) -> list[Path]:
    """Returns the existing files that are named as shards of a target, of any number."""
    return sorted(target.parent.glob(f"{glob.escape(target.stem)}-{'[0-9]' * 5}-of-{'[0-9]' * 5}.gguf"))


def is_converted(path: Path) -> bool:
    """Returns whether convert() wrote a GGUF. Only the first shard has the key."""
    try:
        with ModelMap(_OF_SHARD.sub(r"-00001-of-\1", os.fspath(path))) as found:
            return found.metadata(children.MARK, str) is not None and not found.info.slim
    except FormatError:
        return False


def _shards_at(target: Path, n: int) -> list[Path]:
    """Returns llama.cpp's names for the shards of a target."""
    return [target.with_name(f"{target.stem}-{i + 1:05}-of-{n:05}.gguf") for i in range(n)]


def _check_loads(model_map: ModelMap, source: Path) -> None:
    """Raises FormatError if llama.cpp cannot load the file that its tools made, or make a context of it.

    The tools check neither that all keys exist nor that tensors have the keys' shapes. No weight is read.
    """
    model, context = llama.llama_model_default_params(), llama.llama_context_default_params()
    model.n_gpu_layers, context.n_ctx = 0, _TRIED_CTX
    logs.install()
    try:
        with measure.twin(model_map.path, model) as twin:
            measure.context_sizes(twin, context, model_map)
    except PyorchError as error:
        reason = str(error).removeprefix(f"{model_map.path}: ")
        raise FormatError(f"the file made of {source} is not complete: {reason}; nothing was left there") from None


def _gguf_elements(path: Path) -> int:
    """Counts the weights in a GGUF, including all shards."""
    with ModelMap(path) as model_map:  # checks lengths, which GGUFReader does not
        if model_map.info.slim:
            raise PyorchError(f"{path} is slim, its experts are in its pack: quantize the model that it was made of")
        n_elements = 0
        for shard in model_map.shards:
            try:
                n_elements += sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(shard).tensors)
            except OSError as error:
                raise FormatError(f"{shard} cannot be read: {error.strerror}") from None
            except (ValueError, IndexError, KeyError):
                raise FormatError(f"{shard} is damaged, incomplete or no GGUF") from None
    return n_elements
