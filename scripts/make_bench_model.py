"""Makes a benchmark model of any size with the routing and the output of the small one.

Reads the GGUF of tests/fixtures/small-moe, or one that train_small_moe.py --upcycled made, and writes a wider one with
the same function (see widening.py). So a trained router selects experts of real sizes for real text, and the model's
output can be checked against the small one.

With --layers the model also becomes deeper: further layers before each layer route and compute as any other, and add
nothing to the hidden state, so the function stays the same. Predicting their experts is easier than in a real model,
because the hidden state stays the same from one of these layers to the next.

Example, a 4 GiB model with experts of about 6.5 MiB:
  pyorch convert tests/fixtures/small-moe -o small.gguf --outtype f32 --pre-tokenizer gpt-2
  python scripts/make_bench_model.py small.gguf -o bench.gguf --size 4GiB --type q4_0 --check
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from widening import Rule, Shape, rule_for, wide_shape, widen

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SMALLEST_BLOCK, K_BLOCK = 32, 256

WRITERS = ("attn_output.", "ffn_down_exps.", "ffn_down_shexp.")  # tensors that write to the hidden state
SILENT_STEP = 3  # distance between a layer and the layers whose copies precede it


class BadInput(Exception):
    """An error of the user, in a sentence; exit status 2."""


@dataclass(frozen=True)
class Recipe:
    """The type of each tensor: `base` for the matrices that determine the size, better ones for the others."""

    file_type: gguf.LlamaFileType
    base: Type
    output: Type  # output matrix and embedding: small here, and precision is worth its bytes
    more: Type  # attn_v and some ffn_down, as llama.cpp's quantizer does for *_K_M

    def type_of(self, name: str, n_dims: int, layer: int, n_layer: int) -> Type:
        if n_dims == 1 or "ffn_gate_inp" in name:
            return Type.F32  # norms, biases and routers are never quantized
        if name in ("output.weight", "token_embd.weight"):
            return self.output
        eighth = n_layer // 8
        favoured = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        if favoured and ("attn_v" in name or "ffn_down" in name):
            return self.more
        return self.base


RECIPES = {
    "q4_0": Recipe(gguf.LlamaFileType.MOSTLY_Q4_0, Type.Q4_0, Type.Q8_0, Type.Q4_0),
    "q4_k_m": Recipe(gguf.LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K, Type.Q6_K, Type.Q6_K),
    "q8_0": Recipe(gguf.LlamaFileType.MOSTLY_Q8_0, Type.Q8_0, Type.Q8_0, Type.Q8_0),
    "bf16": Recipe(gguf.LlamaFileType.MOSTLY_BF16, Type.BF16, Type.BF16, Type.BF16),
    "f32": Recipe(gguf.LlamaFileType.ALL_F32, Type.F32, Type.F32, Type.F32),
}


@dataclass(frozen=True)
class WideTensor:
    """A tensor of the wide model: its small original and its rule."""

    name: str
    small: np.ndarray  # float32 [n_expert, n_out, n_in], [n_out, n_in] or [n_in]
    rule: Rule
    shape: tuple[int, ...]
    type: Type

    @property
    def n_bytes(self) -> int:
        return n_bytes(self.shape, self.type)


class SmallModel:
    """The small GGUF: its metadata, and its weights in float32."""

    def __init__(self, path: Path):
        try:
            self.reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise BadInput(f"{path} cannot be read as GGUF: {error}") from None
        self.architecture = self.field("general.architecture")
        if self.architecture not in ("qwen2moe", "qwen3moe"):
            raise BadInput(f"{path} has architecture {self.architecture}; only qwen2moe and qwen3moe can be widened")
        for tensor in self.reader.tensors:
            try:
                rule_for(tensor.name, Shape(1, 1, 1, 1, 1, 1, 1))
            except KeyError:
                raise BadInput(f"{path} has a tensor {tensor.name}, which cannot be widened") from None
        self.n_layer = self.own("block_count")
        self.n_expert = self.own("expert_count")
        self.shape = Shape(
            n_embd=self.own("embedding_length"),
            n_head=self.own("attention.head_count"),
            n_ff_expert=self.own("expert_feed_forward_length"),
            n_ff_shared=self.own("expert_shared_feed_forward_length") if self.architecture == "qwen2moe" else 0,
            hidden=1, expert=1, shared=1,
        )

    def field(self, name: str):
        value = self.reader.get_field(name)
        if value is None:
            raise BadInput(f"the small model lacks the metadata {name}: convert it again from its checkpoint")
        return value.contents()

    def own(self, name: str):
        """Returns a field of the architecture."""
        return self.field(f"{self.architecture}.{name}")

    def deepened(self, n_layer: int) -> Iterator[tuple[str, gguf.ReaderTensor, bool]]:
        """Yields (name, original, whether it is zero) of every tensor of a model with n_layer layers, a multiple.

        Each layer comes after n_layer / self.n_layer - 1 silent ones: copies of other layers, whose routers therefore
        choose differently, with zeros for the two matrices that write to the hidden state.
        """
        repeats = n_layer // self.n_layer
        by_layer: dict[int, list[tuple[str, gguf.ReaderTensor]]] = {}
        for tensor in self.reader.tensors:
            match = re.match(r"blk\.(\d+)\.(.+)", tensor.name)
            if match is None:
                yield tensor.name, tensor, False
            else:
                by_layer.setdefault(int(match[1]), []).append((match[2], tensor))
        for layer in range(n_layer):
            own, place = divmod(layer, repeats)
            silent = place < repeats - 1
            source = (own + SILENT_STEP * (place + 1)) % self.n_layer if silent else own
            for short, tensor in by_layer[source]:
                yield f"blk.{layer}.{short}", tensor, silent and short.startswith(WRITERS)

    def outlines(self, recipe: Recipe, n_layer: int) -> list[tuple[str, tuple[int, ...], Type]]:
        """Returns (name, small shape, wide type) of every tensor."""
        outlines = []
        for name, tensor, _ in self.deepened(n_layer):
            small = tuple(int(n) for n in reversed(tensor.shape))
            layer = int(match[1]) if (match := re.match(r"blk\.(\d+)\.", name)) else -1
            outlines.append((name, small, recipe.type_of(name, len(small), layer, n_layer)))
        return outlines

    def tensors(self, shape: Shape, recipe: Recipe, n_layer: int) -> list[WideTensor]:
        wide = []
        outlines = self.outlines(recipe, n_layer)
        for (name, small_shape, kind), (_, tensor, zero) in zip(outlines, self.deepened(n_layer), strict=True):
            small = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            small = np.zeros_like(small) if zero else small
            rule = rule_for(name, shape)
            wide.append(WideTensor(name, small.reshape(small_shape), rule, wide_shape(rule, small_shape), kind))
        return wide


def parse_size(text: str) -> int:
    """Returns the bytes of "4GiB", "1.5GB" or "800MiB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]I?B|B|)", text.strip().upper())
    if not match:
        raise BadInput(f"size {text} is not understood: write a number and a unit, such as 4GiB or 800MB")
    return int(float(match[1]) * UNITS[match[2]])


