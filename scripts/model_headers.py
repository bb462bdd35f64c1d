"""Writes the header of a well-known model: a sparse GGUF of its shape and size that takes no disk.

For tools that need sizes only, such as pyorch advise and pyorch inspect. Such a file cannot compute: it has no
tokenizer, and all its weights are zeros.

    python scripts/model_headers.py qwen3-30b-a3b -o qwen3.gguf
    pyorch advise qwen3.gguf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

Types = gguf.GGMLQuantizationType


class Header:
    """A GGUF whose weights are holes. Tensors are added by name, type and shape, the slowest dimension first."""

    def __init__(
        self, path: Path, arch: str, n_layers: int, n_embd: int, n_head: int, n_head_kv: int, n_ctx: int
    ) -> None:
        self.n_layers = n_layers
        self.writer = gguf.GGUFWriter(path, arch)
        self._path, self._n_bytes = path, 0
        self._filled: list[tuple[int, Callable[[], np.ndarray]]] = []
        self.writer.add_name(path.stem)
        self.writer.add_block_count(n_layers)
        self.writer.add_context_length(n_ctx)
        self.writer.add_embedding_length(n_embd)
        self.writer.add_head_count(n_head)
        self.writer.add_head_count_kv(n_head_kv)
        self.writer.add_layer_norm_rms_eps(1e-6)

    def experts(self, n_expert: int, n_used: int, n_ff: int) -> None:
        self.writer.add_expert_count(n_expert)
        self.writer.add_expert_used_count(n_used)
        self.writer.add_expert_feed_forward_length(n_ff)
        self.writer.add_feed_forward_length(n_ff)

    def add(self, name: str, kind: Types, *shape: int, fill: Callable[[], np.ndarray] | None = None) -> None:
        """Adds a tensor. close() writes the values that `fill` returns; without it, the tensor is a hole."""
        if fill is not None:
            self._filled.append((self._n_bytes, fill))
        values, size = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(shape)) // values * size
        self.writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, kind)
        self._n_bytes += -(-n_bytes // 32) * 32

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        self.writer.close()
        with self._path.open("r+b") as file:
            data = -(-file.seek(0, 2) // 32) * 32
            file.truncate(data + self._n_bytes)
            for offset, fill in self._filled:
                file.seek(data + offset)
                file.write(fill().tobytes())


def _more_bits(il: int, n_layers: int) -> bool:
    """Whether Q4_K_M stores a layer's value and down matrices in Q6_K: first and last eighth, each third between."""
    return il < n_layers // 8 or il >= 7 * n_layers // 8 or (il - n_layers // 8) % 3 == 2


def around(header: Header, n_vocab: int, n_embd: int, table: Types, output: Types) -> None:
    header.add("token_embd.weight", table, n_vocab, n_embd)
    header.add("output_norm.weight", Types.F32, n_embd)
    header.add("output.weight", output, n_vocab, n_embd)


def olmoe(path: Path) -> Header:
    """Writes OLMoE-1B-7B in Q4_K_M."""
    n_embd, n_ff, n_expert = 2048, 1024, 64
    header = Header(path, "olmoe", 16, n_embd, 16, 16, 4096)
    header.experts(n_expert, 8, n_ff)
    around(header, 50304, n_embd, Types.Q4_K, Types.Q6_K)
    for il in range(header.n_layers):
        more = Types.Q6_K if _more_bits(il, header.n_layers) else Types.Q4_K
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            header.add(f"blk.{il}.{name}.weight", Types.F32, n_embd)
        for name, kind in (("q", Types.Q4_K), ("k", Types.Q4_K), ("v", more), ("output", Types.Q4_K)):
            header.add(f"blk.{il}.attn_{name}.weight", kind, n_embd, n_embd)
        experts(header, il, n_expert, n_ff, n_embd, Types.Q4_K, more)
    return header


