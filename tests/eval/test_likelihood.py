"""Log-likelihoods of continuations, texts that continue prompts, and the process that answers a harness."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import CHECKPOINT
from processes import HANG_SECONDS

from pyorch import load
from pyorch.eval import generation, perplexity
from pyorch.eval.generation import Request, choose
from pyorch.eval.likelihood import Prompt, likelihoods, tokenize
from pyorch.llama.model import Model


@pytest.fixture(scope="module")
def model(small_moe: Path):
    with load(small_moe, budget="40%", n_ctx=64, n_threads=1) as model:
        yield model


def text_tokens(model: Model, n: int) -> tuple[int, ...]:
    return tokenize(model.llama, (CHECKPOINT / "text-test.txt").read_text(encoding="utf-8")[: 8 * n])[:n]


def test_a_long_continuation_is_judged_in_pieces(model: Model) -> None:
    tokens = text_tokens(model, 700)
    found, = likelihoods(model, [Prompt(tokens[:3], (tokens[3:],))], together=False, n_threads=1)
    window = perplexity.Window(tokens[:-1], tokens[1:])
    whole = perplexity.measure(model, [window], n_threads=1).log_likelihood * 699
    start = perplexity.measure(model, [perplexity.Window(tokens[:2], tokens[1:3])], n_threads=1).log_likelihood * 2
    assert found.sums[0] == pytest.approx(whole - start, rel=1e-4)
    assert not found.greedy[0], "nobody writes what a small model finds most probable for 700 tokens"


def test_greedy_texts_are_the_most_probable_continuations(model: Model) -> None:
    tokens = text_tokens(model, 40)
    prompts = [tokens[:9], tokens[9:30], tokens[2:20]]
    requests = [Request(tuple(prompt), 8) for prompt in prompts]
    texts = dict(generation.generate(model, requests, n_threads=1))
    assert sorted(texts) == [0, 1, 2] and any(texts.values())
    for prompt, text in ((prompt, texts[i]) for i, prompt in enumerate(prompts) if texts[i]):
        continuation = tuple(model.llama.tokenize(text.encode(), add_bos=False))
        if model.llama.detokenize(list(continuation)).decode() == text and len(continuation) <= 8:
            other = (continuation[0] + 1) % model.llama.n_vocab(), *continuation[1:]
            found, = likelihoods(model, [Prompt(tuple(prompt), (continuation, other))], n_threads=1)
            assert not found.greedy[1] and found.sums[0] > found.sums[1]


def test_more_requests_than_are_computed_at_once_are_all_answered(model: Model) -> None:
    tokens = text_tokens(model, 30)
    requests = [Request(tokens[i : i + 3 + i], 1 + i % 4) for i in range(7)]
    answers = list(generation.generate(model, requests, 3, n_threads=1))
    assert sorted(index for index, _ in answers) == list(range(7))


def test_a_text_ends_before_what_stops_it(model: Model) -> None:
    prompt = tokenize(model.llama, "import os\nimport sys\n\nclass Reader:\n    def")
    (_, whole), = generation.generate(model, [Request(prompt, 24)], n_threads=1)
    stop = whole[len(whole) // 2]
    (_, cut), = generation.generate(model, [Request(prompt, 24, stop=("never seen", stop))], n_threads=1)
    assert whole and cut == whole[: whole.index(stop)]


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40), st.floats(0.1, 3), st.integers(0, 5),
       st.floats(0.05, 1), st.floats(0, 1), st.integers(0, 99))
def test_a_drawn_token_is_among_those_that_the_settings_leave(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.array(values, np.float32)
    request = Request((1,), 1, (), temperature, top_k, top_p, min_p)
    token = choose(logits, request, np.random.default_rng(seed))
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    above = p[logits > logits[token]]
    assert not top_k or len(above) < top_k
    assert above.sum() / (np.sort(p)[::-1][: top_k or None].sum()) < top_p + 1e-9
    assert p[token] >= min_p * p.max() * (1 - 1e-9)
    assert choose(logits, Request((1,), 1), np.random.default_rng(seed)) == logits.argmax()


def test_the_process_answers_in_parts_and_ends_with_the_connection(small_moe: Path) -> None:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pyorch.eval.answering", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    ours.send({"model": str(small_moe), "budget": "40%", "threads": 1})
    kind, facts = ours.recv()
    assert kind == "ready" and facts["max_length"] > 0
    ours.send(("render", ([{"role": "user", "content": "hello"}], True)))
    kind, sentence = ours.recv()
    assert (kind == "refused" and "has no chat template" in sentence) or (kind == "part" and "hello" in sentence)
    if kind == "part":
        assert ours.recv()[0] == "end"
    ours.send(("tokenize", (["import os", "x"], False, False)))
    assert [ours.recv()[0] for _ in range(3)] == ["part", "part", "end"]
    ours.close()
    assert process.wait(timeout=HANG_SECONDS) == 0
