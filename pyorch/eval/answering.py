"""The process that answers a harness: it has the model, and neither the harness nor torch, which the harness may bring.

torch and llama.cpp have an OpenMP runtime each, which must not share a process. Its argument is the descriptor of its
end of a connection. First comes what is to be loaded, then questions; each is answered, a long one in parts. When the
connection ends, so does this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import llama_cpp.llama_cpp as llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from pyorch.errors import PyorchError
from pyorch.eval import generation, harness_arguments
from pyorch.eval.arrival import Arrival
from pyorch.eval.harness_arguments import Arguments
from pyorch.eval.likelihood import MAX_CONTINUATIONS, Likelihoods, Prompt, likelihoods
from pyorch.eval.method import ORIGINAL, dynamic_model, lossy_method, n_ubatch, read_buddies, simulated, static_model
from pyorch.llama.model import Model
from pyorch.settings.budget import AUTO

_MAX_OUTPUTS = 256  # rows of logits of a prompt that is computed beside others; longer ones are by themselves

Pair = tuple[Sequence[int], Sequence[int]]  # tokens: a context, and a continuation


def main() -> int:
    connection = Connection(int(sys.argv[1]))
    try:
        with _loaded(harness_arguments.read(connection.recv())) as answering:
            connection.send(("ready", answering.facts()))
            _answer(connection, answering)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the harness is gone, and Ctrl-C is for it
        return 0
    except PyorchError as error:
        connection.send(("refused", str(error)))
        return 2
    return 0


def _answer(connection: Connection, answering: Answering) -> None:
    while True:
        name, arguments = connection.recv()
        try:
            for part in getattr(answering, name)(*arguments):
                connection.send(("part", part))
            connection.send(("end", None))
        except PyorchError as error:
            connection.send(("refused", str(error)))


@contextlib.contextmanager
def _loaded(asked: Arguments) -> Iterator[Answering]:
    """With a cache rate the cache is static, see pyorch.eval.method; else experts come and go under the budget."""
    path, n_threads, settings = asked.path, asked.n_threads, {**asked.settings}
    substitution, buddies_file = settings.pop("substitution", None), settings.pop("buddies", None)
    options = {**settings, "n_threads": n_threads}
    forecast = str(options.get("prefetch", "auto")) if options.pop("speculate", False) else ""
    width = n_ubatch(substitution, speculates=bool(forecast))
    if asked.cache_rate is not None:
        method = dataclasses.replace(lossy_method(substitution), forecast=forecast)
        buddies = read_buddies(path, buddies_file, needed=True)
        with static_model(path, **options) as model, simulated(model, method, asked.cache_rate, buddies):
            yield Answering(model, asked, width)
        return
    method, buddies = ORIGINAL, None
    if substitution is not None:
        # What is judged is computed as prompts are: nothing of it would be replaced otherwise.
        method = lossy_method(dataclasses.replace(substitution, prefill=True))
        buddies = read_buddies(path, buddies_file, needed=substitution.mode == "buddies")
    method = dataclasses.replace(method, forecast=forecast)
    with dynamic_model(path, method, options.pop("budget", AUTO), buddies, Arrival(), **options) as model:
        yield Answering(model, asked, width)


class Answering:
    """What can be asked of a model. Each answer comes in parts."""

    def __init__(self, model: Model, asked: Arguments, n_ubatch: int) -> None:
        self._model = model
        self._asked = asked
        self._n_ubatch = n_ubatch
        self._n_threads = asked.n_threads
        self._vocab = llama.llama_model_get_vocab(model.llama.model)

    def facts(self) -> dict[str, Any]:
        """What does not change: tokens that begin and end a text, the longest text, the template of chats."""
        bos, eos = llama.llama_vocab_bos(self._vocab), llama.llama_vocab_eos(self._vocab)
        return {
            "bos": bos if bos >= 0 else None, "eos": eos if eos >= 0 else None,
            "adds_bos": bool(llama.llama_vocab_get_add_bos(self._vocab)),
            "path": self._asked.path, "max_gen_toks": self._asked.max_gen_toks,
            "max_length": min(self._asked.max_length, llama.llama_model_n_ctx_train(self._model.llama.model)),
            "template": self._model.llama.metadata.get("tokenizer.chat_template"),
        }

    def tokenize(self, texts: Sequence[str], bos: bool, special: bool) -> Iterator[list[int]]:
        """Of each text. bos: begin with the token that begins a text. special: names of special tokens are tokens."""
        start = [llama.llama_vocab_bos(self._vocab)] if bos else []
        for text in texts:
            yield start + self._model.llama.tokenize(text.encode(), add_bos=False, special=special)

    def likelihoods(self, pairs: Sequence[Pair]) -> Iterator[list[tuple[float, bool]]]:
        """Of the continuation of each pair, in order: log-likelihood in nats, whether it is the most probable."""
        for is_long, prompts in itertools.groupby(_prompts(pairs), lambda prompt: prompt.n_outputs > _MAX_OUTPUTS):
            together = False if is_long else None
            for found in likelihoods(self._model, list(prompts), self._n_ubatch, together, self._n_threads):
                yield _plain(found)

    def generate(self, requests: Sequence[dict[str, Any]], n_parallel: int) -> Iterator[tuple[int, str]]:
        """The number of a request, and its text."""
        wanted = [generation.Request(**request) for request in requests]
        yield from generation.generate(self._model, wanted, n_parallel, self._n_threads)

    def render(self, messages: Sequence[dict[str, str]], prompt_for_answer: bool) -> Iterator[str]:
        """A chat as text, by the model's template."""
        template = self.facts()["template"]
        if template is None:
            raise PyorchError(f"{self._model.map.path} has no chat template: leave out --apply_chat_template")
        names = [self._name(self.facts()[token]) for token in ("eos", "bos")]
        yield Jinja2ChatFormatter(template, *names, add_generation_prompt=prompt_for_answer)(messages=messages).prompt

    def stats(self) -> Iterator[dict[str, Any]]:
        """What was measured since loading."""
        stats = self._model.stats()
        experts, lossy, speculated = stats.experts, stats.substitution, stats.speculation
        yield {
            "expert_budget_bytes": experts.budget_bytes if experts else None,
            "expert_hit_rate": experts.hit_rate if experts and experts.hits + experts.misses else None,
            "expert_bytes_read": experts.bytes_read if experts else None,
            "peak_memory_bytes": stats.peak_memory_bytes,
            "token_layers": lossy.tokens if lossy else None,
            "substituted_slots": lossy.substituted if lossy else None,
            "dropped_slots": lossy.dropped if lossy else None,
            "ghost_slots": lossy.ghosts if lossy else None,
            "speculated_slots": speculated.slots - speculated.right if speculated else None,
        }

    def _name(self, token: int | None) -> str:
        if token is None:
            return ""
        return self._model.llama.detokenize([token], special=True).decode(errors="replace")


def _prompts(pairs: Sequence[Pair]) -> Iterator[Prompt]:
    """Neighbours with the same context share what is computed of it."""
    context: tuple[int, ...] = ()
    continuations: list[tuple[int, ...]] = []
    for before, continuation in pairs:
        if continuations and (tuple(before) != context or len(continuations) == MAX_CONTINUATIONS):
            yield Prompt(context, tuple(continuations))
            continuations = []
        context = tuple(before)
        continuations.append(tuple(continuation))
    if continuations:
        yield Prompt(context, tuple(continuations))


def _plain(found: Likelihoods) -> list[tuple[float, bool]]:
    return list(zip(map(float, found.sums), map(bool, found.greedy)))


if __name__ == "__main__":
    sys.exit(main())
