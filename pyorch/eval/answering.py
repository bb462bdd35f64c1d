"""The process that answers a harness: it loads the model, while the harness may load torch.

torch and llama.cpp each have an OpenMP runtime, and one process must not have both. The argument is the file descriptor
of this process's end of a connection. The first message says what to load, and each later one asks a question; a long
answer is sent in parts. The process ends when the connection does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.eval import generation
from pyorch.eval.likelihood import MAX_CONTINUATIONS, Likelihoods, Prompt, likelihoods
from pyorch.eval.method import (
    ORIGINAL,
    Arrival,
    dynamic_model,
    lossy_method,
    n_ubatch,
    read_buddies,
    simulated,
    static_model,
)
from pyorch.llama.interception import ChatTemplate
from pyorch.llama.model import Model
from pyorch.processes import end_with
from pyorch.settings.budget import AUTO
from pyorch.settings.option import options
from pyorch.settings.settings import Settings
from pyorch.settings.substitution import Substitution

_END_SECONDS = 10.0  # to close the model in order after the harness has ended
_MAX_OUTPUTS = 256  # rows of logits of a prompt that shares a batch; prompts with more are computed alone

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and a continuation


def main() -> int:
    connection = Connection(int(sys.argv[1]))
    end_with(connection.fileno(), _END_SECONDS)
    try:
        with _loaded(read_arguments(connection.recv())) as answering:
            connection.send(("ready", answering.facts()))
            _answer(connection, answering)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the harness has ended, or handles Ctrl-C itself
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
    """Loads the model. With a cache rate its cache is static (pyorch.eval.method); otherwise it follows the budget."""
    path, n_threads, settings = asked.path, asked.n_threads, {**asked.settings}
    substitution, buddies_file = settings.pop("substitution", None), settings.pop("buddies", None)
    options = {**settings, "n_threads": n_threads}
    forecast = str(options.get("prefetch", "auto")) if options.pop("speculate", False) else ""
    width = n_ubatch(substitution, speculates=bool(forecast))
    if asked.cache_rate is not None:
        method = dataclasses.replace(lossy_method(substitution), forecast=forecast)
        buddies = read_buddies(path, buddies_file, needed=substitution.needs_buddies)
        with static_model(path, **options) as model, simulated(model, method, asked.cache_rate, buddies):
            yield Answering(model, asked, width)
        return
    method, buddies = ORIGINAL, None
    if substitution is not None:
        # The continuations are computed as prompts, so without `prefill` none of them would be substituted.
        method = lossy_method(dataclasses.replace(substitution, prefill=True))
        buddies = read_buddies(path, buddies_file, needed=substitution.needs_buddies)
    method = dataclasses.replace(method, forecast=forecast)
    with dynamic_model(path, method, options.pop("budget", AUTO), buddies, Arrival(), **options) as model:
        yield Answering(model, asked, width)


class Answering:
    """The questions that a model answers. Each answer consists of parts."""

    def __init__(self, model: Model, asked: Arguments, n_ubatch: int) -> None:
        self._model = model
        self._asked = asked
        self._n_ubatch = n_ubatch
        self._n_threads = asked.n_threads
        self._vocab = llama.llama_model_get_vocab(model.llama.model)

    def facts(self) -> dict[str, Any]:
        """Yields the constants: BOS and EOS tokens, the longest text, the template of chats."""
        bos, eos = llama.llama_vocab_bos(self._vocab), llama.llama_vocab_eos(self._vocab)
        return {
            "bos": bos if bos >= 0 else None, "eos": eos if eos >= 0 else None,
            "adds_bos": bool(llama.llama_vocab_get_add_bos(self._vocab)),
            "path": self._asked.path, "max_gen_toks": self._asked.max_gen_toks,
            "max_length": min(self._asked.max_length, llama.llama_model_n_ctx_train(self._model.llama.model)),
            "template": self._model.llama.metadata.get("tokenizer.chat_template"),
        }

    def tokenize(self, texts: Sequence[str], bos: bool, special: bool) -> Iterator[list[int]]:
        """Yields the tokens of each text. bos: begin with BOS. special: read the names of special tokens as tokens."""
        start = [llama.llama_vocab_bos(self._vocab)] if bos else []
        for text in texts:
            yield start + self._model.llama.tokenize(text.encode(), add_bos=False, special=special)

    def likelihoods(self, pairs: Sequence[Pair]) -> Iterator[list[tuple[float, bool]]]:
        """Yields for each pair, in order, the log-likelihood in nats, and whether it is the most probable."""
        for is_long, prompts in itertools.groupby(_prompts(pairs), lambda prompt: prompt.n_outputs > _MAX_OUTPUTS):
            together = False if is_long else None
            for found in likelihoods(self._model, list(prompts), self._n_ubatch, together, self._n_threads):
                yield _plain(found)

    def generate(self, requests: Sequence[dict[str, Any]], n_parallel: int) -> Iterator[tuple[int, str]]:
        """Yields the number of each request, and its text."""
        wanted = [generation.Request(**request) for request in requests]
        yield from generation.generate(self._model, wanted, n_parallel, self._n_threads)

    def render(self, messages: Sequence[dict[str, str]], prompt_for_answer: bool) -> Iterator[str]:
        """Yields a chat as text, by the model's template."""
        template = self.facts()["template"]
        if template is None:
            raise PyorchError(f"{self._model.map.path} has no chat template: leave out --apply_chat_template")
        names = [self._name(self.facts()[token]) for token in ("eos", "bos")]
        yield ChatTemplate(template, *names, add_generation_prompt=prompt_for_answer)(messages=messages).prompt

    def stats(self) -> Iterator[dict[str, Any]]:
        """Yields the measurements since loading."""
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
    """Merges consecutive pairs with the same context, which is then computed once."""
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


