"""Servers that compute experts for each other: what becomes of those that die, hang, lie or do not belong."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

from pyorch import ports
from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.engine import HERE
from pyorch.sidecars.container import fingerprint

TOKEN = "a token for tests"
PROGRAM = Path(__file__).with_name("peer_process.py")


@dataclass
class Server:
    process: subprocess.Popen
    port: int

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """The slots that it computed."""
        out, _ = self.process.communicate(timeout=HANG_SECONDS)
        assert self.process.returncode == 0
        return int(out)


@contextlib.contextmanager
def server_process(path: Path, budget: str = "50%", token: str = TOKEN) -> Iterator[Server]:
    # With one heap, which takes address space when it grows: those of threads have theirs reserved. What is larger than
    # so many bytes is no part of it.
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    process = subprocess.Popen([sys.executable, PROGRAM, path, budget, token], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, env=os.environ | heap)
    try:
        yield Server(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def client(small_moe: Path) -> Iterator[Model]:
    with small_model(small_moe, "40%", prefetch="none") as model:
        yield model


@pytest.fixture(scope="module")
def expected(resident: Model, prompt_tokens: list[int]) -> list[np.ndarray]:
    return decoded(resident, prompt_tokens)


def decoded(model: Model, prompt: list[int]) -> list[np.ndarray]:
    with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        return [context.decode(prompt), *(context.decode([token]) for token in prompt[:4])]


def assert_right(model: Model, prompt: list[int], expected: list[np.ndarray]) -> None:
    for rows, right in zip(decoded(model, prompt), expected, strict=True):
        assert_same_bits(rows, right)


def connect(model: Model, port: int, timeout: float = 60) -> int:
    """The number of the server. Where nothing is to be lost, it may be silent for long: the machine may be busy."""
    return model.engine.connect("127.0.0.1", port, TOKEN, fingerprint(model.map), timeout)


def connect_soon(model: Model, port: int, timeout: float) -> int:
    """Where one that is silent for a little is lost, which it may be for no reason of its own while it joins."""
    found: list[int] = []

    def is_joined() -> bool:
        with contextlib.suppress(PyorchError):
            found.append(connect(model, port, timeout))
        return bool(found)

    wait_until(is_joined)
    return found[0]


def place(model: Model, *numbers: int) -> None:
    """Experts go to the servers in turn."""
    for layer in model.layers.values():
        model.engine.set_placement(layer.il, [numbers[e % len(numbers)] for e in range(layer.n_expert)])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_three_processes_compute_what_one_does(small_moe, client, prompt_tokens, expected):
    with server_process(small_moe) as first, server_process(small_moe, "30%") as second:
        place(client, HERE, connect(client, first.port), connect(client, second.port))
        assert_right(client, prompt_tokens, expected)
        stats = client.engine.remote_stats()
        assert stats.fallback == 0
        assert first.ended() + second.ended() == stats.slots > 0


def test_a_server_that_is_killed_inside_a_request_costs_no_request(small_moe, client, prompt_tokens, expected):
    with server_process(small_moe) as server:
        number = connect(client, server.port)
        place(client, HERE, number)
        server.send_signal(signal.SIGSTOP)  # so that the request has no answer yet when it is killed
        result: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: result.extend(decoded(client, prompt_tokens)))
        thread.start()
        wait_until(lambda: client.engine.peer(number).requests > 0)
        server.send_signal(signal.SIGKILL)
        thread.join()
    for rows, right in zip(result, expected, strict=True):
        assert_same_bits(rows, right)
    peer, stats = client.engine.peer(number), client.engine.remote_stats()
    assert not peer.joined and peer.failed == 1 and stats.fallback == stats.slots > 0
    assert client.engine.stats().loads > 0


def test_a_server_that_hangs_is_lost_and_one_that_comes_back_is_used(small_moe, client, prompt_tokens, expected):
    with server_process(small_moe) as server:
        number = connect_soon(client, server.port, timeout=0.5)
        place(client, number)
        server.send_signal(signal.SIGSTOP)
        assert_right(client, prompt_tokens, expected)
        wait_until(lambda: not client.engine.peer(number).joined and
                   "said nothing for 500 ms" in client.engine.peer(number).error)
        assert client.engine.stats().loads > 0
        before = client.engine.remote_stats()
        server.send_signal(signal.SIGCONT)

        def is_asked_again() -> bool:
            assert_right(client, prompt_tokens, expected)
            return client.engine.remote_stats().slots > before.slots

        wait_until(is_asked_again)


def test_an_expert_that_the_server_cannot_read_is_computed_here(small_moe, client, prompt_tokens, expected, tmp_path):
    class Broken:
        """Reads nothing of the experts."""

        def read(self, file: int, offset: int, size: int) -> bytes:
            raise OSError("the disk is gone")

    with small_model(small_moe, "50%", source=Broken(), prefetch="none") as server:
        number = connect(client, server.engine.listen(TOKEN, fingerprint(client.map)))
        place(client, HERE, number)
        assert_right(client, prompt_tokens, expected)
        peer = client.engine.peer(number)
        assert peer.joined and peer.failed == peer.requests > 0 and "Input/output error" in peer.error
        assert server.engine.served().failed == peer.failed
        server.engine.stop_listening()


# Who does not belong


def test_who_does_not_belong_is_refused_in_a_sentence(small_moe, small_moe_q4, client):
    with small_model(small_moe, "50%") as server:
        model = fingerprint(server.map)
        port = server.engine.listen(TOKEN, model)
        for token, fingerprint_of, sentence in (
            ("another token!!!!", model, "its token is another one"),
            (TOKEN + "!", model, "its token is another one"),
            ("", model, "its token is another one"),
            (TOKEN, "0" * 64, "its model is another one"),
        ):
            with pytest.raises(PyorchError, match=sentence):
                client.engine.connect("127.0.0.1", port, token, fingerprint_of, 60)
        with small_model(small_moe_q4, "50%") as other, pytest.raises(PyorchError, match="its model is another one"):
            other.engine.connect("127.0.0.1", port, TOKEN, model, 60)  # whoever says that it is the same
        assert server.engine.served().connections == 0
        server.engine.stop_listening()
        with pytest.raises(PyorchError, match="cannot be reached"):
            connect(client, port)


# Rubbish on the wire: native/src/cluster/frames.h

MAGIC, VERSION = 0x58455950, 3
HELLO, WELCOME, REFUSED, COMPUTE, COMPUTED, FAILED, PING, PONG = range(1, 9)
HEADER = struct.Struct("<IHHQQ")


def frame(kind: int, payload: bytes = b"", number: int = 0, magic: int = MAGIC, version: int = VERSION,
          size: int | None = None) -> bytes:
    return HEADER.pack(magic, version, kind, number, len(payload) if size is None else size) + payload


def receive(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = connection.recv(n - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def receive_frame(connection: socket.socket) -> tuple[int, int, bytes]:
    """Kind, number, payload."""
    magic, version, kind, number, size = HEADER.unpack(receive(connection, HEADER.size))
    assert (magic, version) == (MAGIC, VERSION)
    return kind, number, receive(connection, size)


def compute(layer: int = 0, n_embd: int = 128, rows: tuple[int, ...] = (0,), experts: tuple[int, ...] = (0,),
            n_rows: int = 1, n_slots: int | None = None, inputs: int | None = None, row_type: int = 0) -> bytes:
    n_slots = len(experts) if n_slots is None else n_slots
    inputs = n_rows * n_embd if inputs is None else inputs
    return (struct.pack("<5i", layer, n_embd, n_rows, n_slots, row_type)
            + np.int32(rows).tobytes() + np.int32(experts).tobytes() + np.ones(len(experts), np.float32).tobytes()
            + np.zeros(inputs, np.float32).tobytes())


@pytest.fixture(scope="module")
def hello(small_moe_q4: Path) -> bytes:
    """What a server of this model says first, by listening to one."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, small_model(small_moe_q4, "50%") as model:
        def listen() -> None:
            connection, _ = listening.accept()
            with connection:
                said.append(receive_frame(connection)[2])
        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(PyorchError):
            model.engine.connect("127.0.0.1", listening.getsockname()[1], TOKEN, fingerprint(model.map))
        thread.join()
    return said[0]


