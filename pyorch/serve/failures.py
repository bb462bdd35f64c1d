"""Why a request failed: llama-server tells its client that computing did, the engine knows why."""

from __future__ import annotations

import json

from pyorch.llama.managed import ManagedModel
from pyorch.serve.routes import Answer, Handler, Request

# Of llama-server, where prompts are computed.
PATHS = ("/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions", "/responses",
         "/v1/responses", "/v1/messages", "/infill", "/embedding", "/embeddings", "/v1/embeddings", "/rerank",
         "/reranking", "/v1/rerank", "/v1/reranking")

GOES_ON = "the server loads the model again and goes on without it"  # where its device is lost

_SAID = '"message":"Compute error."'  # in its JSON, whole or a part of a stream


def explained(managed: ManagedModel) -> Handler:
    """Adds the reason to what llama-server says of a decode that failed: the engine's sentence, or that the device is
    lost."""

    def explain(request: Request) -> Answer | None:
        why = reason(managed) if _SAID in request.own else ""
        if not why:
            return None
        return Answer(request.own.replace(_SAID, f"{_SAID[:-1]} {json.dumps(why)[1:]}"), status=request.own_status)

    return explain


def reason(managed: ManagedModel) -> str:
    """Of the decode that failed last, "" where nothing is known."""
    if managed.devices is not None and managed.devices.is_lost():
        return f"{managed.lost()}; {GOES_ON}"
    return managed.engine.error() if managed.engine is not None else ""
