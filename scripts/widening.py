"""Widens a Qwen2-MoE or Qwen3-MoE without changing its function.

Every hidden value, expert neuron and query head is repeated. A weight over a repeated input is split into random parts
with the same sum. So the wide layer computes the same number from weights that are not copies of each other: they
quantize, compress and read like weights of a model trained at that width.

Why the function stays the same, piece by piece:

- RMSNorm over a vector repeated r times has the same mean square; its weight is repeated too.
- The query heads of one key/value head are repeated next to each other. Head size, RoPE and softmax scale stay, and
  key/value heads keep their number (grouped-query attention takes more query heads per key/value head).
- SwiGLU acts on each neuron alone; the down projection splits over the repeated neurons.
- Router and output matrix have their own rows, split over the repeated inputs: same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Standard deviation of the random parts, relative to a network trained at the wide width (whose weights shrink with the
# square root of the width). Their sum is exact, but rounding errors of a quantized weight grow with the parts: at 1 the
# wide model loses as much as the small one does.
PART_SCALE = 0.5


@dataclass(frozen=True)
class Shape:
    """The repeated dimensions of the small model, and their factors."""

    n_embd: int
    n_head: int
    n_ff_expert: int
    n_ff_shared: int
    hidden: int  # repeats of n_embd and of n_head
    expert: int  # repeats of n_ff_expert
    shared: int  # repeats of n_ff_shared

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


@dataclass(frozen=True)
class Axis:
    """The repetition of one axis: [blocks, size] becomes [blocks, repeats, size]."""

    blocks: int
    repeats: int
    size: int

    def rows(self) -> np.ndarray:
        """Returns for each wide index the small index that it repeats, [blocks * repeats * size]."""
        index = np.arange(self.blocks * self.size).reshape(self.blocks, 1, self.size)
        return np.repeat(index, self.repeats, axis=1).ravel()


@dataclass(frozen=True)
class Rule:
    """The change of a matrix [n_out, n_in] (or vector [n_in]); None leaves an axis unchanged."""

    out: Axis | None = None
    split: Axis | None = None  # repeated input: weights are split into parts
    copy: Axis | None = None  # values that are hidden states or scales themselves are repeated


def rule_for(name: str, shape: Shape) -> Rule:
    """Returns the rule for the GGUF tensor `name`. KeyError: neither architecture has it."""
    hidden = Axis(1, shape.hidden, shape.n_embd)
    heads = Axis(shape.n_head, shape.hidden, shape.head_size)
    expert = Axis(1, shape.expert, shape.n_ff_expert)
    shared = Axis(1, shape.shared, shape.n_ff_shared)
    short = name.split(".", 2)[2] if name.startswith("blk.") else name
    return {
        "token_embd.weight": Rule(copy=hidden),
        "output_norm.weight": Rule(copy=hidden),
        "output.weight": Rule(split=hidden),
        "attn_norm.weight": Rule(copy=hidden),
        "ffn_norm.weight": Rule(copy=hidden),
        "attn_q.weight": Rule(out=heads, split=hidden),
        "attn_q.bias": Rule(copy=heads),
        "attn_q_norm.weight": Rule(),
        "attn_k.weight": Rule(split=hidden),
        "attn_k_norm.weight": Rule(),
        "attn_k.bias": Rule(),
        "attn_v.weight": Rule(split=hidden),
        "attn_v.bias": Rule(),
        "attn_output.weight": Rule(out=hidden, split=heads),
        "ffn_gate_inp.weight": Rule(split=hidden),
        "ffn_gate_inp_shexp.weight": Rule(split=hidden),
        "ffn_gate_exps.weight": Rule(out=expert, split=hidden),
        "ffn_up_exps.weight": Rule(out=expert, split=hidden),
        "ffn_down_exps.weight": Rule(out=hidden, split=expert),
        "ffn_gate_shexp.weight": Rule(out=shared, split=hidden),
        "ffn_up_shexp.weight": Rule(out=shared, split=hidden),
        "ffn_down_shexp.weight": Rule(out=hidden, split=shared),
    }[short]


def wide_shape(rule: Rule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that `widen` gives a tensor of `shape` (last axis: inputs)."""
    *outer, n_in = shape
    if rule.out is not None:
        outer[-1] *= rule.out.repeats
    along = rule.split or rule.copy
    return (*outer, n_in * (along.repeats if along else 1))


def widen(rule: Rule, weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Applies `rule` to one float32 matrix [n_out, n_in] or vector [n_in]."""
    if rule.copy is not None:
        return np.ascontiguousarray(weight[..., rule.copy.rows()])
    if rule.out is not None:
        weight = weight[rule.out.rows()]
    if rule.split is not None:
        weight = split_inputs(weight, rule.split, rng)
    return weight


def split_inputs(weight: np.ndarray, axis: Axis, rng: np.random.Generator) -> np.ndarray:
    """Returns random parts over `axis` whose sum is `weight`: [n_out, n_in] -> [n_out, n_in * repeats]."""
    if axis.repeats == 1:
        return weight
    rows = weight.reshape(-1, axis.blocks, 1, axis.size)
    parts = rng.standard_normal((len(rows), axis.blocks, axis.repeats, axis.size), dtype=np.float32)
    parts *= PART_SCALE * float(weight.std()) / np.sqrt(np.float32(axis.repeats))
    parts += rows / np.float32(axis.repeats) - parts.mean(axis=2, keepdims=True)
    return parts.reshape(*weight.shape[:-1], -1)
