"""Several models behind one address, each in a process of its own that runs while it is needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from models import PROMPT
from processes import HANG_SECONDS, pyorch
from servers import ServerProcess, Stream, pyorch_serve, wait_until

from pyorch.llama import memory
from pyorch.llama.memory import MemoryLimit
from pyorch.serve import ollama
from pyorch.serve.models import Models
from pyorch.settings.budget import Budget
from pyorch.sizes import GiB, MiB

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import chromium


@pytest.fixture(scope="module")
def folder(small_moe: Path, dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    os.link(small_moe, folder / "sparse.gguf")
    shutil.copyfile(dense_model, folder / "dense.gguf")
    (folder / "damaged.gguf").write_bytes(small_moe.read_bytes()[:5000])
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    server = ServerProcess(serve_models(folder), tmp_path_factory.mktemp("server") / "log")
    yield server
    server.stop()


def serve_models(folder: Path, *options: str) -> list[str]:
    return pyorch_serve(None, "--models", str(folder), "--threads", "1", "--budget", "60%", *options)


def states(server: ServerProcess) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in server.get("/v1/models")["data"]}


def complete(server: ServerProcess, model: str, n: int = 4) -> object:
    return server.client.completions.create(model=model, prompt="x", max_tokens=n, temperature=0)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in text for child in file.read_text().split()]


def test_a_model_is_loaded_when_a_request_names_it(server: ServerProcess):
    assert states(server) == {"damaged": "unloaded", "dense": "unloaded", "sparse": "unloaded"}
    assert "serving 3 models at " in server.log.read_text()
    with pytest.raises(urllib.error.HTTPError, match="503"):  # nobody loads one by looking
        server.get("/residency")
    assert complete(server, "sparse").model == "sparse"
    assert states(server) == {"damaged": "unloaded", "dense": "unloaded", "sparse": "loaded"}
    assert server.get("/residency")["model"] == "sparse.gguf"
    assert complete(server, "dense").model == "dense"
    assert server.get("/props?model=sparse")["model_path"].endswith("sparse.gguf")
    assert {"dense", "sparse"} <= {name for name, state in states(server).items() if state == "loaded"}


def test_what_cannot_be_served_is_said_and_the_others_are(server: ServerProcess):
    with pytest.raises(server.error, match='model "absent" is not served here; these are: .*sparse') as unknown:
        complete(server, "absent")
    assert unknown.value.status_code == 404
    with pytest.raises(server.error, match="names no model"):
        complete(server, "")
    for _ in range(2):
        with pytest.raises(server.error, match=r"damaged\.gguf is a truncated or damaged GGUF"):
            complete(server, "damaged")
    assert complete(server, "sparse").choices[0].text


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


@pytest.mark.parametrize("length", [10**12, 10**20])
def test_a_body_that_no_memory_has_room_for_is_refused(server: ServerProcess, length: int):
    request = urllib.request.Request(f"{server.url}/v1/completions", b"{}", {"Content-Length": str(length)})
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(request, timeout=HANG_SECONDS)


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


@pytest.fixture
def two(small_moe: Path, monkeypatch: pytest.MonkeyPatch):
    """Two models, and what is free of memory for them."""
    free = {"bytes": 64 * GiB}
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit("a test", 64 * GiB, free["bytes"]))

    def command(name: str, path: Path) -> list[str]:
        return [*pyorch_serve(path, "--budget", "60%", "--threads", "1"), "--while-stdin"]

    models = Models({"a": small_moe, "b": small_moe}, Budget.parse("60%"), 3600.0, "", command)
    yield models, free
    for process in models.tell_to_end():
        process.wait()


def test_models_that_fit_stay_and_others_make_room(two):
    models, free = two
    for name in ("a", "b"):
        with models.held(name, True):
            pass
    assert models.state("a") == models.state("b") == "loaded"
    first = models.models["b"].process
    first.kill()  # as the kernel does where memory is short
    first.wait()
    free["bytes"] = 64 * MiB
    with models.held("b", True) as port:
        assert port and models.state("a") == "unloaded"


def test_a_model_that_answers_is_waited_for(two):
    models, free = two
    free["bytes"] = 64 * MiB
    loaded = threading.Event()

    def ask() -> None:
        with models.held("b", True):
            loaded.set()

    with models.held("a", True):
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: models.state("b") == "loading")
        assert not loaded.wait(1.0) and models.state("a") == "loaded"
    thread.join(HANG_SECONDS)
    assert loaded.is_set() and models.state("a") == "unloaded"


@pytest.mark.skipif(chromium.find() is None, reason="needs a browser: apt-get install chromium")
def test_the_chat_page_offers_them(server: ServerProcess):
    with chromium.Page() as page:
        page.open(f"{server.url}/")
        page.wait_for("document.getElementById('model')?.options.length == 3")
        page.value("document.getElementById('model').value = 'sparse'; document.getElementById('text').focus()")
        page.type(PROMPT)
        page.press("Enter")
        page.wait_for("document.querySelector('.note')?.textContent.includes(' tokens, ')")
        page.value("document.getElementById('model').value = 'damaged'; document.getElementById('text').focus()")
        page.type("again")
        page.press("Enter")
        page.wait_for("document.querySelector('.error')?.textContent.includes('damaged GGUF')")


@pytest.mark.skipif(chromium.find() is None, reason="needs a browser: apt-get install chromium")
def test_a_message_that_is_sent_before_the_models_are_known_waits_for_them(server: ServerProcess):
    late = ("const ask = fetch; const told = new Promise((go) => { window.tell = go; });"
            "window.fetch = async (path, ...rest) => (path === 'v1/models' && await told, ask(path, ...rest));")
    with chromium.Page() as page:
        page.send("Page.addScriptToEvaluateOnNewDocument", source=late)
        page.open(f"{server.url}/")
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


def ask_as_ollama(server: ServerProcess, path: str, body: object) -> list[dict]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        return [json.loads(line) for line in answer]


def test_programs_that_speak_ollama_are_answered(server: ServerProcess):
    names = {model["name"] for model in server.get("/api/tags")["models"]}
    assert names == {"damaged", "dense", "sparse"}
    assert server.get("/api/version")["version"]
    shown, = ask_as_ollama(server, "/api/show", {"model": "sparse:latest"})
    assert shown["details"]["family"] == shown["model_info"]["general.architecture"] == "qwen2moe"
    assert shown["capabilities"] == ["completion"]  # its template knows no tools
    settings = {"temperature": 0, "num_predict": 6}
    plain = server.client.completions.create(model="sparse", prompt=PROMPT, max_tokens=6, temperature=0)

    asked = {"model": "sparse:latest", "prompt": PROMPT, "raw": True, "options": settings}
    *parts, last = ask_as_ollama(server, "/api/generate", asked)
    assert "".join(part["response"] for part in parts) == plain.choices[0].text
    assert not any(part["done"] for part in parts) and last["done"] and last["done_reason"] == "length"
    assert last["eval_count"] == 6 and last["prompt_eval_count"] == plain.usage.prompt_tokens
    whole, = ask_as_ollama(server, "/api/generate", asked | {"stream": False})
    assert whole["response"] == plain.choices[0].text and whole["done"] and whole["model"] == "sparse:latest"

    said = [{"role": "user", "content": "Hello"}]
    chat = server.client.chat.completions.create(model="sparse", messages=said, max_tokens=6, temperature=0)
    asked = {"model": "sparse", "messages": said, "options": settings}
    *parts, last = ask_as_ollama(server, "/api/chat", asked)
    assert "".join(part["message"]["content"] for part in parts) == chat.choices[0].message.content
    whole, = ask_as_ollama(server, "/api/chat", asked | {"stream": False})
    assert whole["message"] == {"role": "assistant", "content": chat.choices[0].message.content}
    loaded, = ask_as_ollama(server, "/api/generate", {"model": "dense"})
    assert loaded["done"] and loaded["done_reason"] == "load" and states(server)["dense"] == "loaded"


@pytest.mark.parametrize(("path", "body", "status", "sentence"), [
    ("/api/chat", [], 400, 'an object of JSON with the name of a "model"'),
    ("/api/chat", {"messages": []}, 400, 'an object of JSON with the name of a "model"'),
    ("/api/chat", {"model": "absent"}, 404, "model 'absent' not found"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x", "images": ["AA=="]}]}, 400, "images"),
    ("/api/chat", {"model": "sparse", "messages": "x"}, 400, "messages"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "options": 3}, 400, "options"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "options": {"temperature": "x"}}, 400, ""),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x"}], "options": {"num_predict": [1]}}, 400, "kind"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x", "tool_calls": 3}]}, 400, "kind"),
    ("/api/chat", {"model": "sparse", "messages": [{"content": "x", "tool_calls": [3]}]}, 400, "kind"),
    ("/api/generate", {"model": "damaged", "prompt": "x"}, 503, "damaged"),
    ("/api/embed", {"model": "sparse"}, 404, "/api/embed is not served here"),
])
def test_what_ollama_would_refuse_is_refused_in_its_form(
    server: ServerProcess, path: str, body: object, status: int, sentence: str
):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask_as_ollama(server, path, body)
    assert refused.value.code == status and sentence in json.load(refused.value)["error"]


def test_tools_and_thoughts_come_in_ollamas_form():
    calls = [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    said = [{"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    path, body = ollama.to_openai("/api/chat", ollama.read(json.dumps(
        {"name": "m", "messages": said, "format": {"type": "object"}, "options": {"num_predict": -1, "top_k": 5}}
    ).encode()), "m")
    call = body["messages"][0]["tool_calls"][0]
    assert path == "/v1/chat/completions" and json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert body["messages"][1]["tool_call_id"] == call["id"] and "max_tokens" not in body and body["top_k"] == 5
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"} and body["stream"] is True

    reply = ollama.Reply("/api/chat", "m")
    pieces = [{"function": {"name": "weather", "arguments": ""}}, {"function": {"arguments": '{"city": '}},
              {"function": {"arguments": '"Paris"}'}}]
    parts = [reply.part({"choices": [{"delta": {"reasoning_content": "hm"}}]})]
    parts += [reply.part({"choices": [{"delta": {"tool_calls": [{"index": 0, **piece}]}}]}) for piece in pieces]
    assert parts[0]["message"] == {"role": "assistant", "content": "", "thinking": "hm"} and parts[1:] == [None] * 3
    assert reply.part({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "timings": {"prompt_ms": 2}}) is None
    last = reply.end()
    assert last["message"]["tool_calls"] == calls and last["done"] and last["prompt_eval_duration"] == 2_000_000
