"""Measures the quality of a small model: loss on held-out text, answers to held-out questions, routing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from fact_world import prompt
from small_moe_model import RouterTap
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerRouting:
    """The distribution of tokens over n_expert experts by one layer's router."""

    load_entropy: float  # entropy of the experts' loads / log(n_expert); 1 is even use
    token_entropy: float  # mean entropy of one token's probabilities / log(n_expert); 0 is one expert
    domain_divergence: float  # Jensen-Shannon divergence of loads, text against facts, in bits; 0 is none
    load_cv: float  # coefficient of variation of the loads
    max_load: float  # load of the busiest expert; even use is 1
    unused: int  # experts that got no token


@torch.inference_mode()
def text_loss(model: PreTrainedModel, tokens: np.ndarray, length: int) -> float:
    """Returns the mean next-token loss (nats per token) over consecutive windows of `length` tokens."""
    device = model.device
    windows = (len(tokens) - 1) // length
    total = 0.0
    for start in range(0, windows, 16):
        rows = np.stack(
            [tokens[i * length : (i + 1) * length + 1] for i in range(start, min(start + 16, windows))]
        )
        batch = torch.from_numpy(rows).to(device)
        logits = model(batch[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (windows * length)


@torch.inference_mode()
def choice_accuracy(model: PreTrainedModel, tokenizer: Tokenizer, questions: list[dict]) -> float:
    """Returns the share of questions in which the right choice has the highest log-likelihood (acc of lm-eval)."""
    correct = 0
    for start in range(0, len(questions), 32):
        chunk = questions[start : start + 32]
        rows, starts = [], []
        for question in chunk:
            stem = prompt(question["question"]["stem"])
            prefix = len(tokenizer.encode(stem).ids)
            for choice in question["question"]["choices"]:
                rows.append(tokenizer.encode(f"{stem} {choice['text']}").ids)
                starts.append(prefix)
        scores = _choice_scores(model, rows, starts).view(len(chunk), -1)
        for question, best in zip(chunk, scores.argmax(-1).tolist(), strict=True):
            correct += question["question"]["choices"][best]["label"] == question["answerKey"]
    return correct / len(questions)


def _choice_scores(model: PreTrainedModel, rows: list[list[int]], starts: list[int]) -> Tensor:
    """Returns the sums of log-probabilities of rows[i][starts[i]:] after the tokens before them, [n_rows]."""
    width = max(map(len, rows))
    batch = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        batch[i, : len(row)] = torch.tensor(row)
        mask[i, start : len(row)] = True
    batch, mask = batch.to(model.device), mask.to(model.device)
    # Padding is on the right, where causal attention hides it from earlier positions.
    logits = model(batch[:, :-1], use_cache=False).logits.float()
    taken = logits.log_softmax(-1).gather(-1, batch[:, 1:, None]).squeeze(-1)
    return (taken * mask[:, 1:]).sum(-1)


@torch.inference_mode()
def routing_report(
    model: PreTrainedModel, tap: RouterTap, text: np.ndarray, facts: np.ndarray
) -> list[LayerRouting]:
    """Returns the routing per layer over the rows `text` and `facts`, each [n_rows, length]."""
    loads, entropies = [], []
    for rows in (text, facts):
        tap.clear()
        model(torch.from_numpy(rows).to(model.device), use_cache=False)
        loads.append([_load(ids, logits.shape[-1]) for ids, logits in zip(tap.ids, tap.logits, strict=True)])
        entropies.append([_entropy(logits.float().softmax(-1)).mean().item() for logits in tap.logits])
    tap.clear()
    report = []
    for layer, (of_text, of_facts) in enumerate(zip(*loads, strict=True)):
        load = (of_text + of_facts) / 2
        n_expert = len(load)
        even = math.log(max(n_expert, 2))  # a model that is still dense has one expert, and entropies of 0
        divergence = _entropy(load) - (_entropy(of_text) + _entropy(of_facts)) / 2
        report.append(
            LayerRouting(
                load_entropy=round(_entropy(load).item() / even, 4),
                token_entropy=round((entropies[0][layer] + entropies[1][layer]) / 2 / even, 4),
                domain_divergence=round(divergence.item() / math.log(2), 4),
                load_cv=round((load.std(unbiased=False) / load.mean()).item(), 4),
                max_load=round(load.max().item() * n_expert, 4),
                unused=int((load == 0).sum()),
            )
        )
    return report


def _load(ids: Tensor, n_expert: int) -> Tensor:
    return torch.bincount(ids.flatten(), minlength=n_expert).double() / ids.numel()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.clamp_min(1e-12).log()).sum(-1)


@torch.inference_mode()
def complete(model: PreTrainedModel, tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """Returns the greedy continuation of `text`, without its end token."""
    ids = tokenizer.encode(text).ids
    prompt_length = len(ids)
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == 0:
            break
        ids.append(token)
    return tokenizer.decode(ids[prompt_length:], skip_special_tokens=False)
