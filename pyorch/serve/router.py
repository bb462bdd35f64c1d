"""Answers of llama-server's router about several models, by which llama-server's chat page chooses among them.

The page reads GET /props to learn that there is a router, GET /v1/models for the models, and GET /models/sse for
changes of their states. It continues an answer after a reload by the conversation's id: see Conversations.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence

from pyorch.errors import PyorchError
from pyorch.serve.address import Address
from pyorch.serve.model_process import Model
from pyorch.serve.models import Models, NotLoaded

ID = "X-Conversation-Id"  # the header with the conversation's id, which outlives the request's connection
MOST_ID = 256  # characters

_POLL_SECONDS = 0.2
_ALIVE_SECONDS = 15.0  # a comment after this time fails if the client has disconnected
_MAX_CONVERSATIONS = 4096

# llama-server's router answers so where no model is named; "role" opens the page's menu of models.
_PROPERTIES = {"role": "router", "max_instances": 0, "models_autoload": True, "model_alias": "pyorch",
               "model_path": "none", "default_generation_settings": {"params": {}, "n_ctx": 0}, "ui_settings": {},
               "cors_proxy_enabled": False}


def properties(models: Models) -> dict:
    """Returns the properties of the server and of the model that was used last."""
    for model in models.loaded()[:1]:
        text = None
        try:
            with models.looked_at(model) as port:
                text = Address("127.0.0.1", port, "").get("/props", models.key)
        except NotLoaded:  # unloaded meanwhile
            pass
        return {**_PROPERTIES, **json.loads(text or "{}"), "role": "router"}
    return _PROPERTIES


def load(models: Models, model: Model) -> None:
    """Begins to load a model, in addition to others or in their place. states() tells how it ends."""
    def held() -> None:
        try:
            with models.held(model):
                pass
        except PyorchError:
            pass  # states() reports it

    threading.Thread(target=held, daemon=True).start()


def states(models: Models) -> Iterator[str]:
    """Yields server-sent events: the state of each model, then each change; comments while nothing changes."""
    said: dict[str, tuple[str, int]] = {}
    spoken = 0.0
    while not models.ending.is_set():
        now = {name: (model.state, model.failures) for name, model in models.by_name.items()}
        events = [{"model": name, "event": "status_change", "data": {
            "status": state, "exit_code": int(name in said and failures > said[name][1])}}
            for name, (state, failures) in now.items() if said.get(name) != (state, failures)]
        if said and now.keys() != said.keys():
            events.append({"model": "", "event": "models_reload"})
        said = now
        if events or time.monotonic() >= spoken + _ALIVE_SECONDS:
            spoken = time.monotonic()
            yield "".join(f"data: {json.dumps(event)}\n\n" for event in events) or ":\n\n"
        models.ending.wait(_POLL_SECONDS)


class Conversations:
    """Which model answers a conversation: llama-server keeps an answer, and a reloaded page asks for its rest."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[Model, object]] = {}  # the oldest first
        self._changing = threading.Lock()

    def begin(self, conversation: str, model: Model) -> object:
        """Returns a ticket of the request that the model will answer."""
        ticket = object()
        with self._changing:
            self._models.pop(conversation, None)
            self._models[conversation] = model, ticket
            while len(self._models) > _MAX_CONVERSATIONS:
                del self._models[next(iter(self._models))]
        return ticket

    def is_wanted(self, conversation: str, ticket: object) -> bool:
        """Returns whether the answer was not stopped, for example while its model was loaded."""
        return self._models.get(conversation, (None, None))[1] is ticket

    def model(self, conversation: str) -> Model | None:
        return self._models.get(conversation, (None,))[0]

    def end(self, conversation: str) -> Model | None:
        """Forgets a conversation; returns its model."""
        with self._changing:
            return self._models.pop(conversation, (None,))[0]

    def running(self, models: Models, asked: Sequence[str]) -> list[dict]:
        """Returns llama-server's entries for the asked conversations that have an answer."""
        by_model: dict[str, list[str]] = {}
        for conversation in asked:
            model = self.model(conversation)
            if model is not None:
                by_model.setdefault(model.name, []).append(conversation)
        found = []
        for name, of_model in by_model.items():
            try:
                with models.looked_at(models.by_name[name]) as port:
                    text = Address("127.0.0.1", port, "").post(
                        "/v1/streams/lookup", json.dumps({"conversation_ids": of_model}), models.key)
            except (KeyError, NotLoaded):
                continue
            found += json.loads(text or "[]")
        return found
