"""Answers ARC questions with transformers alone, as lm-evaluation-harness defines it. A program of its own.

It needs torch, which must not share a process with llama.cpp:

    python arc_process.py CHECKPOINT QUESTIONS.jsonl N_SHOTS    the log-likelihoods of the choices, a line a question
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

_ROWS = 40  # computed at once


def main() -> None:
    checkpoint, path, n_shots = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # the matrices are too small to share
    questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    shots = "".join(f"{context_of(question)} {right_answer(question)}\n\n" for question in questions[:n_shots])
    rows = []
    for question in questions[n_shots:]:
        context = tokenizer(shots + context_of(question)).input_ids
        for choice in question["question"]["choices"]:
            whole = tokenizer(f"{shots}{context_of(question)} {choice['text']}").input_ids
            rows.append((context, whole[len(context):]))
    values = iter([value for i in range(0, len(rows), _ROWS) for value in log_likelihoods(model, rows[i : i + _ROWS])])
    for question in questions[n_shots:]:
        print(json.dumps([next(values) for _ in question["question"]["choices"]]))


@torch.inference_mode()
def log_likelihoods(model, rows: list[tuple[list[int], list[int]]]) -> list[float]:
    """Of each continuation after its context. Padding is on the right, where no token sees it."""
    length = max(len(context) + len(continuation) for context, continuation in rows)
    batch = torch.tensor([[*context, *continuation, *[0] * length][:length] for context, continuation in rows])
    log_probabilities = model(batch, use_cache=False).logits.double().log_softmax(-1)
    return [
        sum(log_probabilities[i, len(context) + j - 1, token].item() for j, token in enumerate(continuation))
        for i, (context, continuation) in enumerate(rows)
    ]


def context_of(question: dict) -> str:
    return f"Question: {question['question']['stem']}\nAnswer:"


def right_answer(question: dict) -> str:
    choices = {choice["label"]: choice["text"] for choice in question["question"]["choices"]}
    return choices[question["answerKey"]]


if __name__ == "__main__":
    main()
