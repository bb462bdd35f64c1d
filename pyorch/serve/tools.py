"""Requests that insist on a tool call of a model that cannot be asked for one, grammars and schemas that are too much,
and what llama-server would ignore."""

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

# Of chat completions, whose tools are functions.
CHAT_PATHS = ("/v1/chat/completions", "/chat/completions", "/apply-template", "/chat/completions/input_tokens",
              "/v1/chat/completions/input_tokens")
# Nothing is computed there, but grammars are made.
COUNTING_PATHS = ("/apply-template", "/chat/completions/input_tokens", "/v1/chat/completions/input_tokens",
                  "/responses/input_tokens", "/v1/responses/input_tokens", "/v1/messages/count_tokens")

_FREE = (None, "auto", "none")  # of "tool_choice", as text or as the type, or mode, of an object

_MAX_TOOLS = 1000  # their parser takes a time that grows with the square

_PATTERNS = (2, 3)  # types of llama-server's grammar_triggers: regular expressions, tried at each token of an answer
_MAX_TRIGGERS = 100
_MAX_TRIGGER = 1000  # characters
_LITERAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escaped character, or a class of characters
_REPETITION = re.compile(r"[*+{]")
_CHOICE = re.compile(r"\||(?<!\()\?")  # each may double the ways of reading a text
_MAX_CHOICES = 10

_WORDS = (b"grammar", b"tools", b"schema", b"response_format", b"output_", b"\\u")  # \u may stand for a letter of them


def require_template(request: Request) -> Answer | None:
    """Refuses a forced tool call where the chat template has no place for tools: llama-server answers such a request
    with plain text, as if no tool had been required; and where no tool is given. None: llama-server's answer stands."""
    if not any(word in request.body for word in (b"tool_choice", b"\\u")):
        return None
    body = request.json()
    if not isinstance(body, dict) or not _is_forced(body.get("tool_choice")):
        return None
    if not body.get("tools"):
        return refusal(400, f'"tool_choice" is {json.dumps(body["tool_choice"])}, and the request has no "tools"')
    properties = json.loads(routes.own("/props") or "{}")
    if properties.get("chat_template_caps", {}).get("supports_tool_calls", True):
        return None
    return refusal(400, f'"tool_choice" is {json.dumps(body["tool_choice"])}, and the chat template of this model '
                        'knows no tools: use "auto", a model whose template has them, or one with '
                        "`-- --chat-template-file`")


def _is_forced(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return choice not in _FREE
    if choice.get("type") == "allowed_tools":  # chat completions have the mode in an object of its own
        inner = choice.get("allowed_tools")
        return (inner if isinstance(inner, dict) else choice).get("mode") not in _FREE
    return choice.get("type", "function" if "function" in choice else None) not in _FREE


def check_grammars(request: Request) -> Answer | None:
    """Refuses a grammar, a trigger of one, or tools that would take all time, or end llama-server; also a grammar or a
    schema of a form that llama-server takes for none.

    Names of tools become names of rules. None: llama-server's answer stands, which may be another refusal.
    """
    if not any(word in request.body for word in _WORDS):
        return None
    body = request.json()
    if not isinstance(body, dict):
        return None
    if isinstance(grammar := _of_kind(body, "grammar", str, "text"), str):
        check_grammar(grammar)
    _of_kind(body, "json_schema", dict, "an object")
    _check_form(_of_kind(body, "response_format", dict, "an object"))
    config = body.get("output_config")
    if body.get("output_format") or (isinstance(config, dict) and config.get("format")):
        raise PyorchError('"output_format", and "format" in "output_config", are not served here: give a schema as '
                          '"response_format" to /v1/chat/completions')
    tools = _of_kind(body, "tools", list, "a list") or []
    if len(tools) > _MAX_TOOLS:
        raise PyorchError(f'"tools" has {len(tools)} tools, and {_MAX_TOOLS} are allowed')
    for tool in tools:
        _check_name(tool)
    _check_triggers(_of_kind(body, "grammar_triggers", list, "a list") or [])
    return None


def translate(request: Request) -> Answer | None:
    """Asks in words that llama-server heeds: it ignores which tool is named, and the "text" of the Responses API.

    If tools are named, the request has no others from now on. None: the request stands as it is.
    """
    if not any(word in request.body for word in (b"tool_choice", b'"text"', b"\\u")):
        return None
    body = request.json()
    if not isinstance(body, dict):
        return None
    changed = _chosen_tools(body) | (_response_format(body) if "input" in body else {})
    return routes.instead(body | changed) if changed else None


def _chosen_tools(body: dict[str, Any]) -> dict[str, Any]:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not isinstance(choice, dict) or not isinstance(tools, list):
        return {}
    kind = choice.get("type", "function" if "function" in choice else None)
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools")
        inner = inner if isinstance(inner, dict) else choice
        named, mode = _of_kind(inner, "tools", list, "a list") or [], inner.get("mode", "auto")
    elif kind == "none":  # of Anthropic's API
        return {"tools": []}
    elif kind in ("function", "tool"):
        named, mode = [choice], {"type": "any"} if kind == "tool" else "required"
    else:
        return {}
    names = [_name_of(one) for one in named]
    known = {_name_of(tool) for tool in tools}
    for name in names:
        if name is None or name not in known:
            raise PyorchError(f'"tool_choice" is {json.dumps(choice)[:200]}, and "tools" has no {json.dumps(name)}')
    return {"tools": [tool for tool in tools if _name_of(tool) in names], "tool_choice": mode}


def _name_of(tool: Any) -> str | None:
    of = tool.get("function", tool) if isinstance(tool, dict) else None
    name = of.get("name") if isinstance(of, dict) else None
    return name if isinstance(name, str) else None


def _response_format(body: dict[str, Any]) -> dict[str, Any]:
    """What "text" of responses says, as chat completions say it."""
    form = _of_kind(_of_kind(body, "text", dict, "an object") or {}, "format", dict, "an object")
    if form is None or form.get("type") == "text":
        return {}
    if form.get("type") == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise PyorchError(f'"format" of "text" is {json.dumps(form)[:200]}, and must be {{"type": "text"}}, {{"type": '
                          '"json_object"} or {"type": "json_schema", "schema": {...}}')
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}