def plan(small: SmallModel, recipe: Recipe, size: int, n_layer: int) -> tuple[Shape, list[WideTensor]]:
    """Returns the widths whose model comes nearest to `size` bytes, with similar hidden and expert width."""
    block = K_BLOCK if recipe.base == Type.Q4_K else SMALLEST_BLOCK
    base = small.shape
    outlines = small.outlines(recipe, n_layer)
    # Repeats that make a width a multiple of the quantization block.
    hidden_step, expert_step, shared_step = (
        block // math.gcd(block, width) for width in (base.n_embd, base.n_ff_expert, base.n_ff_shared)
    )
    candidates = []
    for hidden in range(hidden_step, 129, hidden_step):
        shared = math.ceil(hidden / shared_step) * shared_step
        square = max(expert_step, round(hidden * base.n_embd / base.n_ff_expert / expert_step) * expert_step)
        shape = replace(base, hidden=hidden, expert=square, shared=shared)
        total = wide_bytes(outlines, shape)
        slope = (wide_bytes(outlines, replace(shape, expert=square + expert_step)) - total) / expert_step
        expert = max(expert_step, round((square + (size - total) / slope) / expert_step) * expert_step)
        shape = replace(shape, expert=expert)
        # Two per cent of the size count as much as a ratio of 2 between the widths.
        score = abs(wide_bytes(outlines, shape) / size - 1) + 0.02 * abs(math.log2(expert / square))
        candidates.append((score, shape))
    shape = min(candidates, key=lambda candidate: candidate[0])[1]
    total = wide_bytes(outlines, shape)
    if not 0.8 < total / size < 1.25:
        raise BadInput(f"no widened model has {size / 2**20:.0f} MiB; the nearest one has {total / 2**20:.0f} MiB")
    return shape, small.tensors(shape, recipe, n_layer)


