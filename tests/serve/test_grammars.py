"""Grammars and JSON schemas of requests: what cannot be one, or costs too much, is refused, and the server lives."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from models import PROMPT
from servers import TEMPLATE_WITH_TOOLS, ServerProcess, pyorch_serve

from pyorch.errors import PyorchError
from pyorch.llama.schemas import _Walk, check_ranges, check_schema

MESSAGES = [{"role": "user", "content": PROMPT}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    """Its chat template knows tools, whose schemas become a grammar."""
    directory = tmp_path_factory.mktemp("server")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE_WITH_TOOLS)
    command = pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--chat-template-file", str(template))
    server = ServerProcess(command, directory / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def refused(server: ServerProcess, path: str, body: dict[str, Any] | bytes) -> str:
    """The sentence."""
    status, said = server.post(path, body)
    assert status == 400, said
    assert server.get("/health") == {"status": "ok"}
    return json.loads(said)["error"]["message"]


def requests_with(schema: object) -> dict[str, dict[str, Any]]:
    """Each way in which a schema comes, by its path and parameter."""
    tool = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    chat = {"messages": MESSAGES, "max_tokens": 4}
    return {
        "/completion": {"prompt": PROMPT, "n_predict": 4, "json_schema": schema},
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 4, "json_schema": schema},
        "/v1/chat/completions": {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "/v1/chat/completions#object": {**chat, "response_format": {"type": "json_object", "schema": schema}},
        "/v1/chat/completions#tools": {**chat, "tools": [{"type": "function", "function": {
            "name": "f", "parameters": tool}}]},
        "/v1/responses#tools": {"input": PROMPT, "max_output_tokens": 4, "tools": [{
            "type": "function", "name": "f", "parameters": tool}]},
        "/v1/messages#tools": {**chat, "tools": [{"name": "f", "input_schema": tool}]},
    }


def nested(schema: object, n: int, kind: object = "array") -> object:
    for _ in range(n):
        schema = {"type": kind, "items": schema}
    return schema


@pytest.mark.parametrize(("schema", "sentence"), [
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength is 5, and maxLength is 2"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "minItems is 3, and maxItems is 2"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum is 3, and maximum is 2"),
    ({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 2}, "exclusiveMinimum is 2"),
    ({"type": "string", "pattern": "^[z-a]$"}, "the range z-a ends below its beginning"),
    ({"type": "string", "pattern": "^(a$"}, "unbalanced parentheses"),
    ({"enum": [f"value {i}" for i in range(100_000)]}, '"enum" with 100000 values'),
    ({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(3000)}}, "3000 properties"),
    ({"type": "object", "properties": {"é" * 300_000: {"type": "null"}}}, "whose name has 300000 characters"),
    (nested({"type": "null"}, 150), "nested more than 100 levels deep"),
    (nested({"type": "null"}, 40, ["array", "object"]), "more than 10000 parts"),  # it doubles with each level
    ({"allOf": [{"$ref": "#/properties/x"}], "properties": {"x": {"$ref": "#/properties/x"}}}, "leads back to itself"),
    ({"type": "colour"}, "unrecognized type colour"),
    ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, "no integer is between exclusiveMinimum 2 and"),
    ({"type": "string", "pattern": r"^[\x7a-\u0061]$"}, r"the range \x7a-\u0061 ends below its beginning"),
    ({"type": "string", "minLength": 1 << 32}, "minLength 4294967296, and at most 2147483647"),
    ({"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"additionalProperties": {"$ref": f"#/$defs/d{i + 1}"}}
                                      for i in range(4900)}}, "levels where references lead, and 4000 are allowed"),
    ({"$ref": "#/elsewhere/0", "elsewhere": [{"type": "string", "pattern": "^[z-a]$"}]}, "the range z-a ends"),
])
def test_a_schema_that_allows_nothing_or_costs_too_much_is_refused_wherever_it_comes(
    server: ServerProcess, schema: dict, sentence: str
):
    for path, body in requests_with(schema).items():
        if "$ref" in str(schema) and "#tools" in path:  # where the reference names another place
            continue
        said = refused(server, path.partition("#")[0], body)
        assert sentence in said, (path, said)


def test_references_are_followed_once(monkeypatch: pytest.MonkeyPatch):
    """Of a chain, each link leads to the last."""
    n, followed, at = 1000, [], _Walk._at
    monkeypatch.setattr(_Walk, "_at", lambda walk, reference: followed.append(reference) or at(walk, reference))
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    check_schema(json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {"type": "null"}}}))
    assert len(followed) == n + 1


@pytest.mark.parametrize(("pattern", "is_range"), [
    (r"^[a-\]]$", True), (r"^\[z-a\]$", False), (r"^[\]-a]$", False), (r"^[\d-a]$", False), ("^[+--]$", False),
])
def test_ranges_of_patterns_are_read_as_llama_cpp_reads_them(pattern: str, is_range: bool):
    with pytest.raises(PyorchError, match="ends below its beginning") if is_range else nullcontext():
        check_ranges(pattern)


def test_a_pattern_that_would_be_ignored_is_refused_where_the_answer_must_obey_it(server: ServerProcess):
    asked = {"messages": MESSAGES, "max_tokens": 4, "tools": [FUNCTION]}
    schema = {"type": "object", "properties": {"tools": {"type": "string", "pattern": "abc"}}, "required": ["tools"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    for tools in ({}, {"tools": []}, {"tools": None}, {"tools": [FUNCTION]}):
        assert "pattern abc is not supported" in refused(server, "/v1/chat/completions", {**asked, **form, **tools})
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = {"tools": [tool], "response_format": {"type": "text"}}
    assert server.post("/v1/chat/completions", {**asked, **text})[0] == 200
    for pattern in ("abc", r"^\d+$"):
        for path, body in requests_with({"type": "string", "pattern": pattern}).items():
            if path.endswith("#tools"):  # a hint for the model, of which llama.cpp enforces what it can
                assert server.post(path.partition("#")[0], body)[0] == 200
            else:
                assert f"pattern {pattern} is not supported" in refused(server, path.partition("#")[0], body)


@pytest.mark.parametrize(("path", "asked", "sentence"), [
    ("/completion", {"grammar": ["a"]}, '"grammar" is ["a"], and must be text'),
    ("/v1/chat/completions", {"grammar": 3}, '"grammar" is 3, and must be text'),
    ("/v1/chat/completions", {"json_schema": "{}"}, '"json_schema" is "{}", and must be an object'),
    ("/v1/chat/completions", {"response_format": "json_object"}, "must be an object"),
    ("/v1/chat/completions", {"response_format": {"schema": {}}}, 'the "type" of "response_format" is null'),
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": [1]}}, '"schema" is [1]'),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "schema": {"const": 1}}}, 'no "json_schema"'),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, '"schema"'),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {"const": 1}}}, '"output_format"'),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, '"output_config"'),
])
def test_a_schema_or_a_grammar_that_would_be_ignored_is_refused(
    server: ServerProcess, path: str, asked: dict, sentence: str
):
    body = {"messages": MESSAGES, "prompt": PROMPT, "max_tokens": 2, "n_predict": 2}
    assert sentence in refused(server, path, {**body, **asked})
    any_json = {"type": "json_schema", "json_schema": {"name": "any"}}
    form = {"response_format": any_json, "output_config": {"effort": "low"}}
    assert server.post(path, {**body, **form})[0] == 200, "which asks for nothing that is ignored"


CHATS = ("/v1/chat/completions", "/chat/completions", "/apply-template", "/v1/chat/completions/input_tokens",
         "/chat/completions/input_tokens")


@pytest.mark.parametrize("path", [*CHATS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
                                  "/v1/responses/input_tokens", "/responses/input_tokens"])
def test_tools_without_end_are_refused_wherever_a_grammar_is_made_of_them(server: ServerProcess, path: str):
    def ask(*tools: object) -> str:
        return refused(server, path, {"messages": MESSAGES, "input": PROMPT, "max_tokens": 1, "tools": tools})

    assert '"tools" has 1001 tools, and 1000 are allowed' in ask(*[{**FUNCTION, "name": "f"}] * 1001)
    assert "a tool has 300000 characters" in ask({"type": "function", "name": "x" * 300_000})
    if path in CHATS:
        for tool in (3, None, {}, {"type": "function"}, {"type": "function", "function": {"name": 3}}, {"type": "x"}):
            assert "is no tool: give " in ask(tool)


def test_schemas_that_say_something_are_obeyed(server: ServerProcess):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 2}},
              "required": ["a"], "additionalProperties": False}
    for path, body in list(requests_with(schema).items())[:4]:
        body = {name: 64 if name in ("max_tokens", "n_predict") else value for name, value in body.items()}
        status, answer = server.post(path.partition("#")[0], {**body, "temperature": 0})
        content = json.loads(answer)
        choice = content.get("choices", [{}])[0]
        said = content.get("content") or choice.get("text") or choice["message"]["content"]
        assert status == 200 and json.loads(said) == {"a": 2}


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_brackets_in_brackets_without_end_are_refused(server: ServerProcess, path: str):
    n = 100_000
    deep = b'{"prompt": "x", "content": "x", "messages": %s, "json_schema": ' % json.dumps(MESSAGES).encode()
    said = refused(server, path, deep + b'{"items":' * n + b"[]" + b"}" * n + b"}")
    assert said == "the JSON is nested more than 500 levels deep"
    quoted = {"prompt": "[" * n, "content": '\\"[' * n, "messages": MESSAGES, "max_tokens": 1, "n_predict": 1}
    assert "nested" not in server.post(path, quoted)[1]


def rules(n: int, rule: str) -> str:
    """Each begins with the next one."""
    chain = (rule.format(this=f"r{i}", next=f"r{i + 1}") for i in range(n))
    return "root ::= r0\n" + "\n".join(chain) + f'\nr{n} ::= "z"'


@pytest.mark.parametrize(("grammar", "sentence"), [
    pytest.param("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "nested more than 500 levels deep", id="nested"),
    pytest.param(rules(50_000, "{this} ::= {next}"), "more than 10000 rules", id="a chain of rules"),
    pytest.param('root ::= "' + "a" * 20_000_000 + '"', "of 20000011 bytes", id="long"),
    ('root ::= "a"{5,2}', "a repetition ends below its beginning"),
    ("root ::= root", "a rule begins with itself"),
    ("root ::= none", "Undefined rule identifier 'none'"),
    (r"root ::= [\x7a-\x61]", r"the range \x7a-\x61 ends below its beginning"),
    ("root ::= <[99999999]>", "the grammar allows no token of this model here"),
])
def test_a_grammar_that_cannot_be_used_is_refused(server: ServerProcess, grammar: str, sentence: str):
    assert sentence in refused(server, "/completion", {"prompt": "x", "n_predict": 1, "grammar": grammar})


def test_a_text_that_a_grammar_reads_in_too_many_ways_ends_and_others_do_not(server: ServerProcess):
    """Each letter doubles them."""
    grammar = 'root ::= x\nx ::= "a" x "b" | "a" x "c" | "d"'
    body = {"prompt": "a" * 40, "n_predict": 60, "grammar": grammar, "temperature": 0}
    assert "the grammar takes too long" in refused(server, "/completion", body)
    assert server.post("/completion", {"prompt": PROMPT, "n_predict": 1})[0] == 200


@pytest.mark.parametrize(("trigger", "sentence"), [
    ({"type": 9, "value": "x"}, "unknown trigger type"),
    ({"type": 1}, "'value'"),
    ("x", "'grammar_triggers'"),
    ({"type": 2, "value": "(a*)*b"}, "repeats something"),
    ({"type": 3, "value": "a" * 1001}, "has 1001 characters"),
    ({"type": 2, "value": "("}, "egular expression"),
    ({"type": 2.9, "value": "(a*)*b"}, 'the "type" of a trigger is 2.9'),
    ({"type": 2, "value": "(a|a)" * 11}, "have 11 alternatives"),
    ({"type": 2, "value": "a?" * 11 + "(?=a)"}, "have 11 alternatives"),
])
def test_a_trigger_that_cannot_be_used_is_refused(server: ServerProcess, trigger: object, sentence: str):
    body = {"prompt": PROMPT, "n_predict": 1, "grammar": 'root ::= "a"', "grammar_lazy": True,
            "grammar_triggers": [trigger]}
    assert sentence in refused(server, "/completion", body)
    assert sentence in refused(server, "/v1/completions", {**body, "max_tokens": 1})
    assert "must be a list" in refused(server, "/completion", {**body, "grammar_triggers": {"a": trigger}})
    disguised = json.dumps(body).replace("grammar_triggers", "grammar\\u005ftriggers").encode()
    assert sentence in refused(server, "/completion", disguised)


def test_triggers_begin_a_grammar(server: ServerProcess):
    body = {"prompt": PROMPT, "n_predict": 4, "grammar": 'root ::= "a"', "grammar_lazy": True,
            "grammar_triggers": [{"type": 2, "value": r"[*+] \*"}, {"type": 1, "value": "never said"}]}
    assert server.post("/completion", body)[0] == 200