def qwen3(path: Path) -> Header:
    """Writes Qwen3-30B-A3B in Q4_K_M."""
    n_embd, n_ff, n_expert, n_head, n_head_kv, head = 2048, 768, 128, 32, 4, 128
    header = Header(path, "qwen3moe", 48, n_embd, n_head, n_head_kv, 40960)
    header.experts(n_expert, 8, n_ff)
    header.writer.add_key_length(head)
    header.writer.add_value_length(head)
    header.writer.add_rope_freq_base(1e6)
    around(header, 151936, n_embd, Types.Q4_K, Types.Q6_K)
    for il in range(header.n_layers):
        more = Types.Q6_K if _more_bits(il, header.n_layers) else Types.Q4_K
        for name, size in (("attn_norm", n_embd), ("ffn_norm", n_embd), ("attn_q_norm", head), ("attn_k_norm", head)):
            header.add(f"blk.{il}.{name}.weight", Types.F32, size)
        header.add(f"blk.{il}.attn_q.weight", Types.Q4_K, n_head * head, n_embd)
        header.add(f"blk.{il}.attn_k.weight", Types.Q4_K, n_head_kv * head, n_embd)
        header.add(f"blk.{il}.attn_v.weight", more, n_head_kv * head, n_embd)
        header.add(f"blk.{il}.attn_output.weight", Types.Q4_K, n_embd, n_head * head)
        experts(header, il, n_expert, n_ff, n_embd, Types.Q4_K, more)
    return header


def gpt_oss(path: Path) -> Header:
    """Writes gpt-oss-20b, with experts in MXFP4."""
    n_embd, n_ff, n_expert, n_head, n_head_kv, head = 2880, 2880, 32, 64, 8, 64
    header = Header(path, "gpt-oss", 24, n_embd, n_head, n_head_kv, 131072)
    header.experts(n_expert, 4, n_ff)
    header.writer.add_key_length(head)
    header.writer.add_value_length(head)
    header.writer.add_sliding_window(128)
    header.writer.add_rope_freq_base(150000.0)
    around(header, 201088, n_embd, Types.Q8_0, Types.Q8_0)
    for il in range(header.n_layers):
        for name in ("attn_norm", "post_attention_norm"):
            header.add(f"blk.{il}.{name}.weight", Types.F32, n_embd)
        for name, rows, columns in (("q", n_head * head, n_embd), ("k", n_head_kv * head, n_embd),
                                    ("v", n_head_kv * head, n_embd), ("output", n_embd, n_head * head)):
            header.add(f"blk.{il}.attn_{name}.weight", Types.Q8_0, rows, columns)
            header.add(f"blk.{il}.attn_{name}.bias", Types.F32, rows)
        header.add(f"blk.{il}.attn_sinks.weight", Types.F32, n_head)
        experts(header, il, n_expert, n_ff, n_embd, Types.MXFP4, Types.MXFP4)
        header.add(f"blk.{il}.ffn_gate_inp.bias", Types.F32, n_expert)
        for name, rows in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
            header.add(f"blk.{il}.ffn_{name}_exps.bias", Types.F32, n_expert, rows)
    return header


def experts(header: Header, il: int, n_expert: int, n_ff: int, n_embd: int, kind: Types, down: Types) -> None:
    header.add(f"blk.{il}.ffn_gate_inp.weight", Types.F32, n_expert, n_embd)
    header.add(f"blk.{il}.ffn_gate_exps.weight", kind, n_expert, n_ff, n_embd)
    header.add(f"blk.{il}.ffn_up_exps.weight", kind, n_expert, n_ff, n_embd)
    header.add(f"blk.{il}.ffn_down_exps.weight", down, n_expert, n_embd, n_ff)


MODELS: dict[str, Callable[[Path], Header]] = {"olmoe-1b-7b": olmoe, "qwen3-30b-a3b": qwen3, "gpt-oss-20b": gpt_oss}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    MODELS[args.model](args.output).close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
