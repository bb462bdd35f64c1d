"""Makes random checkpoints of real Hugging Face classes, and computes with them. A program of its own.

It needs torch, which must not share a process with llama.cpp; tests/architectures.py starts it:

    python checkpoint_process.py make DIR NAME...     a checkpoint in DIR/NAME for each architecture
    python checkpoint_process.py logits DIR           DIR/NAME/logits.npy for each DIR/NAME/tokens.json
    python checkpoint_process.py routers DIR          DIR/NAME/routers.npy for each DIR/NAME/tokens.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

N_EXPERT = 8
VOCAB = 384
LAYERS = 4  # with routed experts, so that one layer's experts fit into 30 % of all

# 256: the block of a K-quant is 256 weights of one row.
_COMMON = dict(
    vocab_size=VOCAB, hidden_size=256, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, initializer_range=0.06, tie_word_embeddings=False,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
)
_EXPERTS = dict(moe_intermediate_size=256, num_experts_per_tok=3)

_LOCAL_EXPERTS = dict(intermediate_size=256, num_local_experts=N_EXPERT)
_MHA = dict(num_key_value_heads=4)

# A dense layer first, a shared expert
_DENSE_LEAD = dict(
    num_hidden_layers=LAYERS + 1, first_k_dense_replace=1, intermediate_size=512, n_routed_experts=N_EXPERT,
    n_shared_experts=1,
)
_MLA = dict(kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)

# name: configuration class of transformers, its arguments in the order in which later ones win
CONFIGS: dict[str, tuple[str, list[dict]]] = {
    "mixtral": ("MixtralConfig", [_COMMON, _LOCAL_EXPERTS, dict(num_experts_per_tok=2)]),
    "qwen2-moe": ("Qwen2MoeConfig", [
        _COMMON, _EXPERTS, dict(intermediate_size=512, num_experts=N_EXPERT, shared_expert_intermediate_size=256)]),
    "qwen3-moe": ("Qwen3MoeConfig", [
        _COMMON, _EXPERTS, dict(intermediate_size=512, num_experts=N_EXPERT, head_dim=64, norm_topk_prob=True)]),
    "qwen3-next": ("Qwen3NextConfig", [_COMMON, _EXPERTS, dict(
        intermediate_size=512, num_experts=N_EXPERT, head_dim=64, shared_expert_intermediate_size=256,
        norm_topk_prob=True, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64,
        linear_value_head_dim=64, full_attention_interval=2)]),
    "olmoe": ("OlmoeConfig", [
        _COMMON, _MHA, dict(intermediate_size=256, num_experts=N_EXPERT, num_experts_per_tok=3)]),
    # llama.cpp takes a model without q_lora_rank for V2-Lite by its 27 layers
    "deepseek-v2": ("DeepseekV2Config", [_COMMON, _MHA, _EXPERTS, _DENSE_LEAD, _MLA, dict(
        num_hidden_layers=27, first_k_dense_replace=27 - LAYERS, intermediate_size=64, q_lora_rank=None,
        topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)]),
    "deepseek-v3": ("DeepseekV3Config", [_COMMON, _MHA, _EXPERTS, _DENSE_LEAD, _MLA, dict(
        q_lora_rank=64, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        scoring_func="sigmoid", topk_method="noaux_tc")]),
    "gpt-oss": ("GptOssConfig", [
        _COMMON, _LOCAL_EXPERTS, dict(num_experts_per_tok=4, head_dim=64, sliding_window=32)]),
    "phimoe": ("PhimoeConfig", [_COMMON, _LOCAL_EXPERTS, dict(
        num_experts_per_tok=2, attention_bias=True, lm_head_bias=True, rope_scaling=dict(
            type="longrope", short_factor=[1.0] * 32, long_factor=[1.5] * 32, short_mscale=1.0, long_mscale=1.0,
            original_max_position_embeddings=512))]),
    "granite-moe": ("GraniteMoeConfig", [_COMMON, _LOCAL_EXPERTS, dict(
        num_experts_per_tok=3, embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.5,
        attention_multiplier=0.125)]),
    "granite-moe-hybrid": ("GraniteMoeHybridConfig", [_COMMON, _LOCAL_EXPERTS, dict(
        num_experts_per_tok=3, shared_intermediate_size=256, layer_types=["mamba", "attention"] * (LAYERS // 2),
        position_embedding_type="nope", mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128,
        mamba_chunk_size=32)]),
    # It claims a layer that predicts a further token, and has no weights of one.
    "glm4-moe": ("Glm4MoeConfig", [_COMMON, _EXPERTS, _DENSE_LEAD, dict(
        n_group=1, topk_group=1, norm_topk_prob=True, head_dim=64, routed_scaling_factor=1.0,
        num_nextn_predict_layers=1)]),
    "dots1": ("Dots1Config", [_COMMON, _MHA, _EXPERTS, _DENSE_LEAD, dict(
        n_group=1, topk_group=1, norm_topk_prob=True, head_dim=64, routed_scaling_factor=2.5, sliding_window=None,
        scoring_func="sigmoid")]),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", [_COMMON, dict(
        num_hidden_layers=LAYERS + 1, intermediate_size=512, moe_intermediate_size=256, moe_num_experts=N_EXPERT,
        moe_k=3, moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_interval=1)]),
    "llama4": ("Llama4TextConfig", [_COMMON, _LOCAL_EXPERTS, dict(
        intermediate_size_mlp=512, num_experts_per_tok=1, head_dim=64, interleave_moe_layer_step=1,
        attention_chunk_size=64)]),
    "dbrx": ("DbrxConfig", [dict(
        d_model=256, n_heads=4, n_layers=LAYERS, max_seq_len=512, vocab_size=VOCAB, initializer_range=0.06,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=256, moe_num_experts=N_EXPERT, moe_top_k=2))]),
    "jamba": ("JambaConfig", [_COMMON, dict(
        intermediate_size=256, num_hidden_layers=2 * LAYERS, num_experts=N_EXPERT, num_experts_per_tok=2,
        expert_layer_period=2, expert_layer_offset=1, attn_layer_period=4, attn_layer_offset=2,
        use_mamba_kernels=False, mamba_dt_rank=16, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)]),
}

# What the published checkpoints say where transformers' own class has another name.
_PUBLISHED_CLASS = {"phimoe": "PhiMoEForCausalLM"}

# Where the converter takes no other tokenizer than SentencePiece.
_SENTENCEPIECE = ("ernie4.5-moe", "jamba")

# Tokens that the converter looks for in some tokenizer or other.
_SPECIAL_TOKENS = ["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"]

# Its experts are stored in MXFP4, as the published ones are.
MXFP4_CHECKPOINT = "gpt-oss-mxfp4"


def make(directory: Path, name: str) -> None:
    import torch
    import transformers

    class_name, arguments = CONFIGS["gpt-oss" if name == MXFP4_CHECKPOINT else name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, class_name)(**{key: value for some in arguments for key, value in some.items()})
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Parameters that start at zero or one hide what is done to them: router biases, expert biases, norms.
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "e_score_correction" in n)]:
            if tensor.is_floating_point() and tensor.numel() > 1 and tensor.std() == 0:
                tensor.add_(torch.randn_like(tensor) * 0.05)
    path = directory / name
    model.to(torch.bfloat16).save_pretrained(path)
    (write_sentencepiece if name in _SENTENCEPIECE else write_tokenizer)(path)
    if name in _PUBLISHED_CLASS:
        _edit_config(path, architectures=[_PUBLISHED_CLASS[name]])
    if name == MXFP4_CHECKPOINT:
        _store_experts_as_mxfp4(path)


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE as GPT-2's: whatever text there is, it has tokens for it."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=_SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    wrapped = transformers.GPT2TokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    wrapped.add_special_tokens({"additional_special_tokens": _SPECIAL_TOKENS[1:]})
    wrapped.save_pretrained(path)


def write_sentencepiece(path: Path) -> None:
    import sentencepiece

    with (path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(Path(__file__).read_text(encoding="utf-8").splitlines()), model_writer=file,
            model_type="bpe", vocab_size=VOCAB, byte_fallback=True, minloglevel=2)


def _edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _store_experts_as_mxfp4(path: Path) -> None:
    """Replaces the experts by random blocks of 32 4-bit weights, each with a scale of 2**(scale - 127)."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n_expert, n_in, n_out = tensors.pop(name).shape
        shape = (n_expert, n_out, n_in // 32)
        tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _edit_config(path, quantization_config={"quant_method": "mxfp4"})


def write_logits(path: Path) -> None:
    """float32[n_tokens, n_vocab]: what follows each of the tokens."""
    import numpy as np
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.tensor([json.loads((path / "tokens.json").read_text())])
    with torch.inference_mode():
        np.save(path / "logits.npy", model(tokens, use_cache=False).logits[0].numpy())


def write_routers(path: Path) -> None:
    """float32[n_sequences, n_tokens, n_layers, n_expert]: the routers' logits for sequences of equal length."""
    import numpy as np
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.tensor(json.loads((path / "tokens.json").read_text()))
    with torch.inference_mode():
        routers = model(tokens, use_cache=False, output_router_logits=True).router_logits
    np.save(path / "routers.npy", torch.stack(routers, 1).reshape(*tokens.shape, len(routers), -1).numpy())


def main() -> None:
    command, directory, *rest = sys.argv[1:]
    if command == "make":
        for name in rest:
            make(Path(directory), name)
    else:
        for file in sorted(Path(directory).glob("*/tokens.json")):
            {"logits": write_logits, "routers": write_routers}[command](file.parent)


if __name__ == "__main__":
    main()
