"""The tokens of the served model, and routes for harnesses that ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as llama

from pyorch.serve.routes import Answer, Request, as_json, refusal

_PIECE_BYTES = 64


class Vocabulary:
    """The vocabulary of a llama_model *, which must outlive it."""

    def __init__(self, model: int) -> None:
        self._model = model
        self._vocab = llama.llama_model_get_vocab(model)
        self.n_tokens = llama.llama_vocab_n_tokens(self._vocab)
        self.adds_bos = bool(llama.llama_vocab_get_add_bos(self._vocab))

    def tokenize(self, text: str, bos: bool) -> list[int]:
        """Returns the tokens of a text. Names of special tokens become these tokens; `bos` adds the first token."""
        data = text.encode()
        tokens = (llama.llama_token * (len(data) + 8))()
        n = llama.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), False, True)
        start = [llama.llama_vocab_bos(self._vocab)] if bos else []
        found = list(tokens[:n])
        return found if found[:1] == start else start + found

    def piece(self, token: int) -> bytes:
        """Returns the bytes of a token; for a special token, its name."""
        size = _PIECE_BYTES
        while True:
            buffer = bytes(size)
            n = llama.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer[:n]
            size = -n

    def is_end(self, token: int) -> bool:
        return llama.llama_vocab_is_eog(self._vocab, token)

    def name(self, token: int) -> str | None:
        """Returns the name of a special token; None if the number is negative: the model has no such token."""
        return self.piece(token).decode(errors="replace") if token >= 0 else None

    def info(self) -> dict[str, Any]:
        """Returns the answer to GET /tokenizer_info."""
        template = llama.llama_model_chat_template(self._model, None)
        return {
            "bos_token": self.name(llama.llama_vocab_bos(self._vocab)),
            "eos_token": self.name(llama.llama_vocab_eos(self._vocab)),
            "pad_token": self.name(llama.llama_vocab_pad(self._vocab)),
            "add_bos_token": self.adds_bos,
            "chat_template": template.decode(errors="replace") if template else None,
        }


class TokenizerRoutes:
    """Routes of vLLM that harnesses use: /tokenizer_info, and /tokenize and /detokenize with "prompt".

    llama-server's /tokenize and /detokenize have "content" instead.
    """

    def __init__(self, context: Callable[[], int]) -> None:
        self._context = context

    def info(self, _: Request) -> Answer:
        """Answers GET /tokenizer_info."""
        vocabulary = self._vocabulary()
        return as_json(vocabulary.info()) if vocabulary is not None else refusal(503, "the model is not loaded yet")

    def tokenize(self, request: Request) -> Answer | None:
        """Answers POST /tokenize. None: llama-server answers."""
        body = _object(request)
        vocabulary = self._vocabulary()
        if vocabulary is None or body is None or "content" in body or not isinstance(body.get("prompt"), str):
            return None
        tokens = vocabulary.tokenize(body["prompt"], vocabulary.adds_bos and bool(body.get("add_special_tokens", True)))
        return as_json({"tokens": tokens, "count": len(tokens)})

    def detokenize(self, request: Request) -> Answer | None:
        """Answers POST /detokenize: llama-server's answer, with the text also as "prompt"."""
        body = _object(request)
        vocabulary = self._vocabulary()
        tokens = body.get("tokens") if body is not None else None
        if vocabulary is None or request.own_status != 200 or not _are_tokens(tokens, vocabulary):
            return None
        text = b"".join(map(vocabulary.piece, tokens)).decode(errors="replace")
        return as_json({**json.loads(request.own), "prompt": text})

    def _vocabulary(self) -> Vocabulary | None:
        context = self._context()
        return Vocabulary(llama.llama_get_model(context)) if context else None


def _are_tokens(value: Any, vocabulary: Vocabulary) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < vocabulary.n_tokens for token in value)


def _object(request: Request) -> dict[str, Any] | None:
    body = request.json()
    return body if isinstance(body, dict) else None
