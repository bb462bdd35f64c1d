"""A server whose device is lost: the process that has it is killed while it computes."""

from __future__ import annotations

import signal
import socket
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from devices import CountingWire, DeviceProcess
from models import PROMPT
from processes import HANG_SECONDS
from servers import WHOLE_PROMPT, ServerProcess, Stream, pyorch_serve, wait_until


@pytest.fixture
def device(tmp_path: Path):
    process = DeviceProcess(tmp_path / "device.log")
    yield process
    process.stop()


def likelihoods(server: ServerProcess) -> object:
    return server.client.completions.create(model="", prompt=PROMPT, max_tokens=16, temperature=0, logprobs=3,
                                            extra_body=WHOLE_PROMPT).choices[0]


def n_loads(server: ServerProcess) -> int:
    return server.log.read_text().count("pyorch: serving ")


def test_running_requests_end_with_a_sentence_and_the_next_is_answered_by_the_processor(
    start, small_moe: Path, device: DeviceProcess
):
    options = ("--budget", "40%", "--threads", "1")
    server = start(pyorch_serve(small_moe, *options, "--device", device.name, "--vram-budget", "40%", "--json", "--",
                                "--context-shift", "-np", "2"))
    with closing(Stream(server, -1)) as one, closing(Stream(server, -1)) as other:
        next(iter(one)), next(iter(other))
        wait_until(lambda: float(metric(server, "pyorch_device_hits_total")) > 0)
        device.stop()
        for stream in (one, other):
            *parts, last = stream
            assert all(set(part) >= {"content", "stop"} for part in parts), "an answer goes on"
            assert "is lost: its process ended" in last["error"]["message"] and last["error"]["code"] == 500
    wait_until(lambda: n_loads(server) == 2 or server.process.poll() is not None)
    assert server.process.poll() is None, server.log.read_text()
    answer = likelihoods(server)
    assert metric(server, "pyorch_device_hits_total") is None
    assert float(metric(server, "pyorch_expert_misses_total")) > 0
    assert server.stop(signal.SIGTERM)[0] == 0
    assert server.log.read_text().count("is lost") == 1, "it is said once"

    alone = start(pyorch_serve(small_moe, *options, "--", "-np", "2"))
    expected = likelihoods(alone)
    assert answer.text == expected.text and answer.logprobs == expected.logprobs


def test_a_server_that_nobody_asks_loses_its_device_too(start, small_moe: Path, device: DeviceProcess):
    """And a signal ends it whatever it is at."""
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--device", device.name))
    assert "(llama.cpp keeps all experts on RPC0)" in server.log.read_text()  # where they all fit
    device.stop()
    wait_until(lambda: n_loads(server) == 2 or server.process.poll() is not None)
    assert server.complete(PROMPT)
    assert server.stop(signal.SIGINT)[0] == 0 and "Traceback" not in server.log.read_text()


def test_of_two_devices_one_after_the_other_is_lost(start, small_moe: Path, device: DeviceProcess, tmp_path: Path):
    second = DeviceProcess(tmp_path / "second.log")
    options = ("--budget", "40%", "--threads", "1")
    devices = ("--device", f"{device.name},{second.name}", "--vram-budget", "40%")
    server, alone = (start(pyorch_serve(small_moe, *options, *given, "--", "-np", "2")) for given in (devices, ()))
    answer, expected = likelihoods(server), likelihoods(alone)
    assert answer.text == expected.text and answer.logprobs == expected.logprobs
    assert float(metric(server, "pyorch_device_hits_total")) > 0
    # Whoever waits for the one that is left does not get it while the model is loaded again.
    with socket.create_connection(("127.0.0.1", second.port), HANG_SECONDS):
        for process, n, by_device in ((device, 2, True), (second, 3, False)):
            process.stop()
            wait_until(lambda: n_loads(server) == n or server.process.poll() is not None)
            answer = likelihoods(server)
            assert answer.text == expected.text and answer.logprobs == expected.logprobs
            hits = metric(server, "pyorch_device_hits_total")
            assert (hits is not None and float(hits) > 0) == by_device, "the one that is left goes on"


def test_another_is_lost_while_the_model_is_loaded_again(start, small_moe: Path, device: DeviceProcess, tmp_path: Path):
    with closing(DeviceProcess(tmp_path / "second.log")) as second, closing(CountingWire(second)) as wire:
        server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--device",
                                    f"{device.name},{wire.name}", "--vram-budget", "40%"))
        wire.cut_at(wire.ALLOCATE)  # as its part of the weights goes there
        device.stop()
        wait_until(lambda: n_loads(server) > 1 or server.process.poll() is not None)
        assert wire.is_cut and server.process.poll() is None, server.log.read_text()
        assert server.complete(PROMPT)
        assert metric(server, "pyorch_device_hits_total") is None


def metric(server: ServerProcess, name: str) -> str | None:
    with urllib.request.urlopen(server.url + "/metrics", timeout=HANG_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(name + " ")), None)
