#!/usr/bin/env python3
"""What a lossy model loses when light absent experts are computed from a part of their bytes, and what that part costs:
nothing of them, their mean output, the neurons with most energy, a copy of fewer bits, or a ghost.

As `--lossy heaviest` does, a token waits for its heaviest expert of a layer and for those that weigh at least
max_weight times as much as an expert of a token does on average; a part stands for the others.

    python scripts/partial_experts.py CHECKPOINT --fit book.txt --text prose.txt

Needs the packages of the extra `train`; copies of fewer bits need --ggml, the libggml-base.so of an installed pyorch.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from small_moe_model import load_exported
from tokenizers import Tokenizer
from torch import Tensor

ROW, ROWS_AT_ONCE = 256, 4
MAX_WEIGHTS = (0.5, 0.7, 0.9, 1.2, math.inf)
WHOLE_BITS = 4.5  # of a weight in Q4_0, which parts are compared with
SAMPLES = 4000  # inputs of an expert that its parts are fitted to
SLICES, COPIES, RANKS = (0.125, 0.25, 0.5, 0.75), ("Q2_K", "Q3_K"), (4, 16)

Part = Callable[[Tensor], Tensor]  # float[n, n_embd] -> float[n, n_embd]


@dataclass(frozen=True)
class Expert:
    gate_up: Tensor  # [2 * n_ff, n_embd]
    down: Tensor  # [n_embd, n_ff]

    def hidden(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up.t()).chunk(2, -1)
        return F.silu(gate) * up

    def __call__(self, x: Tensor) -> Tensor:
        return self.hidden(x) @ self.down.t()

    def neurons(self, which: Tensor) -> Expert:
        return Expert(self.gate_up[torch.cat([which, which + self.down.shape[1]])], self.down[:, which])


def parts_of(expert: Expert, x: Tensor, ggml: ctypes.CDLL | None) -> Iterator[tuple[str, float, Part]]:
    """A name, the share of the expert's bytes, and the part, fitted to inputs [n, n_embd]."""
    n_embd, n_ff = expert.down.shape
    hidden = expert.hidden(x)
    y = hidden @ expert.down.t()
    mean, weights = y.mean(0), 3 * n_embd * n_ff
    yield "mean", n_embd / weights, lambda x: mean.expand(len(x), -1)
    order = ((hidden**2).mean(0) * (expert.down**2).sum(0)).argsort(descending=True)
    for share in SLICES:
        most, rest = order[:round(share * n_ff)], order[round(share * n_ff):]
        of_rest = (hidden[:, rest] @ expert.down[:, rest].t()).mean(0)
        yield f"slice {share:g}", share, partial(lambda some, more, x: some(x) + more, expert.neurons(most), of_rest)
    for kind in COPIES if ggml is not None else ():
        bits = 8 * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1] / 256
        yield kind, bits / WHOLE_BITS, Expert(copied(expert.gate_up, kind, ggml), copied(expert.down, kind, ggml))
    centred, middle = x - x.mean(0), x.mean(0)
    ridge = 0.01 * (centred**2).sum() / n_embd + 1e-6
    linear = torch.linalg.solve(centred.t() @ centred + ridge * torch.eye(n_embd), centred.t() @ (y - mean))
    main = torch.linalg.svd(centred @ linear, full_matrices=False)[2]
    for rank in RANKS:
        low = linear @ main[:rank].t() @ main[:rank]
        yield f"ghost {rank}", 2 * rank * n_embd / weights, partial(lambda low, x: (x - middle) @ low + mean, low)


def copied(weights: Tensor, kind: str, ggml: ctypes.CDLL) -> Tensor:
    """What a copy in a K-quant says of weights: as one row, since theirs may be shorter than a block of 256."""
    plain = np.ascontiguousarray(weights.numpy()).reshape(-1, 256)
    of_type = GGMLQuantizationType[kind]
    quantized = np.empty((len(plain), GGML_QUANT_SIZES[of_type][1]), np.uint8)
    ggml.ggml_quantize_chunk(ctypes.c_int(of_type), plain.ctypes, quantized.ctypes, ctypes.c_int64(0),
                             ctypes.c_int64(len(plain)), ctypes.c_int64(256), None)
    return torch.from_numpy(dequantize(quantized, of_type).reshape(weights.shape).copy())


