"""Answers /v1/completions with `echo`: the log-probabilities of a prompt's tokens, for evaluation harnesses.

llama-server ignores `echo`. The answer has the form of OpenAI's completions; `logprobs` lists all tokens, first those
in the prompt:

    {"tokens": ["import", " os"], "token_logprobs": [null, -1.9], "top_logprobs": [null, {" os": -1.9}],
     "text_offset": [0, 6]}

Each prompt is computed in a separate context, not in the server's slots, one request after another. As in `pyorch
eval`, attention has 32 bits throughout.
"""

from __future__ import annotations

import bisect
import codecs
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError, without_folders
from pyorch.library.numerics import np
from pyorch.llama import measure, memory
from pyorch.llama.context import Context, log_softmax
from pyorch.llama.managed import ManagedModel
from pyorch.serve.failures import NOBODY_HAS_IT, files_of, reason
from pyorch.serve.routes import Answer, Request, as_json, refusal
from pyorch.serve.vocabulary import Vocabulary

MAX_TOP = 100  # alternatives for a token
_N_BATCH = 512
_OUTPUT_BYTES = 64 << 20  # for logits
_ROUND = 256  # a context has a multiple of so many tokens


@dataclass(frozen=True)
class _Asked:
    """A request with `echo`.

    Attributes:
        prompts: The tokens of each prompt.
        max_tokens: Tokens to generate greedily after a prompt.
        n_top: Alternatives for each token, None without logprobs.
        stop: Texts that end the generation.
    """

    prompts: list[list[int]]
    max_tokens: int
    n_top: int | None
    stop: list[str]


class _Left(Exception):
    """The client has disconnected."""


