"""Several models behind one address, each in a process of its own that runs while it is needed."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import anthropic
import huggingface_hub.constants
import ollama
import pytest
from ggufs import write_adapter, write_encoder_model
from models import PROMPT
from processes import HANG_SECONDS, pyorch, python
from prometheus_client.parser import text_string_to_metric_families
from servers import WHOLE_PROMPT, ServerProcess, Stream, pyorch_serve, serve_models, wait_until

from pyorch.cli import serve
from pyorch.errors import PyorchError
from pyorch.hub import cache
from pyorch.llama import memory
from pyorch.llama.memory import MemoryLimit
from pyorch.serve import front
from pyorch.serve.address import Address
from pyorch.serve.failures import TEXT_PATHS
from pyorch.serve.library import chat_page
from pyorch.serve.llama_server import Root
from pyorch.serve.models import Models
from pyorch.serve.origins import Origins
from pyorch.settings.budget import Budget
from pyorch.sizes import GiB, MiB
from scripts import chromium


def states(server: ServerProcess) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in server.get("/v1/models")["data"]}


def complete(server: ServerProcess, model: str, n: int = 4) -> object:
    return server.client.completions.create(model=model, prompt="x", max_tokens=n, temperature=0)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in text for child in file.read_text().split()]


def test_a_model_is_loaded_when_a_request_names_it(several: ServerProcess):
    assert states(several) == {"damaged": "unloaded", "dense": "unloaded", "sparse": "unloaded"}
    assert "serving 3 models at " in several.log.read_text()
    with pytest.raises(urllib.error.HTTPError, match="503"):  # nobody loads one by looking
        several.get("/residency")
    assert complete(several, "sparse").model == "sparse"
    assert states(several) == {"damaged": "unloaded", "dense": "unloaded", "sparse": "loaded"}
    assert several.get("/residency")["model"] == "sparse.gguf"
    assert complete(several, "dense").model == "dense"
    assert several.get("/props?model=sparse")["model_path"] == "sparse.gguf"
    assert {"dense", "sparse"} <= {name for name, state in states(several).items() if state == "loaded"}


def test_what_cannot_be_served_is_said_and_the_others_are(several: ServerProcess):
    with pytest.raises(several.error, match='model "absent" is not served here; these are: .*sparse') as unknown:
        complete(several, "absent")
    assert unknown.value.status_code == 404
    with pytest.raises(several.error, match="names no model"):
        complete(several, "")
    for _ in range(2):
        with pytest.raises(several.error, match=r"- damaged\.gguf is a truncated or damaged GGUF"):
            complete(several, "damaged")
    assert complete(several, "sparse").choices[0].text


def test_a_stream_is_passed_on_while_it_is_written_and_ends_with_its_client(start, folder: Path):
    server = start(serve_models(folder, "--", "--context-shift"))
    with closing(Stream(server, -1, model="sparse")) as stream:
        parts = iter(stream)
        assert all(next(parts)["content"] is not None for _ in range(8))
    wait_until(lambda: not any(slot["is_processing"] for slot in server.get("/slots?model=sparse")))


def test_an_idle_model_is_unloaded_and_loaded_again(start, folder: Path):
    server = start(serve_models(folder, "--keep-alive", "0"))
    for n in (1, 2):
        assert complete(server, "dense").choices[0].text is not None
        wait_until(lambda n=n: server.log.read_text().count("pyorch: unloaded dense, idle for 0 s") == n)
    assert states(server)["dense"] == "unloaded" and children(server.process.pid) == []
    assert "Fatal" not in server.log.read_text()


def ask(server: ServerProcess, head: str, *body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Sends a request as it is; the status, the headers and the body of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
        try:
            for part in body:
                connection.sendall(part)
        except ConnectionError:  # it is answered before all was sent
            pass
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, said = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), said


def refused(server: ServerProcess, head: str, *body: bytes) -> tuple[int, str]:
    status, _, said = ask(server, head, *body)
    return status, json.loads(said)["error"]["message"]


@pytest.mark.parametrize("length", [101 << 20, 10**12, 10**20])
def test_a_body_that_is_too_large_is_refused_with_413(several: ServerProcess, length: int):
    """Also when the client sends all of it before it reads the answer."""
    sent = itertools.repeat(bytes(1 << 20), 101 if length < 10**9 else 0)
    status, said = refused(several, f"POST /v1/completions HTTP/1.1\r\nContent-Length: {length}", *sent)
    assert (status, said) == (413, "the body is larger than 100 MiB")


def test_a_body_comes_in_chunks(several: ServerProcess):
    body = json.dumps({"model": "dense", "prompt": "x", "max_tokens": 2, "temperature": 0}).encode()
    parts = [body[i : i + 9] for i in range(0, len(body), 9)]
    chunks = [f"{len(part):x};name=value\r\n".encode() + part + b"\r\n" for part in parts]
    chunked = "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked"
    status, _, said = ask(several, chunked, *chunks, b"0\r\nTrailer: x\r\n\r\n")
    assert status == 200 and json.loads(said)["choices"] == [
        {**complete(several, "dense", 2).choices[0].model_dump(exclude={"logprobs"}), "logprobs": None}]
    assert refused(several, chunked, b"zz\r\n")[0] == 400
    assert refused(several, chunked, b"2\r\nabc\r\n")[0] == 400
    assert refused(several, chunked, f"{101 << 20:x}\r\n".encode())[0] == 413


def test_a_head_is_asked_for_as_of_one_model(several: ServerProcess):
    complete(several, "sparse")
    for path in ("/", "/health", "/v1/models", "/api/tags", "/props?model=sparse", "/metrics"):
        status, headers, body = ask(several, f"HEAD {path} HTTP/1.1")
        assert (status, body) == (200, b"") and int(headers["content-length"]) > 0, path
    assert several.get("/v1/models/sparse")["id"] == "sparse" == several.client.models.retrieve("sparse").id
    assert refused(several, "GET /v1/models/absent HTTP/1.1")[0] == 404


@pytest.mark.parametrize(("request_line", "body", "status", "said"), [
    ("POST /v1/nothing", b"{}", 404, "POST /v1/nothing is not served here"),
    ("GET /v1/completions", b"", 404, "GET /v1/completions is not served here"),
    ("PUT /v1/completions", b"{}", 404, "PUT /v1/completions is not served here"),
    ("GET http://[/", b"", 400, "the address of the request is none"),
    ("GET /" + "x" * 70000, b"", 414, ""),
    ("BREW /coffee", b"", 501, "Unsupported method ('BREW')"),
    ("POST /v1/completions", b"{bad", 400, "the body is no JSON: Expecting property name enclosed in double quotes"),
    ("POST /v1/completions", b"[" * 100_000, 400, "the body nests brackets too deep"),
    ("POST /v1/completions", b"[1]", 400, "the body is JSON, but no object"),
    ("POST /v1/completions", b"{}", 400, "the request names no model"),
])
def test_a_mistake_is_refused_with_its_reason(
    several: ServerProcess, request_line: str, body: bytes, status: int, said: str
):
    got, sentence = refused(several, f"{request_line} HTTP/1.1\r\nContent-Length: {len(body)}", body)
    assert got == status and sentence.startswith(said), sentence


def test_a_form_names_its_model(several: ServerProcess):
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ndense\r\n--x--\r\n'
    status, said = refused(several, "POST /v1/audio/transcriptions HTTP/1.1\r\n"
                           f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}", form)
    assert status >= 400 and "names no model" not in said


def test_requests_are_answered_while_a_thousand_others_are_half_sent(start, folder: Path):
    """Also where the system allows a process few descriptors unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("needs more descriptors than this user may have")
    server = start(["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "bash", *serve_models(folder)])
    allowed, _ = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert allowed > 2000, "a connection that is passed on has two"
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        for _ in range(1100):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")
        assert complete(server, "sparse").choices[0].text


@pytest.mark.parametrize(("limit", "sent"), [
    ("HEAD_SECONDS", b""),
    ("HEAD_SECONDS", b"GET /health HTTP/1.1\r\n\r\n"),  # the connection stays open for the next request
    ("BODY_SECONDS", b"POST /tokenize HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"),
    ("BODY_SECONDS", b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n"),
])
def test_what_comes_byte_by_byte_has_so_much_time(monkeypatch: pytest.MonkeyPatch, limit: str, sent: bytes):
    """Half a minute for a head, ten for a body."""
    monkeypatch.setattr(front, limit, 3.0 if sent.startswith(b"GET") else 0.5)  # a request that ends has enough
    models = Models(dict, Budget.parse("auto"), 300.0, "", lambda *_: [])
    server = front._Server(
        Address("127.0.0.1", 0, ""), models, (), 60, Root.SMALL_CHAT, Origins((), ("127.0.0.1",)))
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with socket.create_connection(server.server_address, timeout=HANG_SECONDS) as connection:
            is_closed = threading.Event()
            answered = b""

            def read() -> None:
                nonlocal answered
                with suppress(ConnectionError):
                    answered = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                is_closed.set()

            connection.sendall(sent)
            threading.Thread(target=read, daemon=True).start()
            with suppress(ConnectionError):
                while not is_closed.wait(0.1):
                    connection.sendall(b"x")
            assert is_closed.wait(HANG_SECONDS) and answered.startswith(b"HTTP/1.1 200") == sent.startswith(b"GET")
        server.shutdown()
        server.deadlines.close()
    models.ending.set()


def test_a_look_loads_no_model(start, folder: Path):
    server = start(serve_models(folder))

    def loaded() -> dict[str, float]:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANG_SECONDS) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        hits = [sample.labels["model"] for name in ("pyorch_expert_hits", "llamacpp:n_decode")
                for sample in (families[name].samples if name in families else ())]
        states = {sample.labels["model"]: sample.value for sample in families["pyorch_model_loaded"].samples}
        assert hits == 2 * [name for name, state in states.items() if state]
        return states

    assert loaded() == {"damaged": 0, "dense": 0, "sparse": 0}
    assert server.get("/props")["role"] == "router"
    for path in ("/residency", "/slots", "/props?model=sparse", "/residency?model=sparse", "/slots?model=sparse"):
        status, said = refused(server, f"GET {path} HTTP/1.1")
        assert status == 503 and "loaded: a request for an answer" in said
    with urllib.request.urlopen(f"{server.url}/metrics?model=sparse", timeout=HANG_SECONDS) as answer:
        assert answer.read().splitlines()[-1] == b'pyorch_model_loaded{model="sparse"} 0'
    complete(server, "sparse")
    assert loaded() == {"damaged": 0, "dense": 0, "sparse": 1}
    assert set(re.findall("unloaded|loaded [a-z]+", server.log.read_text())) == {"loaded sparse"}


def test_a_name_with_line_ends_is_served_and_new_files_are_found(start, small_moe: Path, tmp_path: Path):
    name = "a\nb\x1b[2J"
    os.link(small_moe, tmp_path / f"{name}.gguf")
    server = start(serve_models(tmp_path))
    assert server.get("/tokenizer_info")["eos_token"]  # the first model answers where none is loaded
    assert states(server) == {name: "loaded"} and complete(server, name).model == name
    os.link(small_moe, tmp_path / "other.gguf")
    assert complete(server, "other.gguf").model == "other" and len(states(server)) == 2
    (tmp_path / "other.gguf").unlink()
    assert states(server)["other"] == "loaded"
    log = server.log.read_text()
    assert all(line.startswith("pyorch: ") for line in log.splitlines()) and "\x1b" not in log, log
    assert r"loaded a\nb\x1b[2J in " in log


def test_a_model_whose_name_is_no_text_is_served(start, small_moe: Path, tmp_path: Path):
    os.link(small_moe, os.fsencode(tmp_path) + b"/a\xff.gguf")
    server = start(serve_models(tmp_path))
    assert server.get("/tokenizer_info")["eos_token"] and list(states(server).values()) == ["loaded"]


def test_a_refusal_has_the_reason_of_llama_server(start, small_moe: Path, tmp_path: Path):
    adapter = tmp_path / "adapter"
    write_adapter(adapter, small_moe, "_exps", n_expert=32)
    os.link(small_moe, tmp_path / "small.gguf")
    server = start(serve_models(tmp_path, "--", "--lora", str(adapter)))
    with pytest.raises(server.error, match=r"could not be loaded: .*ffn_down_exps.* incorrect shape"):
        complete(server, "small")


def test_tokens_are_asked_for_without_a_model(several: ServerProcess):
    complete(several, "dense")
    assert several.get("/tokenizer_info")["add_bos_token"] is not None
    for path, body in (("/tokenize", {"prompt": "abc"}), ("/detokenize", {"tokens": [97, 98]})):
        request = urllib.request.Request(several.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            assert len(json.load(answer)["tokens" if path == "/tokenize" else "prompt"]) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_its_models_end_with_it(start, folder: Path, number: int):
    server = start(serve_models(folder, "--grace", "0", "--", "--context-shift"))
    with closing(Stream(server, -1, path="/v1/completions", model="sparse")) as stream:
        parts = iter(stream)
        next(parts)
        (child,) = children(server.process.pid)
        server.process.send_signal(number)
        last = list(parts)[-2:]
    assert server.process.wait(HANG_SECONDS) == (0 if number != signal.SIGKILL else -number)
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    if number != signal.SIGKILL:
        assert "the server ends" in last[0]["error"]["message"] and last[1] is None


def test_only_who_has_the_key_loads_a_model(start, folder: Path):
    server = start(serve_models(folder, "--", "--api-key", "one,two"))
    for path in ("/health", "/", "/pyorch", "/pyorch/live.js"):
        with urllib.request.urlopen(server.url + path, timeout=HANG_SECONDS) as answer:
            assert answer.status == 200
    with pytest.raises(server.error, match="401"):
        complete(server, "dense")
    server.client.api_key = "two"
    assert states_with_key(server, "two")["dense"] == "unloaded"
    assert complete(server, "dense").model == "dense"


def states_with_key(server: ServerProcess, key: str) -> dict[str, str]:
    request = urllib.request.Request(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        return {model["id"]: model["status"]["value"] for model in json.load(answer)["data"]}


def test_settings_are_changed_from_this_machine_only(start, folder: Path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("needs an address that is not loopback")
        address = probe.getsockname()[0]
    server = start(serve_models(folder, "--host", "0.0.0.0"))
    complete(server, "sparse")
    port = server.url.rpartition(":")[2]
    for host, status in ((address, 403), ("127.0.0.1", 200)):
        headers = {"Host": f"localhost:{port}", "Content-Type": "application/json"}  # anybody can say so
        request = urllib.request.Request(f"http://{host}:{port}/residency?model=sparse", b'{"policy": "lru"}',
                                         headers)
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
                assert answer.status == status
        except urllib.error.HTTPError as error:
            assert error.code == status, error.read()


@pytest.fixture(scope="module")
def one(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    command = pyorch_serve(small_moe, "--threads", "1", "--budget", "60%", "--", "--alias", "sparse")
    server = ServerProcess(command, tmp_path_factory.mktemp("one") / "log")
    yield server
    server.stop()


_OF_ONE_ANSWER = {"id", "created", "created_at", "completed_at", "timings", "aliases", "tags", "owned_by", "meta",
                  "status"}


def test_an_encoder_makes_no_text(start, tmp_path: Path):
    write_encoder_model(tmp_path / "encoder.gguf")
    of_models = start(serve_models(tmp_path, "--threads", "1"))
    alone = start(pyorch_serve(tmp_path / "encoder.gguf", "--threads", "1", "--", "--alias", "encoder", "--embeddings"))
    asked = {"model": "encoder", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    why = '"encoder" makes embeddings and no text: ask /v1/embeddings'
    for server in (of_models, alone):
        for path in TEXT_PATHS:
            for stream in (False, True):
                status, said = server.post(path, asked | {"stream": stream})
                assert status == 400 and json.loads(said)["error"]["message"].startswith(why), (path, said)
    assert len(alone.client.embeddings.create(model="encoder", input="x").data[0].embedding) == 64
    client = ollama.Client(host=of_models.url)
    assert client.show("encoder").capabilities == ["embedding"]
    for ask_for_text in (lambda: client.chat("encoder", asked["messages"]), lambda: client.generate("encoder", "x")):
        with pytest.raises(ollama.ResponseError, match=why) as refused:
            ask_for_text()
        assert refused.value.status_code == 400


OF_ALL = b'"model":"sparse","prompt":"x","content":"x","input":"x","messages":[{"role":"user","content":"x"}]'
NO_JSON = {  # and a word of the reason
    b"{" + OF_ALL + b',"temperature":NaN}': "N",
    b"{" + OF_ALL + b',"temperature":-Infinity}': "I",
    b"{" + OF_ALL + b',"temperature":1e400}': "1e400",
    b"{" + OF_ALL + b',"max_tokens":' + b"1" * 5001 + b"}": "number",
    b"{" + OF_ALL.replace(b'"x"', b'"\\ud800"') + b"}": "surrogate",
    b"{" + OF_ALL + b',"\\udc00":1}': "surrogate",
    b"{" + OF_ALL.replace(b'"x"', b'"\xff"') + b"}": "UTF-8",
    (b"{" + OF_ALL + b"}").decode().encode("utf-16"): "",
    b"{" + OF_ALL: "",
    b"{" + OF_ALL + b"} x": "",
}
POSTS = ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize",
         "/v1/messages/count_tokens", "/apply-template", "/residency"]


@pytest.mark.parametrize("path", [*POSTS, "/api/chat", "/api/generate"])
def test_a_body_that_is_no_json_is_refused_with_the_reason(one: ServerProcess, several: ServerProcess, path: str):
    for body, word in NO_JSON.items():
        for server in (several,) if path.startswith("/api/") else (one, several):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            status, _, said = ask(server, head, body)
            error = json.loads(said)["error"]
            sentence = error["message"] if isinstance(error, dict) else error
            assert (status, "the body is no JSON" in sentence) == (400, True), (body, said)
            assert word in sentence and "set_int_max_str_digits" not in sentence and len(sentence) < 400, sentence


@pytest.mark.parametrize(("path", "body", "word"), [
    ("/v1/completions", {"prompt": "x", "max_tokens": []}, ""),
    ("/v1/completions", {}, "prompt"),
    ("/v1/messages", {"max_tokens": 1}, "'messages' is required"),
    ("/v1/messages/count_tokens", {}, "'messages' is required"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {
        "url": "data:image/png;base64,aGk="}}]}]}, "image input is not supported"),
    ("/apply-template", {}, "messages"),
    ("/detokenize", {"tokens": ["x"]}, ""),
])
def test_what_a_request_lacks_or_cannot_ask_is_no_fault_of_the_server(
    one: ServerProcess, several: ServerProcess, path: str, body: dict, word: str
):
    for server in (one, several):
        sent = json.dumps({"model": "sparse", **body}).encode()
        status, said = refused(server, f"POST {path} HTTP/1.1\r\nContent-Length: {len(sent)}", sent)
        assert status == 400 and word in said, (status, said)


def same(value: object) -> object:
    """What two equal answers have in common."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {name: same(part) for name, part in value.items() if name not in _OF_ONE_ANSWER}
    return [same(part) for part in value] if isinstance(value, (list, tuple)) else value


def refusal_of(call: Callable[[], object], error: type[Exception]) -> tuple[int, str]:
    with pytest.raises(error) as refused:
        call()
    return refused.value.status_code, str(refused.value)


def test_clients_get_the_answers_of_one_model(one: ServerProcess, several: ServerProcess):
    said = [{"role": "user", "content": PROMPT}]
    chat = {"model": "sparse", "messages": said, "max_tokens": 6}
    greedy = {"extra_body": {"temperature": 0, **WHOLE_PROMPT}}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}
    answers, claude_error = [], anthropic.APIStatusError
    for server in (one, several):
        openai, claude = server.client, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        completions, chats = openai.completions.create, openai.chat.completions.create
        with claude.messages.stream(**chat, **greedy) as stream:
            streamed = stream.get_final_message()
        answers.append(list(map(same, (
            completions(model="sparse", prompt=PROMPT, max_tokens=6, logprobs=2, **greedy),
            list(completions(model="sparse", prompt=PROMPT, max_tokens=6, stream=True, **greedy)),
            completions(model="sparse", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1),
            chats(**chat, logprobs=True, top_logprobs=2, **greedy), list(chats(**chat, stream=True, **greedy)),
            chats(**chat, response_format=schema, **greedy),
            openai.responses.create(model="sparse", input=PROMPT, max_output_tokens=6, **greedy).output_text,
            openai.responses.create(model="sparse", input=PROMPT, max_output_tokens=6, **greedy, text={
                "format": {"type": "json_schema", **schema["json_schema"]}}).output_text,
            openai.models.retrieve("sparse"), refusal_of(lambda: chats(**chat, temperature="hot"), server.error),
            refusal_of(lambda: openai.embeddings.create(model="sparse", input=PROMPT), server.error),
            claude.messages.create(**chat, **greedy), streamed,
            claude.messages.count_tokens(model="sparse", messages=said), claude.models.retrieve("sparse").id,
            refusal_of(lambda: claude.messages.create(**chat, extra_body={"temperature": "hot"}), claude_error),
        ))))
    assert answers[0] == answers[1]

    client = ollama.Client(host=several.url)
    options = {"temperature": 0, "num_predict": 6}
    told = client.generate("sparse", PROMPT, raw=True, options=options)
    spoken = client.chat("sparse", said, options=options)
    assert told.response == answers[0][0]["choices"][0]["text"]
    assert spoken.message.content == answers[0][3]["choices"][0]["message"]["content"]
    assert "".join(part.message.content for part in client.chat("sparse", said, options=options, stream=True)
                   ) == spoken.message.content
    assert {model.model for model in client.ps().models} <= {model.model for model in client.list().models}
    assert client.show("sparse").modelinfo["general.architecture"] == "qwen2moe"


def test_the_harness_judges_one_of_several_as_it_judges_one(one: ServerProcess, several: ServerProcess):
    pytest.importorskip("lm_eval.api", reason="lm-evaluation-harness is not installed: pip install '.[lm-eval]'")
    complete(several, "sparse")  # whose tokenizer answers
    program = f"""
import json
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
import lm_eval.models

pairs = [("Question: which is larger?\\nAnswer:", " the sun"), ("import os\\nimport", " sys"), ("", "import")]
requests = [Instance("loglikelihood", {{}}, pair, i) for i, pair in enumerate(pairs)]
models = [get_model("local-completions")(base_url=f"{{url}}/v1/completions", model="sparse", max_length=512)
          for url in ({one.url!r}, {several.url!r})]
print(json.dumps([model.loglikelihood(requests) for model in models]))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first == second and all(value < 0 for value, _ in first)


@pytest.fixture
def two(small_moe: Path, monkeypatch: pytest.MonkeyPatch):
    """Two models, and what is free of memory for them."""
    free = {"bytes": 64 * GiB}
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit("a test", 64 * GiB, free["bytes"]))

    def command(name: str, path: Path, announces: int) -> list[str]:
        return [*pyorch_serve(path, "--budget", "60%", "--threads", "1"), "--while-stdin", "--announce",
                str(announces)]

    models = Models(lambda: {"a": small_moe, "b": small_moe}, Budget.parse("60%"), 3600.0, "", command)
    yield models, free
    for process in models.tell_to_end():
        process.wait()


