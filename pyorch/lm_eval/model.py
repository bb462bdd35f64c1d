"""The model "pyorch" of lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from pyorch.errors import PyorchError
from pyorch.processes import started

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_LOG = logging.getLogger(__name__)

_N_PARALLEL = 4  # texts generated at once with --batch_size auto
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


class PyorchLM(TemplateLM):
    """A model under a budget, in its own process.

    Log-likelihoods equal those of `pyorch eval arc`: consecutive requests with the same context share it, and as many
    as fit are computed at once, whatever batch_size is.

    Args:
        model_args: See pyorch.eval.answering.
        batch_size: Texts to generate at once, or auto.
        device: Given by the harness and ignored, as max_batch_size is.

    Raises:
        PyorchError: An argument is not valid, or the model cannot be loaded.
    """

    def __init__(
        self, batch_size: int | str | None = 1, device: str | None = None, max_batch_size: int | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__()
        self._n_parallel = _n_parallel(batch_size)
        self._process = _Process(model_args)
        facts = self._process.facts
        self._path, self._max_length, self._max_gen_toks, self._bos, self._eos, self._adds_bos, self._template = (
            facts[name] for name in ("path", "max_length", "max_gen_toks", "bos", "eos", "adds_bos", "template"))
        self._is_chat = False  # texts come from the template, which writes special tokens by name

    @property
    def eot_token_id(self) -> int:
        if self._eos is None:
            raise PyorchError(f"{self._path} has no token that ends a text, which this task needs")
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self._bos if self._bos is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens of a text, including generated ones."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate if a task does not say."""
        return self._max_gen_toks

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Tokenizes with the model's tokenizer, including its first token if it adds one."""
        return self._tokenize([string], add_special_tokens)[0]

    def _tokenize(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        # A template writes the first token of a text itself.
        wanted = not self._is_chat if add_special_tokens is None else add_special_tokens
        return list(self._process.ask("tokenize", list(texts), self._adds_bos and wanted, self._is_chat))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        pairs = [self._truncated(context, continuation) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = []
        with tqdm(total=len(pairs), desc="Log-likelihoods", disable=disable_tqdm) as bar:
            for part in self._process.ask("likelihoods", pairs):
                for result in part:
                    key = requests[len(results)][0]
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, result)
                    results.append(result)
                bar.update(len(part))
        return results

    def _truncated(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Returns the end of a text that is too long. The continuation is cut last."""
        if not continuation:
            raise PyorchError("a continuation has no token: it cannot be judged")
        # The last token needs no computation after it.
        context = (context + continuation)[-(self._max_length + 1):][: -len(continuation)]
        if not context:
            raise PyorchError(f"a continuation has {len(continuation)} tokens, and max_length is {self._max_length}: "
                              "give more")
        return context, continuation

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns log-likelihoods of whole texts, in windows of max_length tokens."""
        texts = [request.args[0] for request in requests]
        windows = []
        for index, tokens in enumerate(self._tokenize(texts, add_special_tokens=False)):
            rolling = get_rolling_token_windows(
                tokens, prefix_token=self.prefix_token_id, max_seq_len=self._max_length, context_len=1)
            windows += [(index, *make_disjoint_window(pair)) for pair in rolling]
        found = self._loglikelihood_tokens([(None, *pair) for _, *pair in windows], disable_tqdm=disable_tqdm)
        sums = [0.0] * len(texts)
        for (index, *_), (log_likelihood, _greedy) in zip(windows, found):
            sums[index] += log_likelihood
        for text, total in zip(texts, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues texts, batch_size of them at once."""
        if not requests:
            return []
        contexts = self._tokenize([request.args[0] for request in requests])
        asked = [self._request(tokens, request.args[1]) for request, tokens in zip(requests, contexts)]
        results = [""] * len(requests)
        with tqdm(total=len(requests), desc="Texts", disable=disable_tqdm) as bar:
            for index, text in self._process.ask("generate", asked, self._n_parallel):
                results[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update(1)
        return results

    def _request(self, context: list[int], gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of pyorch.eval.generation.Request."""
        wanted = normalize_gen_kwargs(gen_kwargs, self._max_gen_toks)
        known = {"do_sample", "until", "max_gen_toks", *_SAMPLING}
        if unknown := sorted(name for name, value in wanted.items() if name not in known and value is not None):
            raise PyorchError(f'"{unknown[0]}" is not known for generating text: use {", ".join(sorted(known))}')
        n_context = self._max_length - wanted["max_gen_toks"]
        if n_context < 1:
            raise PyorchError(f"{wanted['max_gen_toks']} tokens are to be generated, and max_length is "
                              f"{self._max_length}: give more")
        if len(context) > n_context:
            _LOG.warning("a prompt of %d tokens is cut to its last %d: max_length is %d",
                         len(context), n_context, self._max_length)
        sampling = {name: wanted[name] for name in _SAMPLING if wanted.get(name) is not None}
        return {"tokens": tuple(context[-n_context:] or [self.prefix_token_id]), "max_tokens": wanted["max_gen_toks"],
                "stop": tuple(wanted["until"]), **sampling}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Formats a conversation with the template of the model's file."""
        self._is_chat = True
        (text,) = self._process.ask("render", chat_history, add_generation_prompt)
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template of the model's file, the only one."""
        return self._template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Returns the key of the harness's cache of requests: the name of the file and its template."""
        template = hashlib.sha256((self._template or "").encode()).hexdigest()[:16]
        return f"{Path(self._path).name}-{template}"

    def get_model_info(self) -> dict[str, Any]:
        """Returns facts that the harness stores with the results: budget and replaced experts."""
        (stats,) = self._process.ask("stats")
        return stats


def _n_parallel(batch_size: int | str | None) -> int:
    if batch_size is None or str(batch_size).startswith("auto"):
        return _N_PARALLEL
    try:
        n = int(batch_size)
    except ValueError:
        n = 0
    if n < 1:
        raise PyorchError(f"batch_size is {batch_size}, and must be a whole number from 1, or auto")
    return n


class _Process:
    """The process of the model, and its connection. facts: see pyorch.eval.answering."""

    def __init__(self, model_args: dict[str, Any]) -> None:
        # It ends when our end of the connection closes, with this process.
        self._child, self._ours = started([sys.executable, "-m", "pyorch.eval.answering"])
        weakref.finalize(self, _end, self._ours, self._child, os.getpid())
        self._ours.send(model_args)
        self.facts: dict[str, Any] = self._receive()[1]

    def ask(self, name: str, *values: object) -> Iterator[Any]:
        """Yields the parts of an answer. The caller must take all of them.

        Raises:
            PyorchError: The process refused the request, or ended.
        """
        self._ours.send((name, values))
        return self._parts()

    def _parts(self) -> Iterator[Any]:
        while (message := self._receive())[0] != "end":
            yield message[1]

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, value = self._ours.recv()
        except (EOFError, ConnectionResetError):
            raise PyorchError(f"the process that has the model ended with status {self._child.wait()}") from None
        if kind == "refused":
            raise PyorchError(value)
        return kind, value


def _end(connection: Connection, child: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked since
        connection.close()
        child.wait()
