"""GGUF files made by hand, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np


def write_dense_model(
    path: Path, n_layer: int = 2, n_embd: int = 64, n_head: int = 4, n_ff: int = 128, template: str = "",
    infills: bool = False,
) -> None:
    """A random Llama whose vocabulary is the bytes.

    template: of its chats. infills: it has tokens for what is before, after and between two texts.
    """
    writer = _writer(path, "llama", n_layer, n_embd, n_head)
    if template:
        writer.add_chat_template(template)
    for i, name in enumerate(("pre", "suf", "mid") if infills else ()):
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", 1 + i)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count_kv(n_head // 2)
    add = _tensors(writer, n_embd)
    for il in range(n_layer):
        add(f"blk.{il}.attn_norm.weight", n_embd)
        add(f"blk.{il}.ffn_norm.weight", n_embd)
        add(f"blk.{il}.attn_q.weight", n_embd, n_embd)
        add(f"blk.{il}.attn_k.weight", n_embd // 2, n_embd)
        add(f"blk.{il}.attn_v.weight", n_embd // 2, n_embd)
        add(f"blk.{il}.attn_output.weight", n_embd, n_embd)
        add(f"blk.{il}.ffn_gate.weight", n_ff, n_embd)
        add(f"blk.{il}.ffn_up.weight", n_ff, n_embd)
        add(f"blk.{il}.ffn_down.weight", n_embd, n_ff)
    _finish(writer)


def write_moe_model(
    path: Path, n_layer: int = 3, n_embd: int = 64, n_head: int = 4, n_expert: int = 8, gating: bool = True
) -> None:
    """A random dots1 of half a megabyte, one dense layer before those with experts; its vocabulary is the bytes.

    gating: it says which gating function its routers have, as llama.cpp wants to know.
    """
    writer = _writer(path, "dots1", n_layer, n_embd, n_head)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count_kv(n_head)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_feed_forward_length(n_embd // 2)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(2.5)
    if gating:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    add = _tensors(writer, n_embd)
    for il in range(n_layer):
        add(f"blk.{il}.attn_norm.weight", n_embd)
        add(f"blk.{il}.ffn_norm.weight", n_embd)
        add(f"blk.{il}.attn_q_norm.weight", n_embd // n_head)
        add(f"blk.{il}.attn_k_norm.weight", n_embd // n_head)
        for name in ("q", "k", "v", "output"):
            add(f"blk.{il}.attn_{name}.weight", n_embd, n_embd)
        if il:
            add(f"blk.{il}.ffn_gate_inp.weight", n_expert, n_embd)
        dense, sparse = [("", 2 * n_embd, ())], [("_shexp", n_embd // 2, ()), ("_exps", n_embd // 2, (n_expert,))]
        for kind, n_ff, first in sparse if il else dense:
            add(f"blk.{il}.ffn_gate{kind}.weight", *first, n_ff, n_embd)
            add(f"blk.{il}.ffn_up{kind}.weight", *first, n_ff, n_embd)
            add(f"blk.{il}.ffn_down{kind}.weight", *first, n_embd, n_ff)
    _finish(writer)


def write_latent_model(
    path: Path, blocks: str = "MEME*EME", top_k: tuple[int, ...] | int = (0, 4, 0, 2, 0, 6, 0, 3), n_latent: int = 64
) -> None:
    """A random Nemotron-H: blocks are recurrent (M), attention (*) or experts (E), whose input is narrower than the
    hidden state. top_k: of each block, or of all."""
    n_embd, n_head, n_expert, n_ff = 128, 2, 16, 64
    n_inner, n_state, n_groups, n_step, n_conv = 256, 32, 2, 4, 4
    writer = _writer(path, "nemotron_h_moe", len(blocks), n_embd, n_head)
    writer.add_head_count_kv([1 if block == "*" else 0 for block in blocks])
    writer.add_key_length(n_embd // n_head)
    writer.add_value_length(n_embd // n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_feed_forward_length([n_ff if block == "E" else 0 for block in blocks])
    writer.add_expert_feed_forward_length(n_ff)
    if isinstance(top_k, int):
        writer.add_expert_used_count(top_k)
    else:
        writer.add_array("nemotron_h_moe.expert_used_count", list(top_k))
    writer.add_expert_count(n_expert)
    writer.add_expert_shared_count(1)
    writer.add_expert_shared_feed_forward_length(n_ff)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_group_count(1)
    writer.add_moe_latent_size(n_latent)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_step)
    writer.add_ssm_group_count(n_groups)
    add = _tensors(writer, n_embd)
    for il, block in enumerate(blocks):
        name = f"blk.{il}"
        add(f"{name}.attn_norm.weight", n_embd)
        if block == "M":
            n_conv_in = n_inner + 2 * n_groups * n_state
            add(f"{name}.ssm_in.weight", n_inner + n_conv_in + n_step, n_embd)
            add(f"{name}.ssm_conv1d.weight", n_conv_in, n_conv)
            add(f"{name}.ssm_conv1d.bias", n_conv_in)
            add(f"{name}.ssm_dt.bias", n_step)
            writer.add_tensor(f"{name}.ssm_a", np.full((n_step, 1), -1, np.float32))
            add(f"{name}.ssm_d", n_step, 1)
            add(f"{name}.ssm_norm.weight", n_groups, n_inner // n_groups)
            add(f"{name}.ssm_out.weight", n_embd, n_inner)
        elif block == "*":
            for part, n in (("q", n_embd), ("k", n_embd // n_head), ("v", n_embd // n_head)):
                add(f"{name}.attn_{part}.weight", n, n_embd)
            add(f"{name}.attn_output.weight", n_embd, n_embd)
        else:
            add(f"{name}.ffn_gate_inp.weight", n_expert, n_embd)
            add(f"{name}.exp_probs_b.bias", n_expert)
            add(f"{name}.ffn_latent_down.weight", n_latent, n_embd)
            add(f"{name}.ffn_latent_up.weight", n_embd, n_latent)
            add(f"{name}.ffn_up_exps.weight", n_expert, n_ff, n_latent)
            add(f"{name}.ffn_down_exps.weight", n_expert, n_latent, n_ff)
            add(f"{name}.ffn_up_shexp.weight", n_ff, n_embd)
            add(f"{name}.ffn_down_shexp.weight", n_embd, n_ff)
    _finish(writer)


def write_encoder_model(path: Path, n_layer: int = 4, n_embd: int = 64, n_expert: int = 8) -> None:
    """A random Nomic-BERT of which every second layer has experts: it makes embeddings, and no text."""
    n_ff = 2 * n_embd
    writer = _writer(path, "nomic-bert-moe", n_layer, n_embd, n_head=4)
    writer.add_feed_forward_length(n_ff)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(1)
    writer.add_moe_every_n_layers(2)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(2)
    add = _tensors(writer, n_embd, with_output=False)
    add("token_embd_norm.weight", n_embd)
    add("token_embd_norm.bias", n_embd)
    for il in range(n_layer):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{il}.{name}.weight", n_embd, n_embd)
        for name in ("attn_output_norm", "layer_output_norm"):
            add(f"blk.{il}.{name}.weight", n_embd)
            add(f"blk.{il}.{name}.bias", n_embd)
        if il % 2 == 1:
            add(f"blk.{il}.ffn_gate_inp.weight", n_expert, n_embd)
        name, first = ("_exps", (n_expert,)) if il % 2 == 1 else ("", ())
        add(f"blk.{il}.ffn_up{name}.weight", *first, n_ff, n_embd)
        add(f"blk.{il}.ffn_down{name}.weight", *first, n_embd, n_ff)
    _finish(writer)


def write_gemma4_model(path: Path, n_layer: int = 8, n_embd: int = 128, n_expert: int = 8, n_per_layer: int = 0
                       ) -> None:
    """A random Gemma 4 with experts. Every fourth layer sees all tokens, the others a window of 16. Layers that see all
    share `rope_freqs`, which the first ones lack; the last four have the keys and values of those before them.

    n_per_layer: width of what each layer has of the tokens for itself, 0: nothing.
    """
    n_head, n_full, n_window, n_ff, n_shared = 4, n_embd // 4, 16, 32, 4
    writer = _writer(path, "gemma4", n_layer, n_embd, n_head)
    sees_all = [il % 4 == 3 for il in range(n_layer)]
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count_kv(2)
    writer.add_key_length(n_full)
    writer.add_value_length(n_full)
    writer.add_key_length_swa(n_window)
    writer.add_value_length_swa(n_window)
    writer.add_rope_dimension_count_swa(n_window)
    writer.add_sliding_window(16)
    writer.add_sliding_window_pattern([not each for each in sees_all])
    writer.add_shared_kv_layers(n_shared)
    writer.add_embedding_length_per_layer_input(n_per_layer)
    writer.add_expert_feed_forward_length(n_ff)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(2)
    add = _tensors(writer, n_embd)
    add("rope_freqs.weight", n_full // 2)
    if n_per_layer:
        add("per_layer_token_embd.weight", 256, n_per_layer * n_layer)
        add("per_layer_model_proj.weight", n_per_layer * n_layer, n_embd)
        add("per_layer_proj_norm.weight", n_per_layer)
    for il, all_tokens in enumerate(sees_all):
        name, n = f"blk.{il}", n_full if all_tokens else n_window
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2",
                     "post_ffw_norm_1", "post_ffw_norm_2"):
            add(f"{name}.{norm}.weight", n_embd)
        add(f"{name}.attn_q.weight", n_head * n, n_embd)
        add(f"{name}.attn_q_norm.weight", n)
        add(f"{name}.attn_output.weight", n_embd, n_head * n)
        if il < n_layer - n_shared:
            for part in ("k", "v"):
                add(f"{name}.attn_{part}.weight", 2 * n, n_embd)
            add(f"{name}.attn_k_norm.weight", n)
        for part in ("gate", "up"):
            add(f"{name}.ffn_{part}.weight", 2 * n_embd, n_embd)
        add(f"{name}.ffn_down.weight", n_embd, 2 * n_embd)
        add(f"{name}.ffn_gate_inp.weight", n_expert, n_embd)
        add(f"{name}.ffn_gate_inp.scale", n_embd)
        add(f"{name}.ffn_gate_up_exps.weight", n_expert, 2 * n_ff, n_embd)
        add(f"{name}.ffn_down_exps.weight", n_expert, n_embd, n_ff)
        add(f"{name}.ffn_down_exps.scale", n_expert)
        if n_per_layer:
            add(f"{name}.inp_gate.weight", n_per_layer, n_embd)
            add(f"{name}.proj.weight", n_embd, n_per_layer)
            add(f"{name}.post_norm.weight", n_embd)
    _finish(writer)


def write_adapter(path: Path, model: Path, role: str, n_expert: int | None = None) -> None:
    """A random LoRA adapter of a model's tensors of a role. n_expert: for so many experts, in place of the model's."""
    reader = gguf.GGUFReader(model)
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for tensor in reader.tensors:
        if role in tensor.name:
            n_in, n_out, *experts = map(int, tensor.shape)
            experts = [n_expert] if experts and n_expert else experts
            for part, shape in (("a", (*experts, 4, n_in)), ("b", (*experts, n_out, 4))):
                values = random.standard_normal(shape).astype(np.float32) * 0.2
                writer.add_tensor(f"{tensor.name}.lora_{part}", values)
    _finish(writer)


def _writer(path: Path, arch: str, n_layer: int, n_embd: int, n_head: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(path.stem)
    writer.add_block_count(n_layer)
    writer.add_context_length(512)
    writer.add_embedding_length(n_embd)
    writer.add_head_count(n_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(n_embd // n_head)
    tokens = _byte_tokens()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    return writer


def _tensors(writer: gguf.GGUFWriter, n_embd: int, with_output: bool = True) -> Callable[..., None]:
    """A function that adds a random tensor by its name and shape. It has added the table of tokens, and unless the
    model makes no text, the output matrix."""
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape) if "norm" in name else random.normal(0, 0.1, shape)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", len(_byte_tokens()), n_embd)
    if with_output:
        add("output_norm.weight", n_embd)
        add("output.weight", len(_byte_tokens()), n_embd)
    return add


def as_smallthinker(source: Path, target: Path) -> None:
    """Copies a Mixtral, whose tensors are those of a SmallThinker: its routers see what comes before the attention."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "smallthinker")
    _copy_metadata(reader, writer, rename=("llama.", "smallthinker."))
    n_ff = next(tensor.shape[1] for tensor in reader.tensors if tensor.name == "blk.0.ffn_up_exps.weight")
    writer.add_expert_feed_forward_length(int(n_ff))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    _copy_tensors(reader, writer)
    _finish(writer)