def test_models_that_fit_stay_and_others_make_room(two):
    models, free = two
    a, b = models.by_name.values()
    for model in (a, b):
        with models.held(model):
            pass
    assert a.state == b.state == "loaded"
    first = b.process
    first.kill()  # as the kernel does where memory is short
    first.wait()
    free["bytes"] = 64 * MiB
    with models.held(b) as port:
        assert port and a.state == "unloaded"


def test_a_model_that_answers_is_waited_for(two):
    models, free = two
    a, b = models.by_name.values()
    free["bytes"] = 64 * MiB
    loaded = threading.Event()

    def ask() -> None:
        with models.held(b):
            loaded.set()

    with models.held(a):
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: b.state == "loading")
        assert not loaded.wait(1.0) and a.state == "loaded"
    thread.join(HANG_SECONDS)
    assert loaded.is_set() and a.state == "unloaded"


def test_a_load_that_does_not_end_blocks_no_other(small_moe: Path):
    def command(name: str, path: Path, announces: int) -> list[str]:
        program = {"stuck": "sys.stdin.read()", "broken": "sys.exit('pyorch: error: a reason')",
                   "quick": f"os.write({announces}, b'1\\n'); sys.stdin.read()"}[name]
        return [sys.executable, "-c", f"import os, sys; {program}"]

    models = Models(lambda: dict.fromkeys(("stuck", "broken", "quick"), small_moe), Budget.parse("60%"), 3600.0, "",
                    command)

    def ask() -> None:
        with pytest.raises(PyorchError), models.held(models.by_name["stuck"]):
            pass

    waiting = threading.Thread(target=ask)
    waiting.start()
    wait_until(lambda: models.by_name["stuck"].process is not None)
    with models.held(models.by_name["quick"]) as port:
        assert port == 1
    with pytest.raises(PyorchError, match="a reason"), models.held(models.by_name["broken"]):
        pass
    assert [model.state for model in models.by_name.values()] == ["loading", "unloaded", "loaded"]
    for process in models.tell_to_end():
        process.wait()
    waiting.join(HANG_SECONDS)


