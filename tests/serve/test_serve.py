"""The server, as its clients see it: a process of its own, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import gguf
import pytest
from architectures import Zoo
from buddy_lists import random_buddies
from ggufs import write_adapter, write_moe_model
from models import PROMPT, small_model
from processes import pyorch
from servers import TEMPLATE_WITH_TOOLS, WHOLE_PROMPT, ServerProcess, Stream, faulty_serve, pyorch_serve, wait_until

from pyorch.cli import main
from pyorch.runtime.model_map import ModelMap
from pyorch.serve import llama_server
from pyorch.serve.llama_server import Flags
from pyorch.sizes import MiB


@pytest.fixture(scope="module")
def server(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    # Two threads: what is answered beside others is computed as by most users.
    command = pyorch_serve(small_moe, "--budget", "40%", "--threads", "2", "--", "--slots", "--context-shift")
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def test_health_endpoint_says_ok(server: ServerProcess):
    assert server.get("/health") == {"status": "ok"}


def test_ready_line_names_model_address_and_budget(server: ServerProcess):
    assert f"pyorch: serving small-moe.gguf at {server.url} (budget " in server.log.read_text()


def test_it_starts_without_what_only_requests_and_other_commands_need(start, small_moe: Path):
    command = pyorch_serve(small_moe, "--budget", "40%", "--threads", "1")
    command[1:1] = ["-X", "importtime"]  # tells all that is imported on standard error
    log = start(command).log.read_text()
    imported = set(re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", log, re.MULTILINE))
    assert {"llama_cpp.llama_cpp", "pyorch.runtime.engine", "pyorch.serve.server"} <= imported
    # Of each: a fiftieth of a second, or more.
    heavy = {"cffi", "gguf", "huggingface_hub", "jinja2", "llama_cpp.llama", "numpy", "prometheus_client",
             "prompt_toolkit", "pycparser", "rich", "torch"}
    assert imported & heavy == set()


def test_users_are_told_the_models_name_and_not_its_path(server: ServerProcess):
    name = "small-moe.gguf"
    assert [model.id for model in server.client.models.list()] == [name]
    assert server.client.completions.create(model="", prompt=PROMPT, max_tokens=1).model == name
    status, echoed = server.post("/v1/completions", {"prompt": PROMPT, "echo": True, "max_tokens": 0})
    assert status == 200 and json.loads(echoed)["model"] == name
    assert server.get("/props")["model_path"] == name


def test_users_are_told_the_order_of_experts_and_why(zoo: Zoo, start):
    server = start(pyorch_serve(zoo.path("olmoe", "Q4_0"), "--budget", "50%", "--kernels", "plain", "--threads", "1"))
    assert server.get("/props")["kernels"] == "plain: --kernels plain"


def test_chat_is_answered(server: ServerProcess):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    answer = server.client.chat.completions.create(model="", messages=messages, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8


TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}


def test_a_tool_call_that_is_required_of_a_template_without_tools_is_refused(server: ServerProcess):
    def ask(choice: object, stream: bool = False):
        return server.client.chat.completions.create(
            model="", messages=[{"role": "user", "content": PROMPT}], max_tokens=2, tools=[TOOL], tool_choice=choice,
            stream=stream)

    for choice in ("required", {"type": "function", "function": {"name": "add"}}, {"function": {"name": "add"}},
                   {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}):
        for stream in (False, True):
            with pytest.raises(server.error, match="chat template of this model does not support tools") as refusal:
                ask(choice, stream)
            assert refusal.value.status_code == 400
    assert ask("auto").choices[0].message.content


FLAT_TOOL = {"type": "function", "name": "add", "parameters": TOOL["function"]["parameters"]}
CLAUDE_TOOL = {"name": "add", "input_schema": TOOL["function"]["parameters"]}


@pytest.mark.parametrize(("path", "tool", "choice", "status"), [
    ("/v1/responses", FLAT_TOOL, "required", 400),
    ("/responses", FLAT_TOOL, {"type": "function", "name": "add"}, 400),
    ("/v1/responses", FLAT_TOOL, {"type": "allowed_tools", "mode": "required", "tools": []}, 400),
    ("/v1/responses", FLAT_TOOL, "auto", 200),
    ("/v1/messages", CLAUDE_TOOL, {"type": "any"}, 400),
    ("/v1/messages", CLAUDE_TOOL, {"type": "tool", "name": "add"}, 400),
    ("/v1/messages", CLAUDE_TOOL, {"type": "auto"}, 200),
    ("/v1/messages", CLAUDE_TOOL, {"type": "none"}, 200),
    ("/v1/messages", None, {"type": "any"}, 400),
    ("/v1/responses", None, "required", 400),
    ("/v1/chat/completions", None, "required", 400),
    ("/v1/chat/completions", None, "auto", 200),
])
def test_a_forced_tool_call_is_refused_by_each_api_with_tools(
    server: ServerProcess, path: str, tool: dict | None, choice: object, status: int
):
    body = {"messages": [{"role": "user", "content": PROMPT}], "input": PROMPT, "max_tokens": 2, "max_output_tokens": 2,
            "tool_choice": choice} | ({"tools": [tool]} if tool else {})
    found, text = server.post(path, body)
    why = "chat template of this model does not support tools" if tool else r'the request has no \"tools\"'
    assert found == status and (why in text) == (status == 400), text
    disguised = json.dumps(body).replace("tool_choice", "tool\\u005fchoice").encode()
    assert server.post(path, disguised)[0] == status


def test_a_tool_call_that_is_required_of_a_template_with_tools_is_not_refused(start, small_moe: Path, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE_WITH_TOOLS)
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--chat-template-file",
                                str(template)))
    answer = server.client.chat.completions.create(
        model="", messages=[{"role": "user", "content": PROMPT}], max_tokens=8, tools=[TOOL], tool_choice="required")
    assert answer.usage.completion_tokens == 8
    check_that_a_named_tool_is_required(server)


def check_that_a_named_tool_is_required(server: ServerProcess) -> None:
    """It is the only one that the model is told of, and no answer ends without a call: the end of text is likeliest."""
    def post(path: str, body: dict) -> dict:
        status, text = server.post(path, body)
        assert status == 200, text
        return json.loads(text)

    end = server.get("/tokenizer_info")["eos_token"]
    end, = post("/tokenize", {"prompt": end, "add_special_tokens": False})["tokens"]
    asked = {"messages": [{"role": "user", "content": PROMPT}], "input": PROMPT, "max_tokens": 6,
             "max_output_tokens": 6, "logit_bias": [[end, 1000]]}
    other = {"type": "function", "function": {**TOOL["function"], "name": "other"}}
    flat, claude = {**FLAT_TOOL, "name": "other"}, {**CLAUDE_TOOL, "name": "other"}
    for path, count, tools, choices, free in (
        ("/v1/chat/completions", "/v1/chat/completions/input_tokens", [other, TOOL], [
            {"type": "function", "function": {"name": "add"}}, {"function": {"name": "add"}},
            {"type": "allowed_tools", "allowed_tools": {
                "mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}}], "auto"),
        ("/v1/responses", "/v1/responses/input_tokens", [flat, FLAT_TOOL], [
            {"type": "function", "name": "add"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}], "auto"),
        ("/v1/messages", "/v1/messages/count_tokens", [claude, CLAUDE_TOOL], [{"type": "tool", "name": "add"}],
         {"type": "auto"}),
    ):
        def n_generated(tools: list, choice: object) -> int:
            usage = post(path, asked | {"tools": tools, "tool_choice": choice})["usage"]
            return usage.get("completion_tokens", usage.get("output_tokens"))

        def n_prompt(tools: list, choice: object) -> int:
            return post(count, asked | {"tools": tools, "tool_choice": choice})["input_tokens"]

        biased = path != "/v1/messages"  # which takes no bias
        assert not biased or n_generated(tools, free) <= 1, "nothing is required"
        for choice in choices:
            assert n_generated(tools, choice) == 6 or not biased, (path, choice)
            assert n_prompt(tools, choice) == n_prompt(tools[1:], free) < n_prompt(tools, free), (path, choice)
        absent = json.loads(json.dumps(choices[0]).replace("add", "absent"))
        status, text = server.post(path, asked | {"tools": tools, "tool_choice": absent})
        assert status == 400 and json.loads(text)["error"]["message"].endswith('and "tools" has no "absent"')
    none = asked | {"tools": [claude, CLAUDE_TOOL], "tool_choice": {"type": "none"}}
    without = asked | {"tools": []}
    assert post("/v1/messages/count_tokens", none) == post("/v1/messages/count_tokens", without)


@pytest.mark.parametrize(("form", "texts"), [
    ({"type": "json_schema", "name": "answer", "schema": {"enum": ["yes", "no"]}}, ('"yes"', '"no"')),
    ({"type": "json_schema", "name": "answer", "strict": True, "schema": {"const": 7}}, ("7",)),
])
def test_responses_obey_the_schema_of_their_text(server: ServerProcess, form: dict, texts: tuple[str, ...]):
    asked = {"model": "", "input": PROMPT, "max_output_tokens": 24, "text": {"format": form}}
    assert server.client.responses.create(**asked).output_text in texts
    *_, last = server.client.responses.create(**asked, stream=True)
    assert last.response.output_text in texts


@pytest.mark.parametrize(("text", "said"), [
    ({"format": {"type": "json_schema", "name": "a", "schema": {"type": "string", "minLength": 5, "maxLength": 2}}},
     "the JSON schema allows nothing"),
    ({"format": {"type": "json_schema", "name": "a", "schema": []}}, '"format" of "text" is'),
    ({"format": {"type": "json_schema"}}, '"format" of "text" is'),
    ({"format": {"type": "xml"}}, '"format" of "text" is'),
    ({"format": "json"}, '"format" is "json", and must be an object'),
    ("short", '"text" is "short", and must be an object'),
])
@pytest.mark.parametrize("path", ["/v1/responses", "/responses/input_tokens"])
def test_a_form_that_responses_cannot_have_is_refused(server: ServerProcess, path: str, text: object, said: str):
    status, answer = server.post(path, {"input": PROMPT, "max_output_tokens": 4, "text": text})
    assert status == 400 and said in json.loads(answer)["error"]["message"], answer


def test_stream_says_the_same_as_the_whole_answer(server: ServerProcess):
    whole = server.complete(PROMPT, extra_body=WHOLE_PROMPT)
    chunks = server.client.completions.create(
        model="", prompt=PROMPT, max_tokens=16, temperature=0, stream=True, extra_body=WHOLE_PROMPT
    )
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert len(pieces) > 2 and "".join(pieces) == whole


def test_greedy_answer_equals_that_of_load(start, small_moe: Path):
    # A server of its own: how far the KV cache is filled, by other slots too, says how attention sums up.
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "2"))
    with small_model(small_moe, "40%") as model:
        tokens = model.llama.tokenize(PROMPT.encode(), add_bos=False)
        expected = "".join(model.generate(tokens, max_tokens=24, temperature=0))
    assert expected.strip() and server.complete(tokens, 24, extra_body=WHOLE_PROMPT) == expected


def test_a_slim_model_and_its_pack_are_served_like_the_model(
    start, server: ServerProcess, small_moe: Path, tmp_path: Path
):
    assert main(["pack", str(small_moe), "--codec", "table", "--slim", str(tmp_path / "slim.gguf")]) == 0
    slim = start(pyorch_serve(tmp_path / "slim.gguf", "--threads", "1", "--", "-c", "256"))
    assert slim.complete(PROMPT) == server.complete(PROMPT, extra_body=WHOLE_PROMPT)
    assert slim.stop()[0] == 0


def test_log_probabilities_are_the_same_with_and_without_a_budget(start, small_moe: Path):
    """A prompt, again from the cache, and one that is cached in part: other batches each time."""
    answers = []
    for budget in ("resident", "20%"):
        server = start(pyorch_serve(small_moe, "--budget", budget, "--threads", "1", "--", "-np", "4"))
        # It says beside its address that a step of four requests needs more experts than a fifth of them.
        wait_until(lambda: budget == "resident" or "pyorch: note: -np 2 suits this budget" in server.log.read_text())
        answers.append(
            [
                server.client.completions.create(
                    model="", prompt=prompt, max_tokens=16, temperature=0, logprobs=3
                ).choices[0]
                for prompt in (PROMPT, PROMPT, PROMPT + "\n    return")
            ]
        )
        server.stop()
    resident, managed = answers
    assert resident[0].logprobs.content and managed == resident


def test_eight_requests_at_once_are_all_answered(server: ServerProcess):
    prompts = [f"def count_{i}(items):\n    return" for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.complete, prompts))
    assert all(answers)


def test_a_request_whose_client_left_ends_whoever_asks_for_something_else(server: ServerProcess):
    """It has no end, and the slots are looked at until it has one."""
    body = json.dumps({"prompt": PROMPT, "n_predict": -1, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: any(slot["is_processing"] for slot in server.get("/slots")))
    wait_until(lambda: not any(slot["is_processing"] for slot in server.get("/slots")))


def test_cancelled_stream_frees_its_slot(server: ServerProcess):
    stream = server.client.completions.create(
        model="", prompt=PROMPT, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: not any(slot["is_processing"] for slot in server.get("/slots")))
    assert server.complete(PROMPT)


def test_signal_ends_it_cleanly_and_the_port_is_free_again(start, small_moe: Path):
    """Of the one that listened there before: the next one does."""
    port = "0"
    for number, is_read in ((signal.SIGTERM, True), (signal.SIGINT, False)):
        server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--json", "--stats-every", "0.2",
                                    "--port", port))
        assert port in ("0", str(server.port))
        port = str(server.port)
        if not is_read:
            server.process.stdout.close()
        assert server.complete(PROMPT)
        status, stdout = server.stop(number)
        assert status == (0 if is_read else 141) and "Traceback" not in server.log.read_text(), server.log.read_text()
        if is_read:
            last = json.loads(stdout.splitlines()[-1])
            assert last["misses"] > 0 and last["peak_bytes"] <= last["budget_bytes"]
        with socket.create_server(("127.0.0.1", server.port)):
            pass


def test_unreadable_expert_fails_the_request_and_spares_the_server(start, small_moe: Path, tmp_path: Path):
    fault = tmp_path / "fault"
    server = start(faulty_serve(small_moe, fault))
    before = server.complete(PROMPT, extra_body=WHOLE_PROMPT)

    fault.write_text("broken")
    with pytest.raises(server.internal_error) as failure:
        server.complete("class Matrix:\n    def __init__(self, rows):\n" + PROMPT)
    assert failure.value.status_code == 500
    assert re.match(r"Error code: 500 - .*Compute error\. .*Input/output error", str(failure.value))
    messages = [{"role": "user", "content": PROMPT * 2}]
    with pytest.raises(server.internal_error, match=r"Compute error\. .*Input/output error"):
        server.client.chat.completions.create(model="", messages=messages, max_tokens=4)
    with pytest.raises(server.error, match=r"Compute error\. .*Input/output error"):
        list(server.client.chat.completions.create(model="", messages=messages, max_tokens=4, stream=True))
    wait_until(lambda: "Input/output error" in server.log.read_text())

    fault.unlink()
    assert server.complete(PROMPT, extra_body=WHOLE_PROMPT) == before
    assert server.stop()[0] == 0


def test_a_stream_that_fails_in_the_middle_ends_with_the_reason_and_as_streams_end(
    start, small_moe: Path, tmp_path: Path
):
    fault = tmp_path / "fault"
    server = start(faulty_serve(small_moe, fault))
    with closing(Stream(server, 3000, path="/v1/chat/completions")) as stream:
        parts = iter(stream)
        next(parts)
        fault.write_text("broken")
        *_, error, done = parts
    assert "Input/output error" in error["error"]["message"] and done is None


def test_truncated_file_fails_the_request_and_spares_the_server(start, small_moe: Path, tmp_path: Path):
    model = tmp_path / "model.gguf"
    shutil.copyfile(small_moe, model)
    adapter = tmp_path / "adapter.gguf"
    write_adapter(adapter, small_moe, "_exps")
    server = start(pyorch_serve(model, "--budget", "20%", "--threads", "1", "--", "--lora", str(adapter)))
    assert server.complete(PROMPT) and server.get("/lora-adapters")[0]["path"] == adapter.name

    os.truncate(model, 1 << 20)
    other = "class Matrix:\n    def __init__(self, rows):\n" + PROMPT
    with pytest.raises(server.internal_error, match=r"from model\.gguf: the file was changed"):
        server.complete(other)
    status, said = server.post("/v1/completions", {"prompt": other, "echo": True, "max_tokens": 0})
    assert status == 500 and "from model.gguf: the file was changed" in said
    assert server.get("/health") == {"status": "ok"}
    assert server.stop()[0] == 0


def refused_process(*arguments: object) -> str:
    """The one sentence that a server says which does not start, though llama-server was called."""
    result = pyorch("serve", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence where it is not."""

    def run(*arguments: object) -> str:
        capfd.readouterr()
        assert main(["serve", *map(str, arguments)]) == 2
        printed = capfd.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1, printed.err
        return printed.err

    return run


