"""The small models: their configurations, a fast expert kernel for training, and their checkpoints.

The trained model *is* `Qwen2MoeForCausalLM` or `Qwen3MoeForCausalLM`. Only the forward pass of the routed experts is
replaced, because the library's gathers and scatters per expert, and is several times slower for experts this small.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# The common settings of both models.
ALIKE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def small_config(vocab_size: int) -> Qwen2MoeConfig:
    """Returns a configuration with about 7.6 million parameters, of which 6.3 million are routed experts.

    Every matrix dimension is a multiple of 32 (the block of Q4_0 and Q8_0). The top-k probabilities are not
    renormalized and the output matrix is not tied to the embedding, as llama.cpp evaluates `qwen2moe`.
    """
    return Qwen2MoeConfig(
        vocab_size=vocab_size,
        intermediate_size=192,
        num_hidden_layers=8,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        norm_topk_prob=False,
        **ALIKE,
    )


def wide_config(vocab_size: int, n_experts: int, top_k: int) -> Qwen3MoeConfig:
    """Returns a configuration with experts of 256 neurons in 6 layers, without a shared expert.

    It has 0.8 million parameters, and 0.6 for each expert. With one expert it is a dense model: the probabilities of
    the selected experts are renormalized, so a single one has 1.
    """
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        intermediate_size=256,
        num_hidden_layers=6,
        head_dim=32,
        num_experts=n_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        **ALIKE,
    )


class GroupedExperts(torch.autograd.Function):
    """SwiGLU of small experts over rows sorted by expert: one matrix product per expert, no padding.

    rows [n_slots, hidden], gate_up [n_expert, 2*inter, hidden], down [n_expert, hidden, inter],
    counts: the number of consecutive rows of each expert. Returns [n_slots, hidden].
    """

    @staticmethod
    def forward(ctx, rows: Tensor, gate_up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
        projected = rows.new_empty(rows.shape[0], gate_up.shape[1])
        out = torch.empty_like(rows)
        spans = _spans(counts)
        for expert, span in spans:
            torch.mm(rows[span], gate_up[expert].t(), out=projected[span])
        gate, up = projected.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        hidden = gate * sigmoid * up
        for expert, span in spans:
            torch.mm(hidden[span], down[expert].t(), out=out[span])
        ctx.save_for_backward(rows, gate_up, down, projected, sigmoid, hidden)
        ctx.spans = spans
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        rows, gate_up, down, projected, sigmoid, hidden = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_hidden, grad_rows = torch.empty_like(hidden), torch.empty_like(rows)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        for expert, span in ctx.spans:
            torch.mm(grad_out[span], down[expert], out=grad_hidden[span])
            torch.mm(grad_out[span].t(), hidden[span], out=grad_down[expert])
        gate, up = projected.chunk(2, dim=-1)
        grad_gate = grad_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_projected = torch.cat([grad_gate, grad_hidden * gate * sigmoid], dim=-1)
        for expert, span in ctx.spans:
            torch.mm(grad_projected[span], gate_up[expert], out=grad_rows[span])
            torch.mm(grad_projected[span].t(), rows[span], out=grad_gate_up[expert])
        return grad_rows, grad_gate_up, grad_down, None


def _spans(counts: list[int]) -> list[tuple[int, slice]]:
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, slice(start, start + count)))
        start += count
    return spans


def grouped_forward(experts: nn.Module, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Replaces the forward of the library's experts: states [n_tokens, hidden], ids and weights [n_tokens, top_k]."""
    top_k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.gate_up_proj.shape[0]).tolist()
    tokens = torch.div(order, top_k, rounding_mode="floor")
    rows = states.index_select(0, tokens)
    out = GroupedExperts.apply(rows, experts.gate_up_proj, experts.down_proj, counts)
    out = out * weights.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(states).index_add(0, tokens, out)


