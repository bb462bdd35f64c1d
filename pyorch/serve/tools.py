"""Chat requests that insist on a tool call, of a model that cannot be asked for one."""

from __future__ import annotations

import json

from pyorch.serve import routes
from pyorch.serve.routes import Answer, Request, refusal

PATHS = ("/v1/chat/completions", "/chat/completions")


def require_template(request: Request) -> Answer | None:
    """Refuses "tool_choice": "required" where the chat template has no place for tools: llama-server answers such a
    request with plain text, as if no tool had been required. None: llama-server's answer stands."""
    if b'"tool_choice"' not in request.body:
        return None
    body = request.json()
    if not isinstance(body, dict) or body.get("tool_choice") in (None, "auto", "none") or not body.get("tools"):
        return None
    properties = json.loads(routes.own("/props") or "{}")
    if properties.get("chat_template_caps", {}).get("supports_tool_calls", True):
        return None
    return refusal(400, f'"tool_choice" is {json.dumps(body["tool_choice"])}, and the chat template of this model '
                        'knows no tools: use "auto", a model whose template has them, or one with '
                        "`-- --chat-template-file`")