def test_wrong_path_is_refused(refused, tmp_path: Path):
    assert "absent.gguf: no such file" in refused(tmp_path / "absent.gguf")


def test_budget_below_the_floor_is_refused(refused, small_moe: Path):
    assert "below the floor" in refused(small_moe, "--budget", "1KiB", "--port", 0)


@pytest.mark.parametrize("budget", ["auto", "60%"])
def test_a_model_that_would_end_the_server_is_refused(tmp_path: Path, budget: str):
    path = tmp_path / "tiny.gguf"
    write_moe_model(path, gating=False)
    assert "it has no dots1.expert_gating_func" in refused_process(path, "--budget", budget, "--port", 0)


def test_port_in_use_is_refused(refused, small_moe: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port}" in refused(small_moe, "--port", port)


def test_unknown_flag_of_llama_server_is_refused(small_moe: Path):
    assert "--no-such-flag" in refused_process(small_moe, "--port", 0, "--", "--no-such-flag")


def test_second_model_is_refused(refused, small_moe: Path):
    assert "cannot be given again" in refused(small_moe, "--", "-m", small_moe)


def test_flags_of_the_user_replace_the_defaults():
    flags = Flags(["--load-mode", "mmap", "-t", "3", "--warmup"])
    flags.add_defaults()
    assert flags.arguments[:5] == ["--load-mode", "mmap", "-t", "3", "--warmup"]
    assert "--no-warmup" not in flags.arguments and flags.arguments.count("-t") == 1
    assert flags.value(llama_server.CACHE_RAM) == "0"