class RouterTap:
    """Collects the routers' decisions of the last forward pass."""

    def __init__(self, model: PreTrainedModel):
        self.logits: list[Tensor] = []  # per layer [n_tokens, n_expert]
        self.ids: list[Tensor] = []  # per layer [n_tokens, top_k]
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._collect)

    def _collect(self, _module: nn.Module, _args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self.logits.append(output[0])
        self.ids.append(output[2])

    def clear(self) -> None:
        self.logits, self.ids = [], []

    def balance_loss(self) -> Tensor:
        """Returns the mean over layers of n_expert * sum(load * probability); 1 for even use of experts."""
        losses = []
        for logits, ids in zip(self.logits, self.ids, strict=True):
            n_expert = logits.shape[-1]
            load = torch.bincount(ids.flatten(), minlength=n_expert).to(logits.dtype) / ids.numel()
            losses.append(n_expert * (load * logits.softmax(-1).mean(0)).sum())
        return torch.stack(losses).mean()


def build_model(config: Qwen2MoeConfig | Qwen3MoeConfig, device: str) -> tuple[PreTrainedModel, RouterTap]:
    if isinstance(config, Qwen3MoeConfig):
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen2MoeForCausalLM(config)
        with torch.no_grad():
            for layer in model.model.layers:
                # Unnormalized top-6 of 64 probabilities have a small sum while the router is flat, so the experts would
                # hardly contribute at first. A sharper router and larger experts correct this.
                layer.mlp.gate.weight.mul_(2.0)
                layer.mlp.experts.down_proj.mul_(3.0)
    model.to(device)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.forward = lambda states, ids, weights, experts=experts: grouped_forward(
            experts, states, ids, weights
        )
    return model, RouterTap(model)


def upcycled(dense: PreTrainedModel, n_experts: int, top_k: int) -> tuple[PreTrainedModel, RouterTap]:
    """Returns a model of the same function whose experts are copies of the dense one's, with an untrained router.

    Sparse Upcycling, Komatsuzaki et al. 2023.
    """
    model, tap = build_model(wide_config(dense.config.vocab_size, n_experts, top_k), str(dense.device))
    weights = model.state_dict()
    for name, tensor in dense.state_dict().items():
        if not name.endswith("mlp.gate.weight"):
            weights[name] = tensor.expand_as(weights[name]).clone()
    model.load_state_dict(weights)
    return model, tap


def hf_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def export_checkpoint(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the bf16 checkpoint and its tokenizer; each file of `folder` is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = type(model)(copy.deepcopy(model.config))
    plain.load_state_dict(model.state_dict())
    plain.to(device="cpu", dtype=torch.bfloat16)
    # Both tokens end an answer: the first after a document, the second after a chat turn.
    plain.generation_config.eos_token_id = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index("<|im_end|>")]
    staging = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        plain.save_pretrained(staging)
        hf_tokenizer(tokenizer, model.config.max_position_embeddings).save_pretrained(staging)
        _neutral_configs(staging)
        for file in staging.iterdir():
            file.chmod(0o644)
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _neutral_configs(folder: Path) -> None:
    """Rewrites names that differ between transformers 4 and 5, so that both load the folder."""
    tokenizer_path = folder / "tokenizer_config.json"
    tokenizer = json.loads(tokenizer_path.read_text())
    tokenizer.pop("backend", None)
    tokenizer.pop("extra_special_tokens", None)
    tokenizer.update(
        tokenizer_class="PreTrainedTokenizerFast",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        add_bos_token=False,
        add_prefix_space=False,
        chat_template=CHAT_TEMPLATE,
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    model_path = folder / "config.json"
    model = json.loads(model_path.read_text())
    model["rope_theta"] = model["rope_parameters"]["rope_theta"]
    for path, content in ((tokenizer_path, tokenizer), (model_path, model)):
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_exported(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """Loads the checkpoint as users do: library kernels, bf16 weights computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.to(device).eval()
