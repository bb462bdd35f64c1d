"""Completions with echo: a prompt's own log-probabilities, in the form that harnesses read."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT, PROMPT
from processes import HANG_SECONDS, python
from servers import ServerProcess, pyorch_serve, wait_until

from pyorch import load
from pyorch.eval import arc
from pyorch.eval.likelihood import Prompt, likelihoods
from pyorch.llama import memory
from pyorch.llama.managed import find
from pyorch.llama.memory import MemoryLimit
from pyorch.serve.echo import Echo

FACTS = CHECKPOINT / "facts-test.jsonl"


@pytest.fixture(scope="module")
def server(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    command = pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--ctx", "1024")
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def ask(server: ServerProcess, path: str, body: dict | None = None) -> tuple[int, dict]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data), timeout=HANG_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def echo(server: ServerProcess, prompt: object, **options: object) -> list[dict]:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **options}
    status, answer = ask(server, "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"]


def test_log_probabilities_of_a_prompt_are_those_of_the_evaluation(server: ServerProcess, small_moe: Path):
    with load(small_moe, budget="40%", n_ctx=64, n_threads=1) as model:
        task = arc.read_task(model, FACTS, limit=3)
        for prompt in task.prompts:
            alone = Prompt(prompt.context, prompt.continuations[:1])
            found, = likelihoods(model, [alone], together=False, n_threads=1)
            whole = [*prompt.context, *prompt.continuations[0]]
            choice, = echo(server, whole)
            values = choice["logprobs"]["token_logprobs"]
            assert values[0] is None and len(values) == len(whole)
            assert sum(values[len(prompt.context):]) == pytest.approx(found.sums[0], abs=1e-5)


def test_the_form_is_that_of_older_completions(server: ServerProcess):
    status, answer = ask(server, "/v1/completions", {
        "prompt": PROMPT, "echo": True, "logprobs": 3, "max_tokens": 4, "temperature": 0})
    choice, = answer["choices"]
    logprobs = choice["logprobs"]
    assert status == 200 and answer["object"] == "text_completion"
    assert choice["text"].startswith(PROMPT) and "".join(logprobs["tokens"]) == choice["text"]
    n = len(logprobs["tokens"])
    assert {len(values) for values in logprobs.values()} == {n} and answer["usage"]["total_tokens"] == n
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert choice["text"][offset : offset + len(token)] == token
    for token, value, top in list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]))[1:]:
        assert top[token] >= value and 1 <= len(top) <= 4 and np.exp(list(top.values())).sum() <= 1 + 1e-6
    generated = list(zip(logprobs["tokens"], logprobs["top_logprobs"]))[-answer["usage"]["completion_tokens"] :]
    assert all(top[token] == max(top.values()) for token, top in generated), "temperature 0"


@pytest.mark.parametrize("prompt", ["Größe = 1\n日本語", "né 🙂🙂 à", "x"])
def test_offsets_are_of_the_text_that_is_returned(server: ServerProcess, prompt: str):
    choice, = echo(server, prompt)
    _, tokens = ask(server, "/tokenize", {"content": prompt, "with_pieces": True})
    pieces = [piece["piece"] for piece in tokens["tokens"]]
    whole = [piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces]
    assert choice["text"] == prompt and b"".join(whole) == prompt.encode()
    begins = [sum(map(len, whole[:i])) for i in range(len(whole))]
    # The character in which, or with which, a token begins.
    expected = [len(prompt.encode()[:begin].decode(errors="ignore")) for begin in begins]
    assert choice["logprobs"]["text_offset"] == expected and max(expected) < len(prompt)


def test_a_stop_ends_the_text_and_is_no_part_of_it(server: ServerProcess):
    options = {"max_tokens": 24, "temperature": 0, "logprobs": 0}
    whole, = echo(server, PROMPT, **options)
    generated = whole["text"].removeprefix(PROMPT)
    stop = generated[len(generated) // 2 :][:3]
    expected = PROMPT + generated[: generated.index(stop)]
    for given in (stop, ["never said", stop], [stop, stop[:2]]):
        choice, = echo(server, PROMPT, **options, stop=given)
        logprobs, text = choice["logprobs"], choice["text"]
        assert choice["finish_reason"] == "stop" and expected.startswith(text) and text.startswith(PROMPT)
        assert text == expected or isinstance(given, list)
        assert {len(values) for values in logprobs.values()} == {len(logprobs["tokens"])}
        assert max(logprobs["text_offset"]) < len(text)
    never, = echo(server, PROMPT, **options, stop=["", "never said"])
    assert never == whole
    in_prompt, = echo(server, PROMPT, **options, stop=PROMPT[:4])
    assert in_prompt["text"].startswith(PROMPT)


def test_a_request_whose_client_left_ends(server: ServerProcess):
    """Others wait for it, and it would take half an hour."""
    def uses() -> int:
        totals = server.get("/residency")["totals"]
        return totals["hits"] + totals["misses"]

    body = json.dumps({"prompt": [[1] * 1000] * 5000, "echo": True, "max_tokens": 0}).encode()
    before = uses()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: uses() > before)
    assert echo(server, "import os")


def test_several_prompts_are_answered_in_order(server: ServerProcess):
    texts = ["import os", "def add(a, b):"]
    choices = echo(server, texts)
    assert [choice["index"] for choice in choices] == [0, 1] and [choice["text"] for choice in choices] == texts
    assert echo(server, texts[1])[0]["logprobs"] == choices[1]["logprobs"]


def test_without_logprobs_only_the_text_comes(server: ServerProcess):
    status, answer = ask(server, "/v1/completions", {"prompt": "import os", "echo": True, "max_tokens": 0})
    assert status == 200 and answer["choices"][0] == {
        "text": "import os", "index": 0, "finish_reason": "length", "logprobs": None}


@pytest.mark.parametrize("body, sentence", [
    ({"prompt": ""}, '"prompt" must be a text that is not empty'),
    ({"prompt": [[1, -1]]}, '"prompt" must be a text that is not empty'),
    ({"prompt": "x", "max_tokens": 9}, "generated at temperature 0 only"),
    ({"prompt": "x", "stream": True}, '"stream" cannot be combined with "echo"'),
    ({"prompt": "x", "logprobs": -1}, '"logprobs" is -1, and must be a whole number from 0 to 100'),
    ({"prompt": "x", "stop": 3}, '"stop" must be a text or a list of texts'),
    ({"prompt": "import os\n" * 2000}, "start the server with a larger --ctx"),
    ({"prompt": "\ud800"}, "the body is no JSON"),
])
def test_what_cannot_be_echoed_is_refused_in_a_sentence(server: ServerProcess, body: dict, sentence: str):
    status, answer = ask(server, "/v1/completions", {"echo": True, "logprobs": 1, "max_tokens": 0, **body})
    assert status == 400 and sentence in answer["error"]["message"]


def test_under_the_automatic_budget_experts_make_room_only_where_memory_lacks(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--threads", "1", "--ctx", "512"))
    budget = server.get("/residency")["settings"]["budget"]
    assert echo(server, PROMPT) == echo(server, PROMPT)
    assert server.get("/residency")["settings"]["budget"] == budget, "a small model leaves enough"


def test_experts_give_back_what_a_context_lacks_and_keep_the_least(small_moe: Path, monkeypatch: pytest.MonkeyPatch):
    with load(small_moe, n_ctx=64, n_threads=1, warm=False) as model:  # cold: what is used stays
        managed, engine = find(model.llama.model), model.engine
        judge, before = Echo(managed, lambda: 0, "a model"), engine.stats()
        needed = judge.measure(256)
        assert managed.plan.automatic and needed > 0
        for lacking, left in ((4096, before.budget_bytes - 4096), (before.budget_bytes, managed.map.info.floor_bytes)):
            limit = MemoryLimit("a test", 0, 0)
            free = needed + limit.margin_bytes + before.budget_bytes - before.used_bytes - lacking
            engine.set_budget(before.budget_bytes)
            monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit("a test", 0, free))
            judge.reserve(256)
            assert engine.stats().budget_bytes == left


def test_other_completions_are_those_of_llama_server(server: ServerProcess):
    assert server.complete(PROMPT, 4)
    chunks = server.client.completions.create(model="", prompt=PROMPT, max_tokens=4, stream=True, temperature=0)
    assert len([chunk.choices[0].text for chunk in chunks]) > 2
    status, answer = ask(server, "/v1/completions", {"prompt": "import", "max_tokens": 2, "echo": False})
    assert status == 200 and not answer["choices"][0]["text"].startswith("import")


def test_the_tokenizer_is_told_as_harnesses_ask_for_it(server: ServerProcess):
    _, own = ask(server, "/tokenize", {"content": PROMPT})
    _, ours = ask(server, "/tokenize", {"prompt": PROMPT, "add_special_tokens": False})
    assert ours == {"tokens": own["tokens"], "count": len(own["tokens"])}
    _, text = ask(server, "/detokenize", {"tokens": own["tokens"]})
    assert text["prompt"] == text["content"] == PROMPT
    _, info = ask(server, "/tokenizer_info")
    assert info.keys() == {"bos_token", "eos_token", "pad_token", "add_bos_token", "chat_template"}


def test_the_harness_judges_a_server_as_it_judges_the_model(server: ServerProcess, small_moe: Path):
    pytest.importorskip("lm_eval.api", reason="lm-evaluation-harness is not installed: pip install '.[lm-eval]'")
    program = f"""
import json, pyorch.lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

lines = [json.loads(line) for line in open({str(FACTS)!r})][:4]
pairs = [(f"Question: {{line['question']['stem']}}\\nAnswer:", f" {{choice['text']}}")
         for line in lines for choice in line["question"]["choices"]]
requests = [Instance("loglikelihood", {{}}, pair, i) for i, pair in enumerate(pairs)]
ours = get_model("pyorch")(model={str(small_moe)!r}, budget="40%", threads=1)
theirs = get_model("local-completions")(base_url="{server.url}/v1/completions", model="small", max_length=512)
print(json.dumps([model.loglikelihood(requests) for model in (ours, theirs)]))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    ours, theirs = (np.array(found) for found in json.loads(done.stdout.splitlines()[-1]))
    assert np.median(np.abs(ours[:, 0] - theirs[:, 0])) < 1e-5
    assert (ours[:, 0].reshape(4, -1).argmax(1) == theirs[:, 0].reshape(4, -1).argmax(1)).all()
    assert (ours[:, 1] == theirs[:, 1]).mean() > 0.9