def test_without_a_model_those_are_served_that_pyorch_models_lists(
    small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    os.link(small_moe, tmp_path / "here.gguf")
    fetched = tmp_path / "hub/models--org--name/snapshots/0123/there.gguf"
    fetched.parent.mkdir(parents=True)
    os.link(small_moe, fetched)
    served = serve._named((), {}, ())
    assert set(served.values()) == {stored.files[0] for stored in cache.listed()} and len(served) == 2
    assert "here" in served and all(name == "here" or name.startswith("hf:org/name") for name in served)


def test_the_router_of_the_chat_page_loads_unloads_and_tells_of_both(start, folder: Path):
    server = start(serve_models(folder))
    with closing(urllib.request.urlopen(f"{server.url}/models/sse", timeout=HANG_SECONDS)) as feed:
        assert feed.headers["Content-Type"] == "text/event-stream"

        def wait_for(model: str, *state: object) -> None:
            for line in feed:
                event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if event.get("model") == model and (event["data"]["status"], event["data"]["exit_code"]) == state:
                    assert event["event"] == "status_change"
                    return

        wait_for("sparse", "unloaded", 0)
        assert server.post("/models/load", {"model": "sparse"}) == (200, '{"success": true}')
        wait_for("sparse", "loading", 0)
        wait_for("sparse", "loaded", 0)
        assert server.post("/models/load", {"model": "sparse"})[0] == 400  # as llama-server's router
        properties = server.get("/props")
        assert properties["role"] == "router" and properties["model_path"] == "sparse.gguf"
        assert server.post("/models/unload", {"model": "sparse"})[0] == 200
        wait_for("sparse", "unloaded", 0)
        assert server.post("/models/load", {"model": "damaged"})[0] == 200
        wait_for("damaged", "unloaded", 1)
        for body in ({}, {"model": "absent"}):
            assert server.post("/models/load", body)[0] in (400, 404)


def test_an_answer_is_continued_and_stopped_by_its_conversation(several: ServerProcess):
    """As the chat page does after a reload, and where its reader stops an answer."""
    def lookup() -> list[dict]:
        return json.loads(several.post("/v1/streams/lookup", {"conversation_ids": ["c::sparse", "unknown"]})[1])

    def ask(path: str, method: str = "GET", body: bytes | None = None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "X-Conversation-Id": "c::sparse"}
        return urllib.request.urlopen(
            urllib.request.Request(several.url + path, body, headers, method=method), timeout=HANG_SECONDS)

    question = {"model": "sparse", "messages": [{"role": "user", "content": PROMPT}], "stream": True,
                "max_tokens": 200, "ignore_eos": True}
    with closing(ask("/v1/chat/completions", "POST", json.dumps(question).encode())) as answer:
        assert answer.readline().startswith(b"data: ")
    wait_until(lambda: [entry["conversation_id"] for entry in lookup()] == ["c::sparse"])
    with closing(ask("/v1/stream?conv_id=c::sparse&from=0")) as rest:
        assert rest.readline().startswith(b"data: ")
    assert ask("/v1/stream?conv_id=c::sparse", "DELETE").status == 204
    assert lookup() == []
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask("/v1/stream?conv_id=unknown")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask("/v1/streams/lookup", "POST", b"[]")


def test_files_of_the_user_are_refused_and_no_chat_page_is_possible(start, folder: Path):
    refused = pyorch("serve", "--models", str(folder), "--port", "0", "--", "--path", str(folder))
    assert refused.returncode == 2 and "without --path" in refused.stderr
    server = start(serve_models(folder, "--", "--no-ui"))
    with urllib.request.urlopen(f"{server.url}/", timeout=HANG_SECONDS) as answer:
        assert answer.url == f"{server.url}/pyorch"


@pytest.mark.browser
def test_the_live_view_shows_the_chosen_model(several: ServerProcess):
    complete(several, "sparse")
    with chromium.Page() as page:
        page.open(f"{several.url}/pyorch?model=sparse")
        page.wait_for("document.getElementById('model')?.textContent == 'sparse.gguf'")
        page.wait_for("document.getElementById('choice').options.length == 4")
        page.value("(() => { const menu = document.getElementById('choice'); menu.value = 'damaged';"
                   "menu.dispatchEvent(new Event('change')); })()")
        page.wait_for("document.getElementById('absent').textContent.startsWith('damaged is not loaded')")


@pytest.mark.browser
@pytest.mark.skipif(not chat_page(), reason="needs the chat page: make chat-page")
def test_the_full_chat_pages_menu_chooses_and_loads_a_model(several: ServerProcess):
    with chromium.Page() as page:
        page.open(f"{several.url}/")
        page.wait_for("document.querySelector('textarea')")
        trigger = ("[...document.querySelectorAll('[aria-haspopup=menu]')].find((each) => "
                   "['damaged', 'dense', 'sparse'].includes(each.innerText.trim()))")
        page.wait_for(trigger)
        page.value(f"{trigger}.dataset.test = 'menu'")
        page.click("[data-test=menu]")
        options = "[...document.querySelectorAll('[role=option]')]"
        page.wait_for(f"{options}.map((each) => each.innerText.trim()).join() == 'damaged,dense,sparse' || "
                      f"{options}.length == 3")
        page.value(f"{options}.find((each) => each.innerText.trim() == 'dense').dataset.test = 'dense'")
        page.click("[data-test=dense]")
        wait_until(lambda: states(several)["dense"] == "loaded")
        page.wait_for("document.querySelector('[data-test=menu]').innerText.trim() == 'dense'")
        page.value("document.querySelector('textarea').focus()")
        page.type("a question")
        page.press("Enter")
        page.wait_for("/dense\\n[^]*\\d+ tokens/.test(document.body.innerText)")
        assert all(url.startswith(several.url) for url in page.requests if not url.startswith(("data:", "blob:")))
        assert [line for line in page.console if "/tools" not in line] == []


@pytest.mark.browser
@pytest.mark.skipif(bool(chat_page()), reason="the build has llama-server's chat page in its place")
def test_the_chat_page_offers_them(several: ServerProcess):
    with chromium.Page() as page:
        page.open(f"{several.url}/")
        page.wait_for("document.getElementById('model')?.options.length == 3")
        page.value("document.getElementById('model').value = 'sparse'; document.getElementById('text').focus()")
        page.type(PROMPT)
        page.press("Enter")
        page.wait_for("document.querySelector('.note')?.textContent.includes(' tokens, ')")
        page.value("document.getElementById('model').value = 'damaged'; document.getElementById('text').focus()")
        page.type("again")
        page.press("Enter")
        page.wait_for("document.querySelector('.error')?.textContent.includes('damaged GGUF')")


@pytest.mark.browser
@pytest.mark.skipif(bool(chat_page()), reason="the build has llama-server's chat page in its place")
def test_a_message_that_is_sent_before_the_models_are_known_waits_for_them(several: ServerProcess):
    late = ("const ask = fetch; const told = new Promise((go) => { window.tell = go; });"
            "window.fetch = async (path, ...rest) => (path === 'v1/models' && await told, ask(path, ...rest));")
    with chromium.Page() as page:
        page.send("Page.addScriptToEvaluateOnNewDocument", source=late)
        page.open(f"{several.url}/")
        page.wait_for("document.readyState === 'complete' && typeof window.tell === 'function'")
        page.value("document.getElementById('text').focus()")
        page.type(PROMPT)
        page.press("Enter")
        page.wait_for("document.querySelector('.assistant') !== null")
        page.value("window.tell()")
        page.wait_for("document.querySelector('.error') !== null")  # the first one of the list cannot be loaded
        assert "damaged GGUF" in page.value("document.querySelector('.error').textContent")


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("--models", "nowhere"), "nowhere is no folder"),
    (("--models", "."), "no models in"),
    ((), "no models in"),
    (("model.gguf", "--models", "."), "leave out MODEL"),
    (("model.gguf", "--keep-alive", "5"), "leave out MODEL"),
])
def test_a_mistake_is_said(tmp_path: Path, arguments: tuple[str, ...], sentence: str):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "model.gguf").touch()
    given = [str(empty) if one == "." else str(tmp_path / one) if one == "model.gguf" else one for one in arguments]
    result = pyorch("serve", *given, "--port", "0", env={**os.environ, "HF_HUB_CACHE": str(empty)})
    assert result.returncode == 2 and sentence in result.stderr, result.stderr


def test_more_clients_than_slots_are_answered_over_every_api(start, tmp_path: Path, small_moe: Path):
    os.link(small_moe, tmp_path / "small.gguf")
    server = start(serve_models(tmp_path, "--", "-np", "2", "-c", "2048"))
    client = ollama.Client(host=server.url)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Say something long."}]
    ask = [
        lambda: client.chat(model="small", messages=messages, options={"num_predict": 40}).message.content,
        lambda: claude.messages.create(model="small", messages=messages, max_tokens=40).content[0].text,
        lambda: server.client.chat.completions.create(model="small", messages=messages, max_tokens=40).choices[0],
    ]
    most = 0.0
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask[i % 3]) for i in range(12)]
        while not all(answer.done() for answer in answers):
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANG_SECONDS) as answer:
                families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
            waiting = families["pyorch_requests_waiting"].samples[0]
            assert waiting.labels == {"model": "small"}
            most = max(most, waiting.value)
        assert all(answer.result() is not None for answer in answers)
    assert 1 < most <= 12, "12 while the model is loaded, then 10"