def as_grovemoe(source: Path, target: Path) -> None:
    """Copies a Qwen3-MoE and gives each layer the experts that pairs of its experts share, in Q4_0: a token that picks
    both of a pair picks their shared one twice."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "grovemoe")
    _copy_metadata(reader, writer, rename=("qwen3moe.", "grovemoe."))
    n_embd, n_ff, n_expert = (
        int(reader.fields[f"qwen3moe.{key}"].contents())
        for key in ("embedding_length", "expert_feed_forward_length", "expert_count"))
    writer.add_expert_chunk_feed_forward_length(n_ff)
    writer.add_expert_group_scale(0.5)
    writer.add_experts_per_group(2)
    _copy_tensors(reader, writer)
    random = np.random.default_rng(0)
    for il in range(int(reader.fields["qwen3moe.block_count"].contents())):
        for name, shape in (("gate", (n_ff, n_embd)), ("up", (n_ff, n_embd)), ("down", (n_embd, n_ff))):
            values = random.normal(0, 0.06, (n_expert // 2, *shape)).astype(np.float32)
            writer.add_tensor(f"blk.{il}.ffn_{name}_chexps.weight", gguf.quants.quantize(
                values, gguf.GGMLQuantizationType.Q4_0), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    _finish(writer)


def with_next_token_block(source: Path, target: Path) -> None:
    """Copies a GLM-4 MoE and gives it a block that predicts the token after the next, as published ones have: a copy of
    its last block, with what such a block has beside. No decode executes it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "glm4moe")
    n_layer = int(reader.fields["glm4moe.block_count"].contents())
    n_embd = int(reader.fields["glm4moe.embedding_length"].contents())
    _copy_metadata(reader, writer, leave=("glm4moe.block_count", "glm4moe.nextn_predict_layers"))
    writer.add_block_count(n_layer + 1)
    writer.add_nextn_predict_layers(1)
    _copy_tensors(reader, writer)
    last, added = f"blk.{n_layer - 1}.", f"blk.{n_layer}."
    for tensor in reader.tensors:
        if tensor.name.startswith(last):
            writer.add_tensor(added + tensor.name.removeprefix(last), tensor.data, raw_shape=tensor.data.shape,
                              raw_dtype=tensor.tensor_type)
    writer.add_tensor(f"{added}nextn.eh_proj.weight", np.zeros((n_embd, 2 * n_embd), np.float32))
    for name in ("enorm", "hnorm"):
        writer.add_tensor(f"{added}nextn.{name}.weight", np.ones(n_embd, np.float32))
    _finish(writer)


def split(source: Path, target: Path, max_tensors: int) -> list[Path]:
    """Copies a GGUF into shards of at most max_tensors tensors. Returns them in order."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents(), split_max_tensors=max_tensors)
    _copy_metadata(reader, writer)
    _copy_tensors(reader, writer)
    _finish(writer)
    return sorted(target.parent.glob(f"{target.stem}-*-of-*.gguf"))


def _copy_metadata(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, leave: tuple[str, ...] = (), rename: tuple[str, str] = ("", "")
) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", *leave):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key.replace(*rename, 1), field.contents(), field.types[0], sub_type)


def _copy_tensors(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _byte_tokens() -> list[str]:
    """The characters that byte-level BPE writes bytes as."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
