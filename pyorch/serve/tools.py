"""Requests that insist on a tool call of a model that cannot be asked for one, and grammars that are too much."""

from __future__ import annotations

import json
import re
from typing import Any

from pyorch.errors import PyorchError
from pyorch.llama.schemas import MAX_NAME, check_grammar
from pyorch.serve import routes
from pyorch.serve.routes import Answer, Request, refusal

# Of the three APIs with tools: OpenAI's chat completions and responses, and Anthropic's messages.
PATHS = ("/v1/chat/completions", "/chat/completions", "/v1/responses", "/responses", "/v1/messages")

_FREE = (None, "auto", "none")  # of "tool_choice", as text or as the type, or mode, of an object

_PATTERNS = (2, 3)  # types of llama-server's grammar_triggers: regular expressions, tried at each token of an answer
_MAX_TRIGGERS = 100
_MAX_TRIGGER = 1000  # characters
_LITERAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escaped character, or a class of characters
_REPETITION = re.compile(r"[*+{]")


def require_template(request: Request) -> Answer | None:
    """Refuses a forced tool call where the chat template has no place for tools: llama-server answers such a request
    with plain text, as if no tool had been required. None: llama-server's answer stands."""
    if b'"tool_choice"' not in request.body:
        return None
    body = request.json()
    if not isinstance(body, dict) or not _is_forced(body.get("tool_choice")) or not body.get("tools"):
        return None
    properties = json.loads(routes.own("/props") or "{}")
    if properties.get("chat_template_caps", {}).get("supports_tool_calls", True):
        return None
    return refusal(400, f'"tool_choice" is {json.dumps(body["tool_choice"])}, and the chat template of this model '
                        'knows no tools: use "auto", a model whose template has them, or one with '
                        "`-- --chat-template-file`")


def _is_forced(choice: Any) -> bool:
    if isinstance(choice, dict):
        return choice.get("mode" if choice.get("type") == "allowed_tools" else "type") not in _FREE
    return choice not in _FREE


def check_grammars(request: Request) -> Answer | None:
    """Refuses a grammar, a trigger of one, or a name of a tool that would take all time, or end llama-server.

    Names of tools become names of rules. None: llama-server's answer stands, which may be another refusal.
    """
    if not any(word in request.body for word in (b"grammar", b"tools", b"\\u")):  # \u may stand for a letter of them
        return None
    body = request.json()
    if not isinstance(body, dict):
        return None
    if isinstance(grammar := body.get("grammar"), str):
        check_grammar(grammar)
    for tool in tools if isinstance(tools := body.get("tools"), list) else []:
        _check_name(tool)
    if isinstance(triggers := body.get("grammar_triggers"), list):
        _check_triggers(triggers)
    return None


def _check_name(tool: Any) -> None:
    of = tool.get("function", tool) if isinstance(tool, dict) else None
    name = of.get("name") if isinstance(of, dict) else None
    if isinstance(name, str) and len(name) > MAX_NAME:
        raise PyorchError(f"the name of a tool has {len(name)} characters, and {MAX_NAME} are allowed")


def _check_triggers(triggers: list[Any]) -> None:
    """A regular expression that repeats something may take without end."""
    if len(triggers) > _MAX_TRIGGERS:
        raise PyorchError(f'"grammar_triggers" has {len(triggers)} triggers, and {_MAX_TRIGGERS} are allowed')
    for trigger in triggers:
        value = trigger.get("value") if isinstance(trigger, dict) else None
        if not isinstance(value, str):
            continue
        if len(value) > _MAX_TRIGGER:
            raise PyorchError(f"a trigger has {len(value)} characters, and {_MAX_TRIGGER} are allowed")
        if trigger.get("type") in _PATTERNS and _REPETITION.search(_LITERAL.sub("", value)):
            raise PyorchError(f"the pattern {json.dumps(value[:100])} of a trigger repeats something (*, + or {{), "
                              "which may take without end: use patterns without repetition")
