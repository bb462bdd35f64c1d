"""Why a request failed: llama-server tells its client that computing did, the engine knows why."""

from __future__ import annotations

import json
import os

from pyorch.errors import without_folders
from pyorch.llama.managed import ManagedModel
from pyorch.runtime import disk
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.routes import Answer, Handler, Request, refusal

# Of llama-server, where prompts are computed.
TEXT_PATHS = ("/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions",
              "/responses", "/v1/responses", "/v1/messages", "/infill")
PATHS = (*TEXT_PATHS, "/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank",
         "/v1/reranking")

GOES_ON = "the server loads the model again and goes on without it"  # where its device is lost

# Of the engine, where no server of a cluster is there that has an expert which this one lacks: another server of the
# cluster may answer, or this one later.
NOBODY_HAS_IT = "no server that has it answers"

_SAID = '"message":"Compute error."'  # in its JSON, whole or a part of a stream
_UNAVAILABLE = (('"code":500', '"code":503'), ('"type":"server_error"', '"type":"unavailable_error"'))


def refuse_text(name: str, managed: ManagedModel) -> tuple[Handler, ...]:
    """Of an encoder, what refuses to make text. llama-server would compute the prompt, and call it its own error."""
    if not managed.map.is_encoder:
        return ()
    sentence = (f'"{name}" makes embeddings and no text: ask /v1/embeddings, of a server that was started with '
                "`-- --embeddings`")
    return (lambda _: refusal(400, sentence),)


def explained(managed: ManagedModel) -> Handler:
    """Adds the reason to what llama-server says of a decode that failed: the engine's sentence, or that the device is
    lost. Where another server is missing the status is 503."""

    def explain(request: Request) -> Answer | None:
        why = reason(managed) if _SAID in request.own else ""
        if not why:
            return None
        said, status = request.own.replace(_SAID, f"{_SAID[:-1]} {json.dumps(why)[1:]}"), request.own_status
        if NOBODY_HAS_IT in why:
            for before, after in _UNAVAILABLE:
                said = said.replace(before, after)
            status = 503 if status == 500 else status  # a stream has begun with 200
        return Answer(said, status=status)

    return explain


def reason(managed: ManagedModel) -> str:
    """Of the decode that failed last, "" where nothing is known."""
    if managed.devices is not None and managed.devices.is_lost():
        return f"{managed.lost()}; {GOES_ON}"
    return without_folders(managed.engine.error(), files_of(managed.map)) if managed.engine is not None else ""


def files_of(model_map: ModelMap) -> list[str]:
    """Those that a model is read from."""
    return [*map(os.fspath, model_map.shards), *(disk.paths_of(model_map) if model_map.layers else ())]
