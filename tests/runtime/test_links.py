"""Links between servers that are cut without a word, or slow; and disks that are faster than they, or slower."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sidecars.container import fingerprint

TOKEN = "a token for tests"


class Link:
    """A relay to a port, as a link whose ends do not hear of what becomes of it.

    cut: nothing passes, and nobody is told, new connections included. cut_at: a piece of so many bytes or more cuts it
    before it passes. delay: seconds, of each piece that passes.
    """

    def __init__(self, port: int) -> None:
        self.cut, self.cut_at, self.delay = False, float("inf"), 0.0
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._under_way: deque[tuple[float, socket.socket, bytes]] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for one in (self._listening, *self._other):
            one.close()

    def _run(self) -> None:
        while not self._ended:
            if self.cut:
                time.sleep(0.005)
                continue
            for key, _ in self._selector.select(0.005 if not self._under_way else 0.001):
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._receive(key.fileobj)
            while self._under_way and self._under_way[0][0] <= time.monotonic() and not self.cut:
                _, target, data = self._under_way.popleft()
                with contextlib.suppress(OSError):
                    target.sendall(data) if data else target.shutdown(socket.SHUT_WR)

    def _accept(self) -> None:
        one = self._listening.accept()[0]
        try:
            other = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            one.close()
            return
        for end, far in ((one, other), (other, one)):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other[end] = far
            self._selector.register(end, selectors.EVENT_READ)

    def _receive(self, source: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(1 << 20)
        self.cut |= len(data) >= self.cut_at
        if not data:
            self._selector.unregister(source)
        self._under_way.append((time.monotonic() + self.delay, self._other[source], data))


class SlowDisk:
    """A source that takes its time."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds

    def read(self, file: int, offset: int, size: int) -> bytes:
        time.sleep(self._seconds)
        with open(self._path, "rb") as opened:
            return os.pread(opened.fileno(), size, offset)


@contextlib.contextmanager
def linked(path: Path, **arguments: object) -> Iterator[tuple[Model, Model, Link, int]]:
    """A client, a server, the link between them, and the server's number. All experts have their place there."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(small_model(path, "50%", prefetch="none", **arguments))
        server = stack.enter_context(small_model(path, "50%", prefetch="none"))
        link = Link(server.engine.listen(TOKEN, fingerprint(server.map)))
        stack.callback(link.close)
        stack.callback(server.engine.stop_listening)
        yield client, server, link, placed(client, link, HANG_SECONDS)


def placed(client: Model, link: Link, timeout: float) -> int:
    """The server's number, when it is joined, and all experts have their place there."""
    number = client.engine.connect("127.0.0.1", link.port, TOKEN, fingerprint(client.map), timeout)
    for layer in client.layers.values():
        client.engine.set_placement(layer.il, [number] * layer.n_expert)
    return number


def replaced(client: Model, link: Link, number: int, timeout: float) -> int:
    """The same with another timeout: a short one is for servers that are to be lost. One that is silent for so long
    while it joins, as it may be on a busy machine, is asked again."""
    found: list[int] = []

    def is_joined() -> bool:
        with contextlib.suppress(PyorchError):
            found.append(placed(client, link, timeout))
        return bool(found)

    wait_until(is_joined)
    client.engine.disconnect(number)
    return found[0]


def decoded(model: Model, prompt: list[int], n_tokens: int = 3) -> list[np.ndarray]:
    with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        return [context.decode(prompt), *(context.decode([token]) for token in prompt[:n_tokens])]


@pytest.fixture(scope="module")
def expected(resident: Model, prompt_tokens: list[int]) -> list[np.ndarray]:
    return decoded(resident, prompt_tokens)


def assert_right(model: Model, prompt: list[int], expected: list[np.ndarray]) -> None:
    for rows, right in zip(decoded(model, prompt), expected, strict=True):
        assert_same_bits(rows, right)


def evict_all(model: Model) -> None:
    for layer in model.layers.values():
        model.engine.evict(layer.il, range(layer.n_expert))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_link_that_is_cut_without_a_word_costs_no_request_and_is_used_when_it_heals(
    small_moe, prompt_tokens, expected
):
    with linked(small_moe) as (client, server, link, number):
        assert_right(client, prompt_tokens, expected)
        assert client.engine.stats().loads == 0 and client.engine.remote_stats().fallback == 0
        number = replaced(client, link, number, timeout=0.5)
        link.cut = True
        wait_until(lambda: not client.engine.peer(number).joined and
                   "said nothing for 500 ms" in client.engine.peer(number).error)
        assert_right(client, prompt_tokens, expected)
        before = client.engine.remote_stats().slots
        assert client.engine.stats().loads > 0

        link.cut = False

        def is_used() -> bool:
            evict_all(client)
            assert_right(client, prompt_tokens, expected)
            return client.engine.remote_stats().slots > before

        wait_until(is_used)
        assert client.engine.peer(number).times_lost >= 1


def test_a_link_that_is_cut_inside_a_request_costs_nothing_but_time(small_moe, prompt_tokens, expected):
    with linked(small_moe) as (client, server, link, number):
        number = replaced(client, link, number, timeout=0.5)
        link.cut_at = 2048  # bytes: of signs of life there are fewer, of the rows of a question more

        def is_cut() -> bool:
            """Not where the server was lost before it was asked, on a busy machine."""
            evict_all(client)
            assert_right(client, prompt_tokens, expected)
            return link.cut

        wait_until(is_cut)
        assert client.engine.peer(number).failed >= 1 and client.engine.remote_stats().fallback > 0


def test_where_the_link_is_slower_than_the_disk_experts_are_read(small_moe, prompt_tokens, expected):
    with linked(small_moe, source=SlowDisk(small_moe, 0.0)) as (client, server, link, number):
        client.engine.allow_reads(True)
        link.delay = 0.5  # there, and back: no disk takes so long for 48 KiB
        client.engine.prefetch(0, range(8))  # from then on it is known how fast the disk is
        client.engine.wait_idle()
        assert_right(client, prompt_tokens, expected)
        stats, asked = client.engine.remote_stats(), client.engine.peer(number)
        assert stats.read > 0 and stats.fallback == 0 and client.engine.stats().loads > 8
        assert 1 <= asked.requests < 32, "four ubatches of eight layers"

        client.engine.allow_reads(False)
        evict_all(client)
        link.delay = 0.0
        loads, read = client.engine.stats().loads, client.engine.remote_stats().read
        assert_right(client, prompt_tokens, expected)
        assert client.engine.stats().loads == loads and client.engine.remote_stats().read == read
        assert client.engine.peer(number).requests == asked.requests + 32


def test_where_the_disk_is_slower_than_the_link_servers_are_asked(small_moe, prompt_tokens, expected):
    with linked(small_moe, source=SlowDisk(small_moe, 0.3)) as (client, server, link, number):
        client.engine.allow_reads(True)
        client.engine.prefetch(0, [0])
        client.engine.wait_idle()
        client.engine.evict(0, [0])
        loads = client.engine.stats().loads
        assert_right(client, prompt_tokens, expected)
        assert client.engine.stats().loads == loads and client.engine.remote_stats().read == 0
        assert client.engine.peer(number).requests == 32
