"""Compares the logits of two GGUFs of one vocabulary over a text: is it still the same function?

Example:
  python scripts/compare_models.py small.gguf bench.gguf --text tests/fixtures/small-moe/text-test.txt
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llama_cpp import Llama

import pyorch  # noqa: F401  (before llama_cpp: it names the libraries that llama_cpp loads)

TEXT = Path(__file__).parent.parent / "tests/fixtures/small-moe/text-test.txt"
# Largest mean Kullback-Leibler divergence (nats per token) that rounding of the type explains. A widening that is wrong
# in one tensor would differ by whole nats.
TOLERANCE = {"f32": 1e-6, "bf16": 1e-3, "q8_0": 5e-3, "q4_k_m": 0.05, "q4_0": 0.05}


@dataclass(frozen=True)
class Comparison:
    n_tokens: int
    max_difference: float  # of log-probabilities
    mean_divergence: float  # Kullback-Leibler, nats per token
    same_top: float  # share of positions with the same most likely token
    perplexities: tuple[float, float]
    same_greedy: int  # tokens of a greedy continuation before the two differ
    n_greedy: int

    def agrees(self, kind: str) -> bool:
        return self.mean_divergence <= TOLERANCE[kind]

    def __str__(self) -> str:
        return (
            f"{self.n_tokens} tokens: mean divergence {self.mean_divergence:.3g} nats, largest difference of a "
            f"log-probability {self.max_difference:.3g}, same most likely token {self.same_top:.1%}, perplexity "
            f"{self.perplexities[0]:.3f} and {self.perplexities[1]:.3f}, greedy continuation the same for "
            f"{self.same_greedy} of {self.n_greedy} tokens"
        )


def log_probabilities(path: Path, tokens: list[int], n_greedy: int) -> tuple[np.ndarray, list[int]]:
    """Log-probabilities [n_tokens, n_vocab] over `tokens`, and the greedy continuation."""
    llama = Llama(
        str(path), n_ctx=len(tokens) + n_greedy, n_batch=len(tokens), logits_all=True, n_gpu_layers=0, verbose=False
    )
    try:
        llama.eval(tokens)
        logits = np.array(llama.scores[: len(tokens)], dtype=np.float64)
        continuation = []
        for _ in range(n_greedy):
            continuation.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
            llama.eval(continuation[-1:])
    finally:
        llama.close()
    peak = logits.max(axis=-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True)), continuation


def compare(first: Path, second: Path, text: Path = TEXT, n_tokens: int = 512, n_greedy: int = 64) -> Comparison:
    """Compares two models over a text.

    Raises:
        ValueError: The two tokenize the text differently.
    """
    content = text.read_bytes()[: 8 * n_tokens]
    ids = []
    for path in (first, second):
        vocabulary = Llama(str(path), vocab_only=True, verbose=False)
        ids.append(vocabulary.tokenize(content, add_bos=False)[:n_tokens])
        vocabulary.close()
    if ids[0] != ids[1]:
        raise ValueError(f"{first} and {second} tokenize {text} differently: they are not of one vocabulary")
    (p, p_greedy), (q, q_greedy) = (log_probabilities(path, ids[0], n_greedy) for path in (first, second))
    following = np.array(ids[0][1:])
    losses = [-x[np.arange(len(following)), following].mean() for x in (p, q)]
    differing = [i for i, (a, b) in enumerate(zip(p_greedy, q_greedy, strict=True)) if a != b]
    return Comparison(
        n_tokens=len(ids[0]),
        max_difference=float(np.abs(p - q).max()),
        mean_divergence=float((np.exp(p) * (p - q)).sum(axis=-1).mean()),
        same_top=float((p.argmax(-1) == q.argmax(-1)).mean()),
        perplexities=(float(np.exp(losses[0])), float(np.exp(losses[1]))),
        same_greedy=differing[0] if differing else n_greedy,
        n_greedy=n_greedy,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=512, help="of the text (default: %(default)s)")
    arguments = parser.parse_args()
    for path in (arguments.first, arguments.second, arguments.text):
        if not path.is_file():
            print(f"compare_models: there is no file {path}", file=sys.stderr)
            return 2
    try:
        print(compare(arguments.first, arguments.second, arguments.text, arguments.tokens))
    except ValueError as error:
        print(f"compare_models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