def test_an_option_that_is_replaced_is_given_once():
    flags = Flags(["--port", "0", "-t", "3"])
    flags.replace(llama_server.PORT, 4711)
    assert flags.arguments == ["--port", "4711", "-t", "3"]
    flags = Flags([])
    flags.replace(llama_server.PORT, 4711)
    assert flags.arguments == ["--port", "4711"]


def test_environment_counts_where_there_is_no_flag(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1234")
    assert Flags([]).context_params().n_ctx == 1234
    assert Flags(["-c", "512"]).context_params().n_ctx == 512


def test_planner_is_told_the_context_that_the_server_makes():
    params = Flags(["-c", "8192", "-np", "2", "-ub", "256", "-ctk", "q8_0", "-ctv", "f32"]).context_params()
    assert (params.n_ctx, params.n_seq_max, params.n_ubatch, params.kv_unified) == (8192, 2, 256, False)
    assert (params.type_k, params.type_v) == (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32)
    automatic = Flags(["-c", "8192"]).context_params()
    assert (automatic.n_seq_max, automatic.kv_unified) == (4, True)


def test_prompt_cache_and_draft_model_are_left_room(small_moe: Path):
    flags = Flags(["-cram", "100", "-md", str(small_moe)])
    assert flags.other_bytes() == 100 * MiB + small_moe.stat().st_size


def test_a_lossy_server_says_what_it_substituted(small_moe: Path, tmp_path: Path, start) -> None:
    model = tmp_path / "model.gguf"
    os.link(small_moe, model)
    with ModelMap(model) as model_map:
        random_buddies(1).write(model.with_name("model.buddies.gguf"), model_map)
    options = ("--budget", "25%", "--threads", "1", "--lossy", "rho=2", "--json")
    server = start(pyorch_serve(model, *options))
    assert server.complete(PROMPT, 24)
    status, stdout = server.stop()
    assert status == 0
    lossy = json.loads(stdout.splitlines()[-1])["substitution"]
    assert lossy["substituted"] > 0 and lossy["lossy_tokens"] <= lossy["tokens"]
