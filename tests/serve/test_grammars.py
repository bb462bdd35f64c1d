"""Grammars and JSON schemas of requests: what cannot be one, or costs too much, is refused, and the server lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import PROMPT
from servers import TEMPLATE_WITH_TOOLS, ServerProcess, pyorch_serve

MESSAGES = [{"role": "user", "content": PROMPT}]


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
])
def test_a_schema_that_allows_nothing_or_costs_too_much_is_refused_wherever_it_comes(
    server: ServerProcess, schema: dict, sentence: str
):
    for path, body in requests_with(schema).items():
        if "$ref" in str(schema) and "#tools" in path:  # where the reference names another place
            continue
        said = refused(server, path.partition("#")[0], body)
        assert sentence in said, (path, said)


def test_a_pattern_that_would_be_ignored_is_refused_where_the_answer_must_obey_it(server: ServerProcess):
    for pattern in ("abc", r"^\d+$"):
        for path, body in requests_with({"type": "string", "pattern": pattern}).items():
            if path.endswith("#tools"):  # a hint for the model, of which llama.cpp enforces what it can
                assert server.post(path.partition("#")[0], body)[0] == 200
            else:
                assert f"pattern {pattern} is not supported" in refused(server, path.partition("#")[0], body)


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
])
def test_a_trigger_that_cannot_be_used_is_refused(server: ServerProcess, trigger: object, sentence: str):
    body = {"prompt": PROMPT, "n_predict": 1, "grammar": 'root ::= "a"', "grammar_lazy": True,
            "grammar_triggers": [trigger]}
    assert sentence in refused(server, "/completion", body)
    assert sentence in refused(server, "/v1/completions", {**body, "max_tokens": 1})
    disguised = json.dumps(body).replace("grammar_triggers", "grammar\\u005ftriggers").encode()
    assert sentence in refused(server, "/completion", disguised)


def test_triggers_begin_a_grammar(server: ServerProcess):
    body = {"prompt": PROMPT, "n_predict": 4, "grammar": 'root ::= "a"', "grammar_lazy": True,
            "grammar_triggers": [{"type": 2, "value": r"[*+] \*"}, {"type": 1, "value": "never said"}]}
    assert server.post("/completion", body)[0] == 200
