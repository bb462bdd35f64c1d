"""Adds the engine's reason to llama-server's answer for a failed decode."""

from __future__ import annotations

import json
import os

from pyorch.errors import without_folders
from pyorch.llama.managed import ManagedModel
from pyorch.runtime import disk
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.routes import Answer, Handler, Request, refusal

# The paths of llama-server that compute prompts.
TEXT_PATHS = ("/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions",
              "/responses", "/v1/responses", "/v1/messages", "/infill")
PATHS = (*TEXT_PATHS, "/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank",
         "/v1/reranking")

GOES_ON = "the server loads the model again and goes on without it"  # after a device is lost

# The engine's message if no server of a cluster has an absent expert. Another server of the cluster may answer the
# request, or this one may later.
NOBODY_HAS_IT = "no server that has it answers"

_SAID = '"message":"Compute error."'  # in llama-server's JSON, also in a chunk of a stream
_UNAVAILABLE = (('"code":500', '"code":503'), ('"type":"server_error"', '"type":"unavailable_error"'))


def refuse_text(name: str, managed: ManagedModel) -> tuple[Handler, ...]:
    """Returns handlers that refuse completions if the model is an encoder.

    llama-server would compute the prompt and report an internal error.
    """
    if not managed.map.is_encoder:
        return ()
    sentence = (f'"{name}" makes embeddings and no text: ask /v1/embeddings, of a server that was started with '
                "`-- --embeddings`")
    return (lambda _: refusal(400, sentence),)


def explained(managed: ManagedModel) -> Handler:
    """Returns a handler that adds the reason to llama-server's error for a failed decode.

    The reason is the engine's message, or that the device is lost. If another server is missing, the status is 503.
    """

    def explain(request: Request) -> Answer | None:
        why = reason(managed) if _SAID in request.own else ""
        if not why:
            return None
        said, status = request.own.replace(_SAID, f"{_SAID[:-1]} {json.dumps(why)[1:]}"), request.own_status
        if NOBODY_HAS_IT in why:
            for before, after in _UNAVAILABLE:
                said = said.replace(before, after)
            status = 503 if status == 500 else status  # a stream has already sent 200
        return Answer(said, status=status)

    return explain


def reason(managed: ManagedModel) -> str:
    """Returns the reason of the last failed decode, "" if it is unknown."""
    if managed.devices is not None and managed.devices.is_lost():
        return f"{managed.lost()}; {GOES_ON}"
    return without_folders(managed.engine.error(), files_of(managed.map)) if managed.engine is not None else ""


def files_of(model_map: ModelMap) -> list[str]:
    """Returns the files of a model."""
    return [*map(os.fspath, model_map.shards), *(disk.paths_of(model_map) if model_map.layers else ())]