HOSTILE = {
    "no frame": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no frames"),
    "another version": (frame(COMPUTE, version=1), "version 1"),
    "a frame for clients": (frame(COMPUTED, b"1234"), "kind 5"),
    "an unknown kind": (frame(77), "kind 77"),
    "a second greeting": (frame(HELLO, bytes(392)), "kind 1"),
    "a ping with a payload": (frame(PING, b"1"), "kind 7"),
    "more than memory": (frame(COMPUTE, size=1 << 60), "was not to come"),
    "nothing": (frame(COMPUTE), "a request of 0 bytes"),
    "half a head": (frame(COMPUTE, b"12345678"), "a request of 8 bytes"),
    "a layer too high": (frame(COMPUTE, compute(layer=8)), "layer 8 of 8"),
    "a negative layer": (frame(COMPUTE, compute(layer=-1)), "layer -1"),
    "rows too narrow": (frame(COMPUTE, compute(n_embd=64)), "rows of 64 numbers, not 128"),
    "no slots": (frame(COMPUTE, compute(rows=(), experts=(), n_rows=0)), "0 rows for 0 slots"),
    "more rows than slots": (frame(COMPUTE, compute(n_rows=2)), "2 rows for 1 slots"),
    "negative counts": (frame(COMPUTE, compute(n_slots=-5)), "for -5 slots"),
    "very many slots": (frame(COMPUTE, compute(n_slots=2**31 - 1)), "2147483647 slots"),
    "rows of a type that is none": (frame(COMPUTE, compute(row_type=2)), "rows of type 2"),
    "four bytes a number where two are said": (frame(COMPUTE, compute(row_type=1)), "bytes for 1 rows"),
    "more slots than it takes": (frame(COMPUTE, compute(rows=(0,) * 1025, experts=(0,) * 1025)), "for 1025 slots"),
    "a row too few": (frame(COMPUTE, compute(inputs=127)), "bytes for 1 rows"),
    "a row too many": (frame(COMPUTE, compute(inputs=129)), "bytes for 1 rows"),
    "an expert too high": (frame(COMPUTE, compute(experts=(64,))), "expert 64 of 64"),
    "a negative expert": (frame(COMPUTE, compute(experts=(-1,))), "expert -1"),
    "a row that is not there": (frame(COMPUTE, compute(rows=(1,))), "row 1 of 1"),
}