class Echo:
    """Answers completions with `echo`, and leaves others to llama-server."""

    def __init__(self, managed: ManagedModel, context: Callable[[], int], name: str) -> None:
        """Args:
            managed: The served model.
            context: Returns the server's llama_context *, 0 while the model is not loaded.
            name: The name of the model in answers.
        """
        self._managed = managed
        self._context = context
        self._name = name
        self._computing = threading.Lock()
        self._needed: dict[int, int] = {}  # bytes of a context, by its tokens

    def post(self, request: Request) -> Answer | None:
        """Answers a request with `echo`. None: llama-server answers."""
        if b'"echo"' not in request.body:
            return None
        body = request.json()
        if not isinstance(body, dict) or not body.get("echo"):
            return None
        served = self._context()
        if not served:
            return refusal(503, "the model is not loaded yet")
        model = llama.llama_get_model(served)
        vocabulary = Vocabulary(model)
        asked = _read(body, vocabulary)
        n_most = llama.llama_n_ctx_seq(served)
        longest = max(map(len, asked.prompts)) + asked.max_tokens
        if longest > n_most:
            return refusal(400, f"a prompt and its answer have {longest} tokens, and a slot has {n_most}: "
                                "start the server with a larger --ctx")
        with self._computing:
            n_ctx = -(-longest // _ROUND) * _ROUND
            self.reserve(n_ctx)
            n_batch = min(_N_BATCH, max(1, _OUTPUT_BYTES // (4 * vocabulary.n_tokens)))
            try:
                with Context(model, n_ctx, n_batch, n_batch, exact=True) as context:
                    choices = [_choice(context, vocabulary, i, prompt, asked, request.has_left)
                               for i, prompt in enumerate(asked.prompts)]
            except _Left:
                return refusal(400, "the client has left")
            except PyorchError as error:
                return refusal(503 if NOBODY_HAS_IT in str(error) else 500,
                               without_folders(str(error), files_of(self._managed.map)))
        if self._managed.devices is not None and self._managed.devices.is_lost():
            return refusal(503, reason(self._managed))
        n_prompt = sum(map(len, asked.prompts))
        n_generated = sum(choice.pop("n_generated") for choice in choices)
        return as_json({
            "id": f"cmpl-{time.time_ns():x}", "object": "text_completion", "created": int(time.time()),
            "model": body.get("model") or self._name, "choices": choices,
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_generated,
                      "total_tokens": n_prompt + n_generated},
        })

    def reserve(self, n_ctx: int) -> None:
        """Reduces the automatic budget until a context fits: experts may occupy all free memory."""
        managed, engine = self._managed, self._managed.engine
        if not managed.plan.automatic:
            return
        if n_ctx not in self._needed:
            self._needed[n_ctx] = self.measure(n_ctx)
        limit, stats = memory.memory_limit(), engine.stats()
        promised = stats.budget_bytes - stats.used_bytes
        lacking = self._needed[n_ctx] + limit.margin_bytes + promised - limit.free_bytes
        if lacking > 0:
            managed.set_budget(max(stats.budget_bytes - lacking, managed.map.info.floor_bytes))

    def measure(self, n_ctx: int) -> int:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, _N_BATCH, _N_BATCH
        params.type_k = params.type_v = llama.GGML_TYPE_F32
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        managed = self._managed
        with managed.engine.capture():
            return measure.sizes_of(managed.map, managed.params, params, managed.devices).host


def _read(body: dict[str, Any], vocabulary: Vocabulary) -> _Asked:
    for name, neutral in (("stream", False), ("n", 1), ("best_of", 1), ("suffix", None)):
        if body.get(name) not in (None, neutral):
            raise PyorchError(f'"{name}" cannot be combined with "echo"')
    max_tokens = _whole(body, "max_tokens", 16, 1 << 20)
    if max_tokens > 1 and body.get("temperature") != 0:
        raise PyorchError('with "echo" tokens are generated at temperature 0 only: give "temperature": 0, or '
                          '"max_tokens": 0')
    wanted = body.get("logprobs")
    n_top = None if wanted is None or wanted is False else 1 if wanted is True else _whole(body, "logprobs", 0, MAX_TOP)
    return _Asked(_prompts(body.get("prompt"), vocabulary), max_tokens, n_top, _stop(body.get("stop")))


def _stop(given: Any) -> list[str]:
    words = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise PyorchError('"stop" must be a text or a list of texts')
    return [word for word in words if word]


def _whole(body: dict[str, Any], name: str, default: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise PyorchError(f'"{name}" is {json.dumps(value)}, and must be a whole number from 0 to {most}')
    return value


def _prompts(given: Any, vocabulary: Vocabulary) -> list[list[int]]:
    """Returns the tokens of each prompt; `given` is a text, tokens, or a list of either."""
    is_one = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
    prompts = []
    for one in [given] if is_one else given if isinstance(given, list) else ():
        if isinstance(one, str):
            prompts.append(vocabulary.tokenize(one, bos=vocabulary.adds_bos))
        elif isinstance(one, list) and all(type(token) is int and 0 <= token < vocabulary.n_tokens for token in one):
            prompts.append(one)
        else:
            prompts.append([])
    if not prompts or not all(prompts):
        raise PyorchError('"prompt" must be a text that is not empty, tokens of this model, or a list of either')
    return prompts


def _choice(
    context: Context, vocabulary: Vocabulary, index: int, prompt: Sequence[int], asked: _Asked,
    has_left: Callable[[], bool],
) -> dict[str, Any]:
    def decode(tokens: Sequence[int]) -> np.ndarray:
        if has_left():
            raise _Left
        return context.decode(tokens)

    context.clear()
    tokens, values = list(prompt), _Values(asked.n_top)
    n_batch = context.n_batch
    for begin in range(0, len(prompt), n_batch):
        rows = decode(prompt[begin : begin + n_batch])
        values.add(rows, prompt[begin + 1 : begin + 1 + len(rows)])
    row, reason = rows[-1], "length"
    text = _Text(map(vocabulary.piece, prompt))
    begin, end = len(text.text), None
    for _ in range(asked.max_tokens):
        token = int(row.argmax())
        values.add(row[None], [token])
        tokens.append(token)
        text.add(vocabulary.piece(token))
        end = min((at for word in asked.stop if (at := text.text.find(word, begin)) >= 0), default=None)
        if end is not None or vocabulary.is_end(token):
            reason = "stop"
            break
        if len(tokens) < len(prompt) + asked.max_tokens:
            row = decode([token])[0]
    n_generated = len(tokens) - len(prompt)
    if end is None:
        text.finish()
    else:  # the stop text is not part of the answer
        text.cut(end, len(prompt))
    return {"text": text.text, "index": index, "finish_reason": reason,
            "logprobs": values.as_logprobs(vocabulary, tokens[: len(text.pieces)], text), "n_generated": n_generated}


class _Text:
    """The text of tokens, and the character offset of each token. A token may begin inside a character."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.text = ""
        self.pieces: list[bytes] = []
        self.offsets: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in pieces:
            self.add(piece)

    def add(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.offsets.append(len(self.text))
        self.text += self._decoder.decode(piece)

    def finish(self) -> None:
        """Ends the text. An incomplete last character becomes a replacement character."""
        self.text += self._decoder.decode(b"", final=True)

    def cut(self, end: int, n_least: int) -> None:
        """Keeps the first `end` characters and the tokens that begin in them, but at least `n_least` tokens."""
        n_tokens = max(n_least, bisect.bisect_left(self.offsets, end))
        self.text, self.pieces, self.offsets = self.text[:end], self.pieces[:n_tokens], self.offsets[:n_tokens]


class _Values:
    """The log-probability of each token of a text except the first, and the likeliest alternatives."""

    def __init__(self, n_top: int | None) -> None:
        self._n_top = n_top
        self._of_token: list[float] = []
        self._top: list[list[tuple[int, float]]] = []

    def add(self, rows: np.ndarray, following: Sequence[int]) -> None:
        """Adds the values of the tokens that follow each row of logits; rows without a following token do not count."""
        if self._n_top is None:
            return
        for row, token in zip(rows, following):
            values = log_softmax(row)
            self._of_token.append(float(values[token]))
            best = np.argpartition(-values, min(self._n_top, len(values) - 1))[: self._n_top]
            self._top.append([(int(i), float(values[i])) for i in best[np.argsort(-values[best], kind="stable")]])

    def as_logprobs(self, vocabulary: Vocabulary, tokens: Sequence[int], text: _Text) -> dict | None:
        """Returns the values of the tokens of a text, which may be fewer than were added."""
        if self._n_top is None:
            return None
        top: list[dict[str, float] | None] = [None]
        for token, value, best in zip(tokens[1:], self._of_token, self._top):
            named = {vocabulary.piece(token).decode(errors="replace"): value}  # includes the token itself
            for other, likelihood in best:
                name = vocabulary.piece(other).decode(errors="replace")
                named[name] = max(likelihood, named.get(name, likelihood))
            top.append(named)
        return {"tokens": [piece.decode(errors="replace") for piece in text.pieces],
                "token_logprobs": [None, *self._of_token[: len(tokens) - 1]], "top_logprobs": top,
                "text_offset": text.offsets}