MAX_LENGTH = 4096  # tokens of a text by default: the memory of attention grows with its square
MAX_GEN_TOKS = 256

_LOSSY = "lossy"  # a flag with settings of its own
_NOT_HERE = ("n_ctx", "n_ubatch", "tuned", "maps")  # the harness sets its own sizes, and runs once


@dataclass(frozen=True)
class Arguments:
    """The --model_args of a harness: the model, and options of commands, by the names of their flags.

        model=olmoe.gguf,budget=40%,prefetch=none
        model=olmoe.gguf,cache_rate=0.5,lossy="max_replaced=3,min_entropy=p20"

    lm_eval splits the text at commas. If `lossy` has no quotes, its later parts arrive as separate arguments and are
    joined again.

    Attributes:
        settings: Keywords of pyorch.load.
        cache_rate: None: a real budget.
        n_threads: None: the default.
    """

    path: str
    settings: dict[str, Any]
    cache_rate: float | None
    n_threads: int | None
    max_length: int
    max_gen_toks: int


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Reads the arguments of a harness.

    Raises:
        PyorchError: An argument is unknown or invalid.
    """
    given = dict(given)
    path = given.pop("model", None) or given.pop("pretrained", None)
    given.pop("pretrained", None)
    if path is None:
        raise PyorchError("which model is missing: --model_args model=MODEL.gguf,budget=40%")
    if not Path(str(path)).is_file():
        raise PyorchError(f"{path}: no such model")
    cache_rate = _number(given, "cache_rate", float, 0, 1, None)
    max_length = _number(given, "max_length", int, 2, 1 << 30, MAX_LENGTH)
    max_gen_toks = _number(given, "max_gen_toks", int, 1, 1 << 30, MAX_GEN_TOKS)
    settings = _settings(given)
    n_threads = settings.pop("n_threads", None) or None
    checked = Settings(**settings)
    if cache_rate is not None and not isinstance(checked.substitution, Substitution):
        raise PyorchError("cache_rate simulates a cache for settings that replace absent experts: give lossy too, or "
                          "a budget in its place")
    if cache_rate is not None and "budget" in settings:
        raise PyorchError("cache_rate simulates a cache, and needs the whole model in memory: leave out budget")
    return Arguments(str(path), settings, cache_rate, n_threads, max_length, max_gen_toks)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    declared = {(option.flag or name).lstrip("-").replace("-", "_"): option
                for name, option in options(Settings).items() if name not in _NOT_HERE}
    names = {known for name, option in options(Substitution).items() for known in (name, option.plain)}
    parts = {name: given.pop(name) for name in list(given) if name in names and name not in declared}
    if parts:
        if _LOSSY not in given:
            raise PyorchError(f"{next(iter(parts))} is a setting of lossy: give lossy too, such as "
                              f'lossy="max_replaced=3,min_entropy=p20"')
        given[_LOSSY] = ",".join([str(given[_LOSSY]), *(f"{name}={value}" for name, value in parts.items())])
    unknown = sorted(given.keys() - declared.keys())
    if unknown:
        raise PyorchError(f'"{unknown[0]}" is no argument of the model pyorch: use model, cache_rate, max_length, '
                          f"max_gen_toks, {', '.join(declared)}")
    settings = {}
    for name, value in given.items():
        option = declared[name]
        # A flag without a value negates its default: no_pack=True.
        settings[option.name] = (option.parse(value) if option.metavar is not None
                                 else option.parse(bool(value) != option.default))
    return settings


def _number(given: dict[str, Any], name: str, kind: type, least: float, most: float, default: Any) -> Any:
    value = given.pop(name, None)
    if value is None:
        return default
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        what = "a whole number" if kind is int else "a number"
        raise PyorchError(f"{name} is {value}, and must be {what} from {least} to {most}")
    return number


if __name__ == "__main__":
    sys.exit(main())