def test_who_sends_what_cannot_be_is_cut_off_in_a_sentence(small_moe_q4, hello):
    with small_model(small_moe_q4, "50%") as server:
        port = server.engine.listen(TOKEN, fingerprint(server.map))
        for what, (data, sentence) in HOSTILE.items():
            with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
                connection.sendall(frame(HELLO, hello))
                assert receive_frame(connection)[0] == WELCOME, what
                connection.sendall(data)
                kind, _, why = receive_frame(connection)
                assert kind == REFUSED and sentence in why.decode(), (what, why)
                assert connection.recv(1) == b"", what
                assert why.decode() in server.engine.served().error
        served = server.engine.served()
        assert (served.refused, served.requests) == (len(HOSTILE), 0)

        # Who joins never, in pieces, or goes in the middle of a frame, disturbs nobody either.
        greeting = frame(HELLO, hello)
        for beginning in (b"", b"\0" * 10, greeting[:-1], greeting + frame(COMPUTE, compute())[:-1]):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(beginning)
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
            for i in range(0, len(greeting), 50):  # it has three seconds to say who it is
                connection.sendall(greeting[i : i + 50])
            assert receive_frame(connection)[0] == WELCOME
            connection.sendall(frame(COMPUTE, compute(experts=(3, 63), rows=(0, 0)), number=5) + frame(PING))
            answers = {kind: rest for kind, *rest in (receive_frame(connection) for _ in range(2))}
            assert answers[PONG] == [0, b""]
            number, payload = answers[COMPUTED]
            assert number == 5 and len(payload) == 2 * 128 * 4
            assert not np.frombuffer(payload, np.float32).any(), "an expert makes zeros of zeros"
            connection.sendall(frame(COMPUTE, compute(row_type=1, inputs=64), number=6))
            assert receive_frame(connection) == (COMPUTED, 6, bytes(128 * 2))
        server.engine.stop_listening()