def wide_bytes(outlines: list[tuple[str, tuple[int, ...], Type]], shape: Shape) -> int:
    """Returns the bytes of all tensors after widening to `shape`."""
    return sum(n_bytes(wide_shape(rule_for(name, shape), small), kind) for name, small, kind in outlines)


def n_bytes(shape: tuple[int, ...], kind: Type) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * block_bytes


class Quantizer:
    """ggml's own quantization, so that every type has the same bits as from llama.cpp's tools."""

    def __init__(self, library: Path | None):
        if library is None:
            from pyorch import _libs

            library = _libs.lib_dir() / f"libggml-base{'.dylib' if sys.platform == 'darwin' else '.so'}"
        try:
            self._chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
        except OSError as error:
            raise BadInput(f"ggml cannot be loaded: {error}") from None
        self._chunk.restype = ctypes.c_size_t
        self._chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]

    def quantize(self, weight: np.ndarray, kind: Type, out: np.ndarray) -> None:
        """Writes float32 `weight` [..., n_in] as `kind` into the bytes `out`."""
        if kind == Type.F32:
            out[:] = weight.reshape(-1).view(np.uint8)
            return
        weight = np.ascontiguousarray(weight)
        n_in = weight.shape[-1]
        written = self._chunk(kind, weight.ctypes.data, out.ctypes.data, 0, weight.size // n_in, n_in, None)
        if written != out.nbytes:
            raise RuntimeError(f"ggml wrote {written} bytes of {kind.name} where {out.nbytes} were expected")


def widened_bytes(
    tensor: WideTensor, index: int, seed: int, quantizer: Quantizer, pool: ThreadPoolExecutor
) -> np.ndarray:
    """Returns the finished bytes of one tensor. Makes experts one by one, because float32 takes much memory."""
    matrices = tensor.small if tensor.small.ndim == 3 else tensor.small[None]
    out = np.empty((len(matrices), tensor.n_bytes // len(matrices)), dtype=np.uint8)

    def make(part: int) -> None:
        # The seed depends on the place, so the result does not depend on the order of threads.
        rng = np.random.Generator(np.random.SFC64([seed, index, part]))
        quantizer.quantize(widen(tensor.rule, matrices[part], rng), tensor.type, out[part])

    for _ in pool.map(make, range(len(matrices))):
        pass
    return out.reshape(-1)


def metadata(small: SmallModel, shape: Shape, recipe: Recipe, n_layer: int, name: str) -> Iterator[tuple]:
    """Yields (key, value, type, element type) of every field of the wide model."""
    feed_forward = small.own("feed_forward_length")
    expert_parameters = 3 * shape.n_embd * shape.hidden * shape.n_ff_expert * shape.expert * n_layer
    changed = {
        "general.name": name,
        "general.size_label": f"{small.n_expert}x{expert_parameters / 1e6:.1f}M",
        "general.file_type": int(recipe.file_type),
        f"{small.architecture}.block_count": n_layer,
        f"{small.architecture}.embedding_length": shape.n_embd * shape.hidden,
        f"{small.architecture}.feed_forward_length": feed_forward * shape.hidden,
        f"{small.architecture}.attention.head_count": shape.n_head * shape.hidden,
        f"{small.architecture}.expert_feed_forward_length": shape.n_ff_expert * shape.expert,
        f"{small.architecture}.expert_shared_feed_forward_length": shape.n_ff_shared * shape.shared,
    }
    for field in small.reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue  # the writer adds them
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        yield field.name, changed.get(field.name, field.contents()), field.types[0], element


def write_model(
    output: Path, architecture: str, fields: Iterator[tuple], tensors: list[WideTensor], seed: int,
    quantizer: Quantizer, threads: int,
) -> None:
    """Writes the GGUF under a temporary name, syncs it and renames it."""
    temporary = output.with_name(f".{output.name}.tmp")
    writer = gguf.GGUFWriter(temporary, architecture)
    for key, value, kind, element in fields:
        writer.add_key_value(key, value, kind, sub_type=element)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, tensor.type)
    total, done = sum(tensor.n_bytes for tensor in tensors), 0
    begun = shown = time.monotonic()
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with ThreadPoolExecutor(threads) as pool:
            for index, tensor in enumerate(tensors):
                writer.write_tensor_data(widened_bytes(tensor, index, seed, quantizer, pool))
                done += tensor.n_bytes
                if done == total or time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    print(f"{done / total:4.0%} of {total / 2**20:.0f} MiB, {shown - begun:.0f} s", file=sys.stderr)
        for file in writer.fout or []:
            file.flush()
            os.fsync(file.fileno())
        writer.close()
        os.replace(temporary, output)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def check_room(folder: Path, size: int) -> None:
    if not folder.is_dir():
        raise BadInput(f"folder {folder} does not exist: create it first")
    free = shutil.disk_usage(folder).free
    if free < size:
        raise BadInput(f"folder {folder} has {free / 2**20:.0f} MiB free, the model needs {size / 2**20:.0f} MiB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("small", type=Path, help="GGUF of the small model, best in f32 or bf16")
    add("-o", "--output", type=Path, required=True, help="GGUF to write")
    add("--size", default="4GiB", help="size of the file, such as 4GiB or 800MB (default: %(default)s)")
    add("--type", type=str.lower, default="q4_0", choices=sorted(RECIPES),
        help="type of the weights (default: %(default)s)")
    add("--layers", type=int, metavar="N",
        help="a multiple of the small model's number; added layers add nothing (default: the small model's)")
    add("--seed", type=int, default=1, help="of the random parts (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--ggml", type=Path, help="libggml-base to quantize with (default: the one of pyorch)")
    add("--check", action="store_true", help="then compare its logits with the small model's")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        recipe = RECIPES[arguments.type]
        small = SmallModel(arguments.small)
        n_layer = arguments.layers or small.n_layer
        if n_layer < 1 or n_layer % small.n_layer:
            raise BadInput(f"--layers {n_layer} is not a multiple of the {small.n_layer} of {arguments.small}")
        shape, tensors = plan(small, recipe, parse_size(arguments.size), n_layer)
        quantizer = Quantizer(arguments.ggml)
        total = sum(tensor.n_bytes for tensor in tensors)
        check_room(arguments.output.absolute().parent, total)
        expert_bytes = sum(t.n_bytes for t in tensors if "_exps." in t.name) / n_layer / small.n_expert
        print(
            f"hidden {shape.n_embd * shape.hidden}, experts {shape.n_ff_expert * shape.expert} wide "
            f"({expert_bytes / 2**20:.2f} MiB each), {total / 2**20:.0f} MiB of {arguments.type}",
            file=sys.stderr,
        )
        fields = metadata(small, shape, recipe, n_layer, f"bench {arguments.size} {arguments.type}")
        write_model(arguments.output, small.architecture, fields, tensors, arguments.seed, quantizer, arguments.threads)
        if arguments.check:
            from compare_models import compare

            result = compare(arguments.small, arguments.output)
            print(result)
            return 0 if result.agrees(arguments.type) else 1
    except BadInput as error:
        print(f"make_bench_model: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # numpy's message for a short write has no errno
        print(f"make_bench_model: {arguments.output} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
