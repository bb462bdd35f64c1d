"""Why a request failed: llama-server tells its client that computing did, the engine knows why."""

from __future__ import annotations

import json

from pyorch.llama.managed import ManagedModel
from pyorch.serve.routes import Answer, Handler, Request

# Of llama-server, where prompts are computed.
PATHS = ("/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions", "/responses",
         "/v1/responses", "/v1/messages", "/infill", "/embedding", "/embeddings", "/v1/embeddings", "/rerank",
         "/reranking", "/v1/rerank", "/v1/reranking")

_SAID = '"message":"Compute error."'  # in its JSON, whole or a part of a stream


def explained(managed: ManagedModel) -> Handler:
    """Adds the engine's sentence to what llama-server says of a decode that failed."""

    def explain(request: Request) -> Answer | None:
        why = managed.engine.error() if managed.engine is not None and _SAID in request.own else ""
        if not why:
            return None
        return Answer(request.own.replace(_SAID, f"{_SAID[:-1]} {json.dumps(why)[1:]}"), status=request.own_status)

    return explain