def test_a_request_that_memory_has_no_room_for_is_refused_and_the_server_goes_on(small_moe_q4, hello):
    with server_process(small_moe_q4, "100%") as server:
        def joined() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
            connection.sendall(frame(HELLO, hello))
            assert receive_frame(connection)[0] == WELCOME
            return connection

        with joined() as connection:
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            in_use = int(status.partition("VmSize:")[2].split()[0]) << 10
            before = resource.prlimit(server.process.pid, resource.RLIMIT_AS)
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (in_use, before[1]))
            connection.sendall(frame(COMPUTE, compute(rows=512 * (0,), experts=512 * (0,), n_rows=512)))
            kind, _, why = receive_frame(connection)
            assert (kind, why) == (REFUSED, b"there is no memory for a request as large as its")
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, before)
        with joined() as connection:
            connection.sendall(frame(COMPUTE, compute()))
            assert receive_frame(connection)[0] == COMPUTED


LIES = {
    "no frame": lambda number, size: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an answer to nothing": lambda number, size: frame(COMPUTED, bytes(size), number + 1),
    "an answer too short": lambda number, size: frame(COMPUTED, bytes(size - 4), number),
    "an answer too long": lambda number, size: frame(COMPUTED, bytes(size + 4), number),
    "a sentence without an end": lambda number, size: frame(FAILED, b"x" * 1025, number),
    "a question": lambda number, size: frame(COMPUTE, bytes(64), number),
    "signs of life that nobody asked for": lambda number, size: 5000 * frame(PONG),
    "the end": lambda number, size: b"",
    "half an answer": lambda number, size: frame(COMPUTED, bytes(size), number)[:-1],
    "a refusal": lambda number, size: frame(REFUSED, b"no memory"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_cut_off_and_the_request_goes_on(client, prompt_tokens, expected, lie):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                receive_frame(connection)
                connection.sendall(frame(WELCOME, struct.pack("<2Q", 0, 1 << 12)))
                kind = PING
                while kind == PING:
                    kind, number, payload = receive_frame(connection)
                    if kind == PING:
                        connection.sendall(frame(PONG))
                n_slots = struct.unpack_from("<i", payload, 12)[0]
                connection.sendall(LIES[lie](number, n_slots * 128 * 4))

        thread = threading.Thread(target=serve)
        thread.start()
        number = connect(client, listening.getsockname()[1])
        assert not client.engine.peer(number).same_kernels
        place(client, HERE, number)
        assert_right(client, prompt_tokens, expected)
        thread.join()
        peer = client.engine.peer(number)
    assert peer.failed == peer.requests == 1 and not peer.joined
    if lie == "a refusal":
        assert "refuses: no memory" in peer.error  # it is asked again, later
    elif lie not in ("the end", "half an answer"):
        assert "was cut off" in peer.error


def test_nothing_is_left_of_a_server_that_stops(small_moe, client):
    """Neither its port nor a thread."""
    before = len(os.listdir("/proc/self/task"))
    with small_model(small_moe, "50%") as server:
        for _ in range(3):
            port = server.engine.listen(TOKEN, fingerprint(server.map), port=ports.free())
            number = connect(client, port)
            with socket.create_connection(("127.0.0.1", port)):
                server.engine.stop_listening()
            assert server.engine.listen(TOKEN, fingerprint(server.map), port=port) == port
            server.engine.stop_listening()
            client.engine.disconnect(number)
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before)
