"""How a server ends, and what half-sent requests can do to it."""

from __future__ import annotations

import json
import select
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from models import PROMPT
from processes import HANG_SECONDS
from servers import WHOLE_PROMPT, ServerProcess, Stream, faulty_serve, pyorch_serve, wait_until

from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.history import ExpertMaps

ENDLESS = -1  # tokens


def serve(start, model: Path, *options: str, warm: bool = False) -> ServerProcess:
    command = pyorch_serve(model, "--budget", "30%", "--threads", "1", "--json", *options, "--", "--context-shift")
    return start([word for word in command if not warm or word != "--cold"])


def half_sent(server: ServerProcess, text: bytes) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=HANG_SECONDS)
    connection.sendall(text)
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    """Nothing comes, and nothing will: a connection that nobody had accepted yet is reset."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_request_that_runs_is_answered_wholly_and_new_ones_are_not_accepted(start, small_moe: Path, tmp_path: Path):
    """It runs as long as the disk needs."""
    fault = tmp_path / "fault"
    server = start(faulty_serve(small_moe, fault))
    expected = server.complete(PROMPT, extra_body=WHOLE_PROMPT)
    fault.write_text("slow")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, PROMPT, extra_body=WHOLE_PROMPT)
        try:
            wait_until(fault.with_suffix(".reached").exists)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "1 request" in server.log.read_text())
            try:
                with half_sent(server, b"GET /health HTTP/1.1\r\n\r\n") as connection:
                    assert is_cut_off(connection)
            except ConnectionError:
                pass
        finally:
            fault.unlink()
        assert answer.result() == expected and server.process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages",
                                  "/v1/responses"])
def test_a_stream_that_is_left_after_the_grace_says_that_it_is_not_whole(start, small_moe: Path, path: str):
    server = serve(start, small_moe, "--grace", "0")
    with closing(Stream(server, ENDLESS if path != "/v1/messages" else 10**6, path=path)) as stream:
        parts = iter(stream)
        next(parts)
        server.process.send_signal(signal.SIGTERM)
        rest = list(parts)
    assert server.process.wait(HANG_SECONDS) == 0, server.log.read_text()
    if path.endswith("completions"):
        assert rest.pop() is None
    assert "the server ends" in rest[-1]["error"]["message"]


def test_a_stream_that_waits_for_the_disk_when_the_server_ends_is_told_so(start, small_moe: Path, tmp_path: Path):
    fault = tmp_path / "fault"
    server = start(faulty_serve(small_moe, fault, grace=0))
    with closing(Stream(server, 3000, path="/v1/chat/completions")) as stream:
        parts = iter(stream)
        next(parts)
        fault.write_text("slow")
        try:
            wait_until(fault.with_suffix(".reached").exists)
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = parts
        finally:
            fault.unlink()
    assert "the server ends" in error["error"]["message"] and done is None
    assert server.process.wait(HANG_SECONDS) == 0


def test_an_answer_that_waits_for_the_disk_when_the_server_ends_is_an_error(start, small_moe: Path, tmp_path: Path):
    fault = tmp_path / "fault"
    server = start(faulty_serve(small_moe, fault, grace=0))
    fault.write_text("slow")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, PROMPT)
        try:
            wait_until(fault.with_suffix(".reached").exists)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(server.internal_error, match="503.*the server ends"):
                answer.result()
        finally:
            fault.unlink()
    assert server.process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_left_after_the_grace_is_ended_and_all_is_written(
    start, small_moe: Path, tmp_path: Path, number, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    maps = tmp_path / "maps.gguf"
    with ModelMap(small_moe) as model_map:  # something to write, however much of the request its thread has seen
        store = ExpertMaps.for_model(model_map)
        store.uses += 1
        store.write(maps, model_map)
    before = maps.stat().st_ino
    server = serve(start, small_moe, "--grace", "0", "--prefetch", "expert-map", "--maps", str(maps),
                   warm=True)
    with closing(Stream(server, ENDLESS)) as stream:
        next(iter(stream))
        waiting = [half_sent(server, text) for text in (b"POST /completion HTTP/1.1\r\n", b"GET", b"", b"P", b"G")]
        status, stdout = server.stop(number)
        for connection in waiting:
            connection.close()
    assert status == 0, server.log.read_text()
    assert json.loads(stdout.splitlines()[-1])["misses"] > 0
    assert maps.stat().st_ino != before and len(list(tmp_path.glob("pyorch/warm-*.gguf"))) == 1


def test_half_sent_requests_do_not_wait_for_the_grace(start, small_moe: Path):
    server = serve(start, small_moe, "--grace", str(2 * HANG_SECONDS))
    head = (b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{")
    waiting = [half_sent(server, head) for _ in range(5)]
    status, _ = server.stop()
    assert status == 0 and all(map(is_cut_off, waiting))
    for connection in waiting:
        connection.close()


def test_a_second_signal_ends_it_at_once_and_it_still_writes(
    start, small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = serve(start, small_moe, "--grace", str(2 * HANG_SECONDS), warm=True)
    with closing(Stream(server, ENDLESS)) as stream:
        answers = iter(stream)
        next(answers)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "a second signal" in server.log.read_text())
        status, stdout = server.stop()
    assert status == 128 + signal.SIGTERM and len(list(tmp_path.glob("pyorch/warm-*.gguf"))) == 1
    assert json.loads(stdout.splitlines()[-1])["misses"] > 0


def test_150_half_sent_requests_do_not_make_others_wait(start, small_moe: Path):
    server = serve(start, small_moe)
    waiting = [half_sent(server, b"POST /completion HTTP/1.1\r\nHost: localhost\r\n") for _ in range(150)]
    assert server.get("/health") == {"status": "ok"}
    # None of them was ended for it.
    assert select.select(waiting, [], [], 0)[0] == []
    for connection in waiting:
        connection.close()
    assert server.stop()[0] == 0