def require_functions(request: Request) -> Answer | None:
    """Refuses tools of chat completions that are no functions with a name: llama-server calls them its own error."""
    body = request.json() if b"tools" in request.body else None
    for tool in body.get("tools") or [] if isinstance(body, dict) else []:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PyorchError(f'{json.dumps(tool)[:200]} is no tool: give {{"type": "function", "function": {{"name": '
                              '"...", "parameters": {...}}}')
    return None


def _of_kind(body: dict[str, Any], name: str, kind: type, what: str) -> Any:
    """Of a request, a part that may be left out."""
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise PyorchError(f'"{name}" is {json.dumps(value)[:200]}, and must be {what}')
    return value


def _check_form(form: dict[str, Any] | None) -> None:
    """Of "response_format"."""
    if form is None:
        return
    if not isinstance(kind := form.get("type"), str):
        raise PyorchError(f'the "type" of "response_format" is {json.dumps(kind)[:200]}, and must be "text", '
                          '"json_object" or "json_schema"')
    holder = _of_kind(form, "json_schema", dict, "an object") if kind == "json_schema" else form
    if holder is None:
        raise PyorchError('"response_format" is "json_schema", and has no "json_schema": {"schema": {...}}')
    if kind != "text":
        _of_kind(holder, "schema", dict, "an object")


def _check_name(tool: Any) -> None:
    name = _name_of(tool)
    if name is not None and len(name) > MAX_NAME:
        raise PyorchError(f"the name of a tool has {len(name)} characters, and {MAX_NAME} are allowed")


def _check_triggers(triggers: list[Any]) -> None:
    """A regular expression that repeats something, or has many alternatives, may take without end."""
    if len(triggers) > _MAX_TRIGGERS:
        raise PyorchError(f'"grammar_triggers" has {len(triggers)} triggers, and {_MAX_TRIGGERS} are allowed')
    n_choices = 0
    for trigger in triggers:
        kind, value = (trigger.get(name) if isinstance(trigger, dict) else None for name in ("type", "value"))
        if isinstance(kind, (float, bool)):  # llama-server rounds it
            raise PyorchError(f'the "type" of a trigger is {json.dumps(kind)}, and must be a whole number')
        if not isinstance(value, str):
            continue
        if len(value) > _MAX_TRIGGER:
            raise PyorchError(f"a trigger has {len(value)} characters, and {_MAX_TRIGGER} are allowed")
        if kind not in _PATTERNS:
            continue
        pattern = _LITERAL.sub("", value)
        if _REPETITION.search(pattern):
            raise PyorchError(f"the pattern {json.dumps(value[:100])} of a trigger repeats something (*, + or {{), "
                              "which may take without end: use patterns without repetition")
        n_choices += len(_CHOICE.findall(pattern))
    if n_choices > _MAX_CHOICES:
        raise PyorchError(f"the patterns of triggers have {n_choices} alternatives (| or ?), and {_MAX_CHOICES} are "
                          "allowed")
