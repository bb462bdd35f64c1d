"""Refuses requests that llama-server would answer wrongly: forced tool calls without a template for tools, too costly
grammars and schemas, and fields that it ignores."""

from __future__ import annotations

import json
import re
from typing import Any

from pyorch.errors import PyorchError
from pyorch.llama.schemas import MAX_NAME, check_grammar
from pyorch.serve import routes
from pyorch.serve.routes import Answer, Request, refusal

# The paths of the APIs with tools: OpenAI's chat completions and responses, and Anthropic's messages.
PATHS = ("/v1/chat/completions", "/chat/completions", "/v1/responses", "/responses", "/v1/messages")

# The paths of chat completions, where tools are functions.
CHAT_PATHS = ("/v1/chat/completions", "/chat/completions", "/apply-template", "/chat/completions/input_tokens",
              "/v1/chat/completions/input_tokens")
# These paths compute nothing, but make grammars.
COUNTING_PATHS = ("/apply-template", "/chat/completions/input_tokens", "/v1/chat/completions/input_tokens",
                  "/responses/input_tokens", "/v1/responses/input_tokens", "/v1/messages/count_tokens")

_FREE = (None, "auto", "none")  # values of "tool_choice", or of its "type" or "mode"

_MAX_TOOLS = 1000  # the time of their parser grows with the square

_PATTERNS = (2, 3)  # types of grammar_triggers that are regular expressions, tried at each token of an answer
_MAX_TRIGGERS = 100
_MAX_TRIGGER = 1000  # characters
_LITERAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escaped character, or a character class
_REPETITION = re.compile(r"[*+{]")
_CHOICE = re.compile(r"\||(?<!\()\?")  # each may double the ways to match a text
_MAX_CHOICES = 10

_WORDS = (b"grammar", b"tools", b"schema", b"response_format", b"output_", b"\\u")  # \u may encode a letter of a word


def require_template(request: Request) -> Answer | None:
    """Refuses a forced tool call if the chat template does not support tools, or the request has no tool.

    llama-server would answer with plain text, as if no tool were required. None: llama-server answers.
    """
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
                        'does not support tools: use "auto", another model, or another template '
                        "(`-- --chat-template-file`)")


def _is_forced(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return choice not in _FREE
    if choice.get("type") == "allowed_tools":  # chat completions nest the mode in an object
        inner = choice.get("allowed_tools")
        return (inner if isinstance(inner, dict) else choice).get("mode") not in _FREE
    return choice.get("type", "function" if "function" in choice else None) not in _FREE


def check_grammars(request: Request) -> Answer | None:
    """Refuses grammars, triggers and tools that would take too long or end llama-server.

    Also refuses grammars and schemas in a form that llama-server would ignore. Names of tools become names of rules.
    None: llama-server answers, perhaps with another refusal.
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
    """Translates the named tool, and "text" of the Responses API, to forms that llama-server does not ignore.

    If the request names tools, its other tools are removed. None: the request stays as it is.
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
    elif kind == "none":  # the form of Anthropic's API
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
    """Returns "text" of the Responses API as "response_format" of chat completions."""
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
    """Refuses chat tools that are no functions with a name, for which llama-server reports an internal error."""
    body = request.json() if b"tools" in request.body else None
    for tool in body.get("tools") or [] if isinstance(body, dict) else []:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PyorchError(f'{json.dumps(tool)[:200]} is no tool: give {{"type": "function", "function": {{"name": '
                              '"...", "parameters": {...}}}')
    return None


def _of_kind(body: dict[str, Any], name: str, kind: type, what: str) -> Any:
    """Returns an optional part of a request."""
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise PyorchError(f'"{name}" is {json.dumps(value)[:200]}, and must be {what}')
    return value


def _check_form(form: dict[str, Any] | None) -> None:
    """Checks "response_format"."""
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
    """Refuses regular expressions that may never end: with repetitions or many alternatives."""
    if len(triggers) > _MAX_TRIGGERS:
        raise PyorchError(f'"grammar_triggers" has {len(triggers)} triggers, and {_MAX_TRIGGERS} are allowed')
    n_choices = 0
    for trigger in triggers:
        kind, value = (trigger.get(name) if isinstance(trigger, dict) else None for name in ("type", "value"))
        if isinstance(kind, (float, bool)):  # llama-server would round it
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
                              "which may never end: use patterns without repetition")
        n_choices += len(_CHOICE.findall(pattern))
    if n_choices > _MAX_CHOICES:
        raise PyorchError(f"the patterns of triggers have {n_choices} alternatives (| or ?), and {_MAX_CHOICES} are "
                          "allowed")