class Judge:
    """A model whose routed experts are computed here, whole or in part.

    Of each layer: counts (how often an expert was selected), resident and held (bool[n_expert]: wholly in memory, and
    in part). part: what computes light absent experts, by layer and expert, and None leaves them out.
    """

    def __init__(self, folder: Path) -> None:
        self.model = load_exported(folder)
        modules = [layer.mlp.experts for layer in self.model.model.layers]
        self.experts = [[Expert(*pair) for pair in zip(m.gate_up_proj.data, m.down_proj.data, strict=True)]
                        for m in modules]
        self.n_expert = len(self.experts[0])
        self.counts = [torch.zeros(self.n_expert) for _ in modules]
        self.inputs: list[list[list[Tensor]]] | None = None  # collected while it is a list
        self.weights: list[float] = []
        self.mean_weight = self.max_weight = 0.0
        self.resident: list[Tensor] | None = None  # None: all
        self.held: list[Tensor] | None = None  # None: a part is read where it is wanted
        self.part: list[list[Part]] | None = None
        self.tokens = self.waited = self.partly = 0
        for il, module in enumerate(modules):
            module.forward = partial(self._forward, il)

    def collect(self, tokens: Tensor) -> list[list[Tensor]]:
        """Counts what a text selects. Returns the inputs of each layer's experts, [n, n_embd]."""
        self.inputs = [[[] for _ in layer] for layer in self.experts]
        self.predict(tokens)
        found = [[torch.cat(inputs) if inputs else torch.zeros(0, self.model.config.hidden_size) for inputs in layer]
                 for layer in self.inputs]
        self.inputs = None
        return found

    def predict(self, tokens: Tensor) -> Tensor:
        """Logarithms of probabilities, [n_tokens, n_vocab]."""
        self.tokens = self.waited = self.partly = 0
        logits = [self.model(tokens[i:i + ROWS_AT_ONCE]).logits for i in range(0, len(tokens), ROWS_AT_ONCE)]
        return torch.cat(logits).flatten(0, 1).log_softmax(-1)

    def most_active(self, begin: float, end: float) -> list[Tensor]:
        """bool[n_expert] of each layer: experts from one share to another of those that are selected oftenest."""
        masks = []
        for counts in self.counts:
            mask = torch.zeros(self.n_expert, dtype=torch.bool)
            mask[counts.argsort(descending=True)[round(begin * self.n_expert):round(end * self.n_expert)]] = True
            masks.append(mask)
        return masks

    def _forward(self, il: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        partly = torch.zeros_like(ids, dtype=torch.bool)
        if self.inputs is not None:
            self.counts[il] += torch.bincount(ids.flatten(), minlength=self.n_expert)
            self.weights.append(weights.mean().item())
        elif self.resident is not None:
            absent = ~self.resident[il][ids]
            heavy = (weights >= self.max_weight * self.mean_weight) | (weights == weights.amax(-1, keepdim=True))
            partly = absent & ~heavy
            if self.held is not None:
                gone = partly & ~self.held[il][ids]
            else:
                gone = partly if self.part is None else torch.zeros_like(partly)
            self.tokens += len(ids) * (il == 0)
            self.waited += int((absent & heavy).sum())
            partly = partly & ~gone
            self.partly += int(partly.sum()) if self.held is None else 0
            weights = weights * ~gone
            if self.model.config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts[il]):
            rows, slots = (ids == number).nonzero(as_tuple=True)
            if not len(rows):
                continue
            if self.inputs is not None:
                self.inputs[il][number].append(x[rows])
            y = expert(x[rows])
            if self.part is not None and (some := partly[rows, slots]).any():
                y[some] = self.part[il][number](x[rows][some])
            out.index_add_(0, rows, y * weights[rows, slots].unsqueeze(1))
        return out


