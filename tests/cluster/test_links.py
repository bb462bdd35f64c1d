"""Links between servers are measured only by those who know the token."""

from __future__ import annotations

import socket

import pytest

from pyorch.cluster.links import Echo, measure_link
from pyorch.errors import PyorchError


@pytest.fixture
def echo():
    echo = Echo("127.0.0.1", "secret")
    yield echo
    echo.close()


def test_a_link_has_latency_and_bandwidth(echo: Echo) -> None:
    measured = measure_link("127.0.0.1", echo.port, "secret")
    assert 0 < measured.latency < 60 and measured.bytes_per_second > 0


def test_who_has_another_token_is_refused_and_others_are_answered(echo: Echo) -> None:
    with pytest.raises(PyorchError, match=f"127.0.0.1 port {echo.port} has another token"):
        measure_link("127.0.0.1", echo.port, "other")
    assert measure_link("127.0.0.1", echo.port, "secret").latency > 0


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x7f\xff\xff\xff"])
def test_who_sends_something_else_is_dropped_and_others_are_answered(echo: Echo, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", echo.port)) as stranger:
        stranger.sendall(sent)
    assert measure_link("127.0.0.1", echo.port, "secret").latency > 0


def test_after_it_is_closed_nobody_is_answered(echo: Echo) -> None:
    port = echo.port
    echo.close()
    with pytest.raises(PyorchError, match="cannot be reached"):
        measure_link("127.0.0.1", port, "secret")
