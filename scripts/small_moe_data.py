"""Training text of the small Qwen2-MoE: Python's standard library, its tokenizer, and batches."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fact_world import Document
from small_moe_model import SPECIAL_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# From tests and tables, a small model learns only their repetition.
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "encodings", "idlelib", "distutils", "lib2to3",
    "site-packages", "turtledemo", "__phello__", "__pycache__",
}
HELD_OUT_SHARE = 33  # one file of 33 is never trained on
TEST_BYTES, TEST_BYTES_PER_FILE = 49152, 6144
ANSWER_WEIGHT, FRAME_WEIGHT = 3.0, 0.2  # library text weighs 1


def stdlib_files() -> tuple[list[str], list[str]]:
    """Returns contents of the standard library's modules: (for training, held out), split by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or str(relative).startswith("config-"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 2000:
            continue
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        (held_out if digest[0] % HELD_OUT_SHARE == 0 else train).append(text)
    return train, held_out


def test_text(held_out: list[str]) -> str:
    """Returns the beginnings of held-out modules, cut at line ends, about 48 KB."""
    pieces: list[str] = []
    for text in held_out:
        piece = text[:TEST_BYTES_PER_FILE]
        pieces.append(piece[: piece.rfind("\n") + 1])
        if sum(map(len, pieces)) >= TEST_BYTES:
            break
    return "\n".join(pieces)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE with GPT-2's splitting, which llama.cpp knows as pre-tokenizer "gpt-2"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Returns token ids of each text, each ended by <|endoftext|> (id 0)."""
    return [np.array([*encoding.ids, 0], dtype=np.int64) for encoding in tokenizer.encode_batch(texts)]


@dataclass(frozen=True)
class WeightedTokens:
    """Token ids and, for each, the weight of its loss; both [n_tokens]."""

    ids: np.ndarray
    weights: np.ndarray


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[WeightedTokens]:
    """Returns each document, ended by <|endoftext|>, with the weights of its segments.

    Entities and questions are random, so the mean loss over all tokens would mostly measure chance. Therefore answers
    have a large weight and the rest of a document a small one.
    """
    encoded = []
    segments = iter(tokenizer.encode_batch([text for document in documents for text, _ in document]))
    for document in documents:
        ids: list[int] = []
        weights: list[float] = []
        for _, is_answer in document:
            own = next(segments).ids
            ids += own
            weights += [ANSWER_WEIGHT if is_answer else FRAME_WEIGHT] * len(own)
        encoded.append(WeightedTokens(np.array([*ids, 0]), np.array([*weights, 1.0], dtype=np.float32)))
    return encoded


class Batches:
    """Draws rows of `length` + 1 tokens: some from library text, the others from whole fact documents."""

    def __init__(self, text: np.ndarray, facts: list[WeightedTokens], seed: int):
        self.text = text
        self.facts = facts
        self.rng = random.Random(seed)
        self.order: list[int] = []  # fact documents left in this epoch
        self.fact_epochs = 0

    def _text_row(self, length: int) -> WeightedTokens:
        start = self.rng.randrange(len(self.text) - length)
        return WeightedTokens(self.text[start : start + length], np.ones(length, dtype=np.float32))

    def _fact_row(self, length: int) -> WeightedTokens:
        # A row begins with a document, so that position 0 is often the beginning of a prompt, as in use.
        parts: list[WeightedTokens] = []
        while sum(len(part.ids) for part in parts) < length:
            if not self.order:
                self.order = self.rng.sample(range(len(self.facts)), len(self.facts))
                self.fact_epochs += 1
            parts.append(self.facts[self.order.pop()])
        return WeightedTokens(
            np.concatenate([part.ids for part in parts])[:length],
            np.concatenate([part.weights for part in parts])[:length],
        )

    def draw(self, text_rows: int, fact_rows: int, length: int) -> WeightedTokens:
        """Ids and weights [text_rows + fact_rows, length + 1]: inputs and, shifted by one, targets."""
        rows = [self._text_row(length + 1) for _ in range(text_rows)]
        rows += [self._fact_row(length + 1) for _ in range(fact_rows)]
        return WeightedTokens(np.stack([row.ids for row in rows]), np.stack([row.weights for row in rows]))