def report(curves: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    """Divergences and bytes, and what is read for the divergence that leaving out has, as a share of what it reads."""
    print("in memory, part: divergence and experts' bytes read a token, for max_weight", *MAX_WEIGHTS)
    for (kept, name), points in curves.items():
        print(f"{kept:22}  {name:11}", "".join(f"  {kl:.5f} {read:5.2f}" for kl, read in points), sep="")
    base = next(iter(curves.values()))
    print("read for the same divergence as leaving out with max_weight", *MAX_WEIGHTS[:-1])
    for (kept, name), points in curves.items():
        divergences, reads = zip(*points, strict=True)
        ratios = [np.interp(math.log(kl), np.log(divergences), reads, np.nan, np.nan) / read for kl, read in base[:-1]]
        print(f"{kept:22}  {name:11}", "".join(f"  {ratio:.2f}" for ratio in ratios), sep="")


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--fit", type=Path, nargs="+", required=True, help="texts that parts are fitted to")
    parser.add_argument("--text", type=Path, required=True, help="what is predicted")
    parser.add_argument("--fit-tokens", type=int, default=60000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cache-rate", type=float, default=0.5, help="share of experts in memory (default: 0.5)")
    parser.add_argument("--ggml", type=ctypes.CDLL, help="libggml-base.so of an installed pyorch")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))

    def tokens(paths: list[Path], most: int) -> Tensor:
        ids = [i for path in paths for i in tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids]
        return torch.tensor(ids[:min(most, len(ids)) // ROW * ROW]).view(-1, ROW)

    judge, text = Judge(args.checkpoint), tokens([args.text], args.tokens)
    inputs = judge.collect(tokens(args.fit, args.fit_tokens))
    judge.mean_weight = sum(judge.weights) / len(judge.weights)
    parts: dict[str, list[list[Part]]] = {}
    shares: dict[str, float] = {}
    for il, layer in enumerate(judge.experts):
        for expert, x in zip(layer, inputs[il], strict=True):
            sample = x[:SAMPLES] if len(x) else torch.zeros(1, expert.down.shape[0])
            for name, shares[name], part in parts_of(expert, sample, args.ggml):
                parts.setdefault(name, [[] for _ in judge.experts])[il].append(part)
    counts = [counted.clone() for counted in judge.counts]
    errors, energy = dict.fromkeys(parts, 0.0), 0.0
    for il, layer in enumerate(judge.collect(text)):
        for number, x in enumerate(layer):
            y = judge.experts[il][number](x)
            energy += float((y**2).sum())
            for name, made in parts.items():
                errors[name] += float(((made[il][number](x) - y) ** 2).sum())
    judge.counts = counts
    print("part, share of the bytes, squared error left")
    for name in parts:
        print(f"{name:10}  {shares[name]:5.3f}  {errors[name] / energy:.4f}")
    whole = judge.predict(text)

    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def curve(kept: str, name: str | None) -> None:
        """Measures the divergence, and experts' bytes read a token, for each max_weight."""
        judge.part = parts[name] if name else None
        for judge.max_weight in MAX_WEIGHTS:
            divergence = (whole.exp() * (whole - judge.predict(text))).sum(-1)
            read = (judge.waited + judge.partly * (shares[name] if name else 0)) / judge.tokens
            curves.setdefault((kept, name or "left out"), []).append((float(divergence.mean()), read))

    judge.resident = judge.most_active(0, args.cache_rate)
    for name in (None, *parts):
        curve(f"{args.cache_rate:g}, parts are read", name)
    # The same bytes in memory, a part of them for parts: what is there neither wholly nor in part is left out.
    for name, share in shares.items():
        whole_share = 0.75 * args.cache_rate
        held = min((args.cache_rate - whole_share) / share, 1 - whole_share)
        if held == 1 - whole_share:  # all that are not whole, and then more are whole
            whole_share = (args.cache_rate - share) / (1 - share)
            held = 1 - whole_share
        judge.resident = judge.most_active(0, whole_share)
        judge.held = judge.most_active(whole_share, 1 if held == 1 - whole_share else whole_share + held)
        curve(f"{whole_share:.2f}, and {held:.2f} in part", name)
    report(curves)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
