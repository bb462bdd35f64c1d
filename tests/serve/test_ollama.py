"""Ollama's API: what its programs send is honoured or refused, and what they read has a value of its type."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

import pytest
from ggufs import write_dense_model
from models import PROMPT
from processes import HANG_SECONDS
from servers import ServerProcess, serve_models, wait_until

from pyorch.serve import ollama
from pyorch.serve.models import Model

# What it adds shows in the number of tokens.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"


def states(server: ServerProcess) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in server.get("/v1/models")["data"]}


def ask_as_ollama(server: ServerProcess, path: str, body: object) -> list[dict]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        return [json.loads(line) for line in answer]


def test_programs_that_speak_ollama_are_answered(several: ServerProcess):
    settings = {"temperature": 0, "num_predict": 6}
    plain = several.client.completions.create(model="sparse", prompt=PROMPT, max_tokens=6, temperature=0)

    asked = {"model": "sparse:latest", "prompt": PROMPT, "raw": True, "options": settings}
    *parts, last = ask_as_ollama(several, "/api/generate", asked)
    assert "".join(part["response"] for part in parts) == plain.choices[0].text
    assert not any(part["done"] for part in parts) and last["done"] and last["done_reason"] == "length"
    assert last["eval_count"] == 6 and last["prompt_eval_count"] == plain.usage.prompt_tokens
    whole, = ask_as_ollama(several, "/api/generate", asked | {"stream": False})
    assert whole["response"] == plain.choices[0].text and whole["done"] and whole["model"] == "sparse:latest"

    said = [{"role": "user", "content": "Hello"}]
    chat = several.client.chat.completions.create(model="sparse", messages=said, max_tokens=6, temperature=0)
    asked = {"model": "sparse", "messages": said, "options": settings}
    *parts, last = ask_as_ollama(several, "/api/chat", asked)
    assert "".join(part["message"]["content"] for part in parts) == chat.choices[0].message.content
    whole, = ask_as_ollama(several, "/api/chat", asked | {"stream": False})
    assert whole["message"] == {"role": "assistant", "content": chat.choices[0].message.content}
    loaded, = ask_as_ollama(several, "/api/generate", {"model": "dense"})
    assert loaded["done"] and loaded["done_reason"] == "load" and states(several)["dense"] == "loaded"


@pytest.mark.parametrize(("path", "body", "status", "sentence"), [
    ("/api/chat", [], 400, 'an object of JSON with the name of a "model"'),
    ("/api/chat", {"messages": []}, 400, 'an object of JSON with the name of a "model"'),
    ("/api/chat", {"model": "absent"}, 404, "model 'absent' not found"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x", "images": ["AA=="]}]}, 400, "images"),
    ("/api/chat", {"model": "sparse", "messages": "x"}, 400, "messages"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "options": 3}, 400, "options"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "options": {"temperature": "x"}}, 400, ""),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "options": {"num_predict": [1]}}, 400, "wrong"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x", "tool_calls": 3}]}, 400, "wrong type"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x", "tool_calls": [3]}]}, 400, "wrong type"),
    ("/api/generate", {"model": "damaged", "prompt": "x"}, 503, "damaged"),
    ("/api/show", {"model": "damaged"}, 400, "damaged.gguf is a truncated"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "format": "abc"}, 400, "must be an object"),
    ("/api/embed", {"model": "sparse", "input": "x"}, 501, "--embeddings"),
    ("/api/pull", {"model": "sparse"}, 404, "/api/pull is not served here"),
    ("/api/generate", {"model": "sparse", "prompt": "x", "context": [1]}, 400, '"context" is not served here'),
    ("/api/generate", {"model": "sparse", "prompt": "x", "template": "{{ .Prompt }}"}, 400, '"template" is not'),
    ("/api/generate", {"model": "sparse", "prompt": "x", "suffix": "y"}, 501, "Infill is not supported"),
    ("/api/generate", {"model": "sparse", "prompt": "x", "options": {"num_ctx": 1 << 30}}, 400, "with a larger --ctx"),
    ("/api/generate", {"model": "sparse", "prompt": "x", "options": {"tfs_z": 2}}, 400, 'the option "tfs_z" is not'),
    ("/api/generate", {"model": "sparse", "prompt": "x", "top_logprobs": 3}, 400, '"logprobs": true'),
    ("/api/generate", {"model": "sparse", "prompt": "x", "logprobs": True, "top_logprobs": 21}, 400, "from 0 to 20"),
    ("/api/generate", {"model": "sparse", "keep_alive": "soon"}, 400, '"keep_alive" is "soon"'),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "think": True}, 400, "not support thinking"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "think": "much"}, 400, 'or one of low, medium'),
])
def test_what_ollama_would_refuse_is_refused_in_its_form(
    several: ServerProcess, path: str, body: object, status: int, sentence: str
):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask_as_ollama(several, path, body)
    said = json.load(refused.value)["error"]
    assert refused.value.code == status and sentence in said and "/damaged.gguf" not in said


def test_tools_and_thoughts_come_in_ollamas_form():
    calls = [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    said = [{"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    path, body = ollama.to_openai("/api/chat", ollama.read(json.dumps(
        {"name": "m", "messages": said, "format": {"type": "object"}, "options": {"num_predict": -1, "top_k": 5}}
    ).encode()), Model("m", Path("m.gguf"), 300.0))
    call = body["messages"][0]["tool_calls"][0]
    assert path == "/v1/chat/completions" and json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert body["messages"][1]["tool_call_id"] == call["id"] and "max_tokens" not in body and body["top_k"] == 5
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"} and body["stream"] is True

    reply = ollama.Reply("/api/chat", {"model": "m"})
    pieces = [{"function": {"name": "weather", "arguments": ""}}, {"function": {"arguments": '{"city": '}},
              {"function": {"arguments": '"Paris"}'}}]
    parts = [reply.part({"choices": [{"delta": {"reasoning_content": "hm"}}]})]
    parts += [reply.part({"choices": [{"delta": {"tool_calls": [{"index": 0, **piece}]}}]}) for piece in pieces]
    assert parts[0]["message"] == {"role": "assistant", "content": "", "thinking": "hm"} and parts[1:] == [None] * 3
    assert reply.part({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "timings": {"prompt_ms": 2}}) is None
    last = reply.end()
    assert last["message"]["tool_calls"] == calls and last["done"] and last["prompt_eval_duration"] == 2_000_000


def test_every_field_has_a_value_of_its_type(several: ServerProcess):
    listed = {model["name"]: model for model in several.get("/api/tags")["models"]}
    assert listed.keys() == {"damaged", "dense", "sparse"} and len({each["digest"] for each in listed.values()}) == 3
    ask_as_ollama(several, "/api/generate", {"model": "sparse", "keep_alive": "1h"})
    running = {model["name"]: model for model in several.get("/api/ps")["models"]}
    for model in (*listed.values(), running["sparse"]):
        assert re.fullmatch("[0-9a-f]{64}", model["digest"]) and model["size"] > 0
        assert all(model["details"][name] for name in ("family", "families", "parameter_size", "quantization_level"))
    assert listed["sparse"]["details"]["parameter_size"] == "7.5M" and running["sparse"]["context_length"] > 0
    assert listed["sparse"]["details"]["quantization_level"] == "BF16"
    left = datetime.fromisoformat(running["sparse"]["expires_at"].replace("Z", "+00:00")) - datetime.now(timezone.utc)
    assert 1800 < left.total_seconds() <= 3600
    shown, = ask_as_ollama(several, "/api/show", {"model": "sparse:latest"})
    assert shown["details"] == listed["sparse"]["details"] and shown["template"]
    assert shown["model_info"]["general.architecture"] == "qwen2moe"
    assert shown["model_info"]["qwen2moe.embedding_length"] == 128
    assert shown["model_info"]["general.parameter_count"] == 7476352
    assert shown["capabilities"] == ["completion"]  # its template knows no tools
    major, minor, _ = map(int, several.get("/api/version")["version"].split("."))
    assert (major, minor) >= (0, 12), "the first that knows logprobs"


def test_probabilities_are_those_of_openais_api(several: ServerProcess):
    given = {"temperature": 0, "seed": 1}
    for _ in range(2):  # from the second time on the prompt is in the cache: equal widths of batches
        plain = several.client.completions.create(model="sparse", prompt=PROMPT, max_tokens=4, logprobs=3, **given)
    expected = [(each["token"], each["logprob"], [other["token"] for other in each["top_logprobs"]])
                for each in plain.choices[0].logprobs.content]
    asked = {"model": "sparse", "prompt": PROMPT, "raw": True, "logprobs": True, "top_logprobs": 3,
             "options": {"num_predict": 4, **given}}
    for stream in (True, False):
        lines = ask_as_ollama(several, "/api/generate", asked | {"stream": stream})
        got = [(each["token"], each["logprob"], [other["token"] for other in each["top_logprobs"]])
               for line in lines for each in line.get("logprobs", ())]
        assert [token for token, *_ in got] == [token for token, *_ in expected] and len(got) == 4
        assert [value for _, value, _ in got] == pytest.approx([value for _, value, _ in expected], abs=1e-3)
        assert [top for *_, top in got] == [top for *_, top in expected]
    chat = {"model": "sparse", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": False,
            "options": {"num_predict": 2}}
    line, = ask_as_ollama(several, "/api/chat", chat)
    assert len(line["logprobs"]) == 2 and all("top_logprobs" not in each for each in line["logprobs"])
    line, = ask_as_ollama(several, "/api/chat", chat | {"logprobs": False})
    assert "logprobs" not in line


def test_a_request_says_how_long_its_model_stays(several: ServerProcess):
    ask_as_ollama(several, "/api/generate", {"model": "dense"})
    assert states(several)["dense"] == "loaded"
    last, = ask_as_ollama(several, "/api/generate", {"model": "dense", "keep_alive": 0})
    assert last["done_reason"] == "unload" and states(several)["dense"] == "unloaded"
    *_, last = ask_as_ollama(several, "/api/generate", {"model": "dense", "prompt": "x", "keep_alive": "0s"})
    assert last["done_reason"] in ("stop", "length")
    wait_until(lambda: states(several)["dense"] == "unloaded")


@pytest.mark.parametrize(("given", "seconds"), [
    (None, None), (5, 5.0), ("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("250ms", 0.25), ("0", 0.0),
    (-1, math.inf), ("-1m", math.inf),
])
def test_times_are_read_as_ollama_writes_them(given: object, seconds: float | None):
    assert ollama.keep_alive({"keep_alive": given}) == seconds


def test_thoughts_infill_and_embeddings_are_honoured(start, tmp_path: Path):
    write_dense_model(tmp_path / "thinker.gguf", template=TEMPLATE, infills=True)
    server = start(serve_models(tmp_path))
    said = {"model": "thinker", "messages": [{"role": "user", "content": "abc"}], "stream": False,
            "options": {"num_predict": 1}}
    assert "thinking" in ask_as_ollama(server, "/api/show", {"model": "thinker"})[0]["capabilities"]
    counts = [ask_as_ollama(server, "/api/chat", said | {"think": think})[0]["prompt_eval_count"]
              for think in (True, False)]
    assert counts[0] > counts[1] > 0
    infill = {"model": "thinker", "prompt": "ab", "suffix": "cd", "logprobs": True,
              "options": {"num_predict": 1, "temperature": 0}}
    _, own = server.post("/infill", {"model": "thinker", "input_prefix": "ab", "input_suffix": "cd", "n_predict": 1})
    *parts, last = ask_as_ollama(server, "/api/generate", infill)
    assert last["prompt_eval_count"] == json.loads(own)["tokens_evaluated"], "of a prompt with its suffix"
    whole, = ask_as_ollama(server, "/api/generate", infill | {"stream": False})
    assert whole["response"] == "".join(part["response"] for part in (*parts, last)) and whole["eval_count"] == 1
    assert len(whole["logprobs"]) == 1 and whole["done_reason"] == last["done_reason"] == "length"

    server = start(serve_models(tmp_path, "--", "--embeddings", "--pooling", "mean"))
    for given in ("ab", ["ab", "cd"]):
        plain = server.client.embeddings.create(model="thinker", input=given, encoding_format="float")
        made, = ask_as_ollama(server, "/api/embed", {"model": "thinker", "input": given})
        assert made["embeddings"] == [pytest.approx(each.embedding) for each in plain.data]
        assert made["prompt_eval_count"] == plain.usage.prompt_tokens > 0
    short, = ask_as_ollama(server, "/api/embed", {"model": "thinker", "input": "ab", "dimensions": 8})
    assert len(short["embeddings"][0]) == 8 and math.hypot(*short["embeddings"][0]) == pytest.approx(1)
    for path, form in (("/api/embed", {"input": []}), ("/api/embeddings", {"prompt": ""})):
        none, = ask_as_ollama(server, path, {"model": "thinker"} | form)
        assert (none["embeddings"] if path == "/api/embed" else none["embedding"]) == []
    old, = ask_as_ollama(server, "/api/embeddings", {"model": "thinker", "prompt": "ab"})
    assert old["embedding"] == pytest.approx(ask_as_ollama(
        server, "/api/embed", {"model": "thinker", "input": "ab"})[0]["embeddings"][0])
