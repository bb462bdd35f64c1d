"""Trains the small Qwen2-MoE of the tests and the benchmark model, or one whose experts begin as copies of a dense
model's.

The text is the Python standard library of this machine and a seeded world of invented facts (fact_world.py). The
checkpoint is rewritten every few minutes, so an interrupted run leaves a usable one, and `--resume` continues it.

Example (about an hour on one CPU core):
  python scripts/train_small_moe.py --minutes 60 --seed 1 -o tests/fixtures/small-moe
  python scripts/train_small_moe.py --upcycled --minutes 60 --threads 2 -o build/upcycled-moe

Needs torch, transformers (5 or newer), tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import fact_world
import numpy as np
import small_moe_quality as quality
import torch
import torch.nn.functional as F
import transformers
from small_moe_data import Batches, encode_documents, encode_texts, stdlib_files, test_text, train_tokenizer
from small_moe_model import (
    RouterTap,
    build_model,
    export_checkpoint,
    load_exported,
    small_config,
    upcycled,
    wide_config,
)
from tokenizers import Tokenizer

VOCAB_SIZE = 2048
TEXT_ROWS, FACT_ROWS, ROW_LENGTH = 4, 4, 256
LONG_ROW_LENGTH = 1024  # the last rows are longer and fewer, and have all positions of a user's prompt
LONG_ROWS_FROM = 0.9  # of the run
EXPERTS, TOP_K = 16, 4  # of the upcycled model
FACT_WEIGHT_IN_TOKENIZER = 14  # enough for every invented name to become one token
PROMPTS = (
    "def __init__(self, ",
    '    """Return the ',
    "Question: What does the {animal} eat?\nAnswer:",
    "<|im_start|>user\nWho discovered {planet}?<|im_end|>\n<|im_start|>assistant\n",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("tests/fixtures/small-moe"), help="checkpoint folder")
    add("--upcycled", action="store_true",
        help=f"{EXPERTS} experts of 256 neurons, {TOP_K} used, that begin as copies of a dense model's")
    add("--dense-share", type=float, default=0.35, metavar="SHARE",
        help="share of an upcycled model's run in which it is dense (default: %(default)s)")
    add("--state", type=Path, default=Path("build/small-moe.state.pt"),
        help="file of the run's state (default: %(default)s)")
    add("--resume", action="store_true", help="continue the run in --state")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="stop after this much training time (default: 60)")
    length.add_argument("--steps", type=int, help="stop after this many steps of 2048 tokens")
    add("--seed", type=int, default=1)
    add("--entities", type=int, default=40,
        help="entities per kind; there are 4 kinds with 4 facts each (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    add("--balance", type=float, default=0.02, help="weight of the load-balance loss (default: %(default)s)")
    add("--save-minutes", type=float, default=6.0, help="time between checkpoints (default: %(default)s)")
    add("--device", default="cpu", help="torch device, such as cpu or cuda")
    add("--threads", type=int, default=1,
        help="CPU threads; more than one helps only on an idle machine (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps is None and arguments.minutes is None:
        arguments.minutes = 60.0
    if arguments.resume and not arguments.state.exists():
        parser.error(f"--resume: there is no run to continue in {arguments.state}")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no such device here; use cpu")
    return arguments


class Trainer:
    """One run: data, model, optimizer, and progress."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.step = 0
        self.seconds = 0.0
        torch.manual_seed(arguments.seed)
        self.facts = fact_world.build_facts(arguments.entities, arguments.seed)
        documents = fact_world.training_documents(self.facts, arguments.seed)
        train_text, held_out = stdlib_files()
        self.test_text = test_text(held_out)
        self.test_questions = fact_world.arc_questions(self.facts, arguments.seed, held_out=True, count=400)
        self.train_questions = fact_world.arc_questions(self.facts, arguments.seed, held_out=False, count=400)
        state = torch.load(arguments.state, weights_only=True) if arguments.resume else None
        if state:
            self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        else:
            fact_text = ["".join(text for text, _ in document) for document in documents]
            self.tokenizer = train_tokenizer(train_text + fact_text * FACT_WEIGHT_IN_TOKENIZER, VOCAB_SIZE)
        self.test_tokens = np.array(self.tokenizer.encode(self.test_text).ids)
        self.warm_from = state.get("warm_from", 0) if state else 0
        # An upcycled model is dense until it is copied; the optimizer restarts then.
        self.dense = arguments.upcycled and not (state and state.get("copied"))
        if arguments.upcycled:
            config = wide_config(VOCAB_SIZE, *((1, 1) if self.dense else (EXPERTS, TOP_K)))
        else:
            config = small_config(VOCAB_SIZE)
        self.model, self.tap = build_model(config, arguments.device)
        self.optimizer = self.new_optimizer()
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
        self.batches = Batches(
            np.concatenate(encode_texts(self.tokenizer, train_text)),
            encode_documents(self.tokenizer, documents),
            arguments.seed + self.step,
        )

    def new_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.arguments.lr, betas=(0.9, 0.95), fused=True,
        )

    def upcycle(self) -> None:
        self.model, self.tap = upcycled(self.model, EXPERTS, TOP_K)
        self.optimizer = self.new_optimizer()
        self.dense, self.warm_from = False, self.step
        print(f"step {self.step}: {EXPERTS} copies of each layer's FFN", flush=True)

    @property
    def progress(self) -> float:
        """The finished share of the run, 0 to 1."""
        if self.arguments.steps is not None:
            return self.step / self.arguments.steps
        return self.seconds / (60 * self.arguments.minutes)

    def learning_rate(self) -> float:
        warm_up = min(1.0, (self.step - self.warm_from + 1) / 150)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
        return self.arguments.lr * warm_up * (0.03 + 0.97 * cosine)

    def train_step(self) -> tuple[float, float, float]:
        """One update. Returns the loss on text, on answers to facts, and the balance loss."""
        if self.progress < LONG_ROWS_FROM:
            text_rows, fact_rows, length = TEXT_ROWS, FACT_ROWS, ROW_LENGTH
        else:
            text_rows, fact_rows, length = 1, 1, LONG_ROW_LENGTH
        drawn = self.batches.draw(text_rows, fact_rows, length)
        batch = torch.from_numpy(drawn.ids).to(self.arguments.device)
        weights = torch.from_numpy(drawn.weights[:, 1:]).to(self.arguments.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.tap.clear()
        logits = self.model(batch[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(-1, length)
        balance = self.tap.balance_loss()
        loss = (losses * weights).sum() / weights.sum()
        (loss + self.arguments.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        answers = weights > 1
        return losses[:text_rows].mean().item(), losses[answers].mean().item(), balance.item()

    def save_state(self) -> None:
        path = self.arguments.state
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "tokenizer": self.tokenizer.to_str(),
                "warm_from": self.warm_from,
                "copied": not self.dense,
                "step": self.step,
                "seconds": self.seconds,
            },
            temporary,
        )
        os.replace(temporary, path)

    def write_test_files(self) -> None:
        folder = self.arguments.output
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text-test.txt").write_text(self.test_text, encoding="utf-8")
        for name, questions in (("facts-test", self.test_questions), ("facts-train", self.train_questions)):
            lines = "".join(json.dumps(question) + "\n" for question in questions)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def checkpoint(self, n_questions: int = 100) -> None:
        """Writes state and checkpoint, then measures the written checkpoint and records it in training.json."""
        self.save_state()
        export_checkpoint(self.model, self.tokenizer, self.arguments.output)
        report = self.measure(n_questions)
        path = self.arguments.output / "training.json"
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(
            f"checkpoint at step {self.step}: text loss {report['text_loss']}, "
            f"facts {report['facts_test_accuracy']:.1%} held-out phrasing, "
            f"{report['facts_train_accuracy']:.1%} trained phrasings",
            flush=True,
        )

    def measure(self, n_questions: int) -> dict:
        """Measures the exported bf16 checkpoint, with the library's own kernels."""
        model = load_exported(self.arguments.output, self.arguments.device)
        tap = RouterTap(model)
        loss = quality.text_loss(model, self.test_tokens, ROW_LENGTH)
        sample = Batches(self.test_tokens, self.batches.facts, self.arguments.seed)
        layers = quality.routing_report(
            model, tap, sample.draw(16, 0, ROW_LENGTH).ids, sample.draw(0, 16, ROW_LENGTH).ids
        )
        names = {fact.kind: fact.entity for fact in self.facts}
        prompts = [text.format(**names) for text in PROMPTS]

        def accuracy(questions: list[dict]) -> float:
            return quality.choice_accuracy(model, self.tokenizer, questions[:n_questions])

        return {
            "command": " ".join(["python", *(word for word in sys.argv if word != "--resume")]),
            "seed": self.arguments.seed,
            "steps": self.step,
            "upcycled_at_step": self.warm_from if self.arguments.upcycled else None,
            "tokens": self.step * ROW_LENGTH * (TEXT_ROWS + FACT_ROWS),
            "training_minutes": round(self.seconds / 60, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "python": platform.python_version(),
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "facts": len(self.facts),
            "text_loss": round(loss, 4),
            "text_perplexity": round(math.exp(loss), 2),
            "text_bits_per_byte": round(
                loss * len(self.test_tokens) / len(self.test_text.encode()) / math.log(2), 4
            ),
            "questions": n_questions,
            "facts_test_accuracy": round(accuracy(self.test_questions), 4),
            "facts_train_accuracy": round(accuracy(self.train_questions), 4),
            "max_logit_difference_to_training_kernel": self.kernel_difference(model),
            "routing": [asdict(layer) for layer in layers],
            "samples": [text + quality.complete(model, self.tokenizer, text, 40) for text in prompts],
        }

    @torch.inference_mode()
    def kernel_difference(self, exported: torch.nn.Module) -> float:
        """Returns the largest difference of logits of the training kernel and the library's, with equal weights."""
        tokens = torch.from_numpy(self.test_tokens[:ROW_LENGTH]).unsqueeze(0).to(self.arguments.device)
        twin, _ = build_model(exported.config, self.arguments.device)
        twin.load_state_dict(exported.state_dict())
        return (twin(tokens).logits - exported(tokens).logits).abs().max().item()

    def run(self) -> None:
        saved = time.monotonic()
        text_loss, answer_loss = math.nan, math.nan
        while self.progress < 1.0:
            if self.dense and self.progress >= self.arguments.dense_share:
                self.upcycle()
            begun = time.monotonic()
            on_text, on_answers, balance = self.train_step()
            self.seconds += time.monotonic() - begun
            text_loss = on_text if math.isnan(text_loss) else 0.95 * text_loss + 0.05 * on_text
            answer_loss = on_answers if math.isnan(answer_loss) else 0.95 * answer_loss + 0.05 * on_answers
            if self.step % 50 == 0:
                print(
                    f"step {self.step} ({self.progress:.1%}, {self.seconds / 60:.1f} min): "
                    f"text {text_loss:.3f}, answers {answer_loss:.3f}, balance {balance:.3f}, "
                    f"fact epoch {self.batches.fact_epochs}",
                    flush=True,
                )
            if time.monotonic() - saved > 60 * self.arguments.save_minutes:
                self.checkpoint()
                saved = time.monotonic()
        self.checkpoint(n_questions=len(self.test_questions))


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    trainer = Trainer(arguments)
    trainer.write_test_files()
    try:
        trainer.run()
    except KeyboardInterrupt:
        print(f"interrupted at step {trainer.step}: saving", file=sys.stderr)
        trainer.checkpoint()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
