"""TLS between servers: who is let in, what is carried, and what becomes of a tunnel that dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

from pyorch.cluster.peers import Peers
from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.tls import ENDED, Tls
from pyorch.cluster.tunnel import Tunnel
from pyorch.cluster.tunnel_process import MAX_CONNECTIONS
from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sidecars.container import fingerprint

# Made by scripts/make_certificates.py: server for 127.0.0.1, elsewhere for another address, past for a month of 2020,
# and other/ by an authority that says the same of itself.
CERTIFICATES = Path(__file__).parents[1] / "fixtures/certificates"


def tls_of(name: str = "server", key: str = "", authority: str = "authority") -> Tls:
    return Tls(CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{key or name}.key", CERTIFICATES / f"{authority}.pem")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """The port of one that sends back what it is sent, and ends when the other end does."""
    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextlib.contextmanager
def tunnel(tls: Tls | None = None, handshake_seconds: float = HANG_SECONDS) -> Iterator[Tunnel]:
    """Where nothing is to be cut off, a handshake may take long: the machine may be busy."""
    made = Tunnel(tls or tls_of(), handshake_seconds)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def pair() -> Iterator[tuple[Tunnel, Tunnel, int, int]]:
    """Two tunnels, from one to the other and to an echo; the port that leads there, and the one with TLS between."""
    with echo() as port, tunnel() as ours, tunnel() as theirs:
        between = theirs.listen("127.0.0.1", 0, port)
        yield ours, theirs, ours.port_to("127.0.0.1", between), between


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)


def everything(connection: socket.socket) -> bytes:
    """That comes until the end, whichever way that comes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def exactly(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = connection.recv(n - len(data))
        assert piece
        data += piece
    return data


def test_what_goes_in_comes_out(pair):
    _, _, port, _ = pair
    data = np.random.default_rng(0).bytes(3_000_001)  # more than any buffer on the way
    with connected(port) as connection, connected(port) as idle:
        sending = threading.Thread(target=connection.sendall, args=(data,))
        sending.start()
        assert exactly(connection, len(data)) == data
        sending.join()
        for size in (1, 100, 16384, 16385, 70000):
            idle.sendall(data[:size])
            assert exactly(idle, size) == data[:size]


def test_what_was_said_before_an_end_arrives_before_it():
    data = np.random.default_rng(0).bytes(3_000_001)
    with socket.create_server(("127.0.0.1", 0)) as engine, tunnel() as ours, tunnel() as theirs:
        between = theirs.listen("127.0.0.1", 0, engine.getsockname()[1])

        def say_and_end() -> None:
            with engine.accept()[0] as connection:
                connection.sendall(data)

        thread = threading.Thread(target=say_and_end)
        thread.start()
        with connected(ours.port_to("127.0.0.1", between)) as connection:
            assert everything(connection) == data
        thread.join()


def test_between_tunnels_nothing_is_readable():
    """Not even by one who carries it."""
    secret = b"the cluster's token " * 100
    seen: list[bytes] = []
    with echo() as port, tunnel() as ours, tunnel() as theirs, socket.create_server(("127.0.0.1", 0)) as relay:
        between = theirs.listen("127.0.0.1", 0, port)

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    seen.append(data)
                    target.sendall(data)

        def relayed() -> None:
            with relay.accept()[0] as one, connected(between) as other:
                back = threading.Thread(target=carry, args=(other, one))
                back.start()
                carry(one, other)
                other.shutdown(socket.SHUT_WR)
                back.join()

        thread = threading.Thread(target=relayed)
        thread.start()
        with connected(ours.port_to("127.0.0.1", relay.getsockname()[1])) as connection:
            connection.sendall(secret)
            assert exactly(connection, len(secret)) == secret
        thread.join()
    assert sum(map(len, seen)) > 2 * len(secret) and b"token" not in b"".join(seen)


NOT_SIGNED = "self.signed certificate|unable to get local issuer certificate|certificate signature failure"


# In TLS 1.3 who connects judges first, and what it says of itself is judged when it has done with the handshake. The
# other one hears that in an alert.
@pytest.mark.parametrize(("tls", "listener_judges", "verdict", "alert"), [
    (tls_of("other/server", authority="other/authority"), False, NOT_SIGNED, "does not trust our authority"),
    (tls_of("other/server"), True, NOT_SIGNED, "does not trust our authority"),
    (tls_of("server", authority="other/authority"), False, NOT_SIGNED, "does not trust our authority"),
    (tls_of("past"), True, "certificate has expired", "it says that our certificate has expired"),
])
def test_who_is_not_of_the_same_authority_is_refused_by_one_end_and_the_other_one_hears_it(
    pair, tls, listener_judges, verdict, alert,
):
    _, theirs, _, between = pair
    with tunnel(tls) as stranger:
        with connected(stranger.port_to("127.0.0.1", between)) as connection:
            with contextlib.suppress(ConnectionError):  # it may be refused before that
                connection.sendall(b"let me in")
            assert everything(connection) == b""
        asks, listens = stranger.error_after(0, HANG_SECONDS), theirs.error_after(0, HANG_SECONDS)
        assert f"127.0.0.1:{between}: " in asks and "a client at 127.0.0.1:" in listens
        judges, hears = (listens, asks) if listener_judges else (asks, listens)
        assert re.search(verdict, judges), judges
        assert alert in hears, hears


def test_a_certificate_of_another_address_is_not_believed():
    with echo() as port, tunnel() as ours, tunnel(tls_of("elsewhere")) as theirs:
        between = theirs.listen("127.0.0.1", 0, port)
        with connected(ours.port_to("127.0.0.1", between)) as connection:
            assert everything(connection) == b""
        assert "IP address mismatch" in ours.error_after(0, HANG_SECONDS)


def test_who_speaks_no_tls_or_shows_no_certificate_or_an_older_version_is_cut_off(pair):
    _, theirs, port, between = pair
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"PYEX" + bytes(100), bytes(5000), b"\x16\x03\x01\xff\xff" + bytes(70000)):
        before = theirs.n_errors
        with connected(between) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            everything(connection)
        assert "a client at 127.0.0.1:" in theirs.error_after(before, HANG_SECONDS)
    for most in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context = ssl.create_default_context(cafile=str(CERTIFICATES / "authority.pem"))
        context.maximum_version = most
        before = theirs.n_errors
        with connected(between) as connection, pytest.raises(OSError):
            with context.wrap_socket(connection, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"1")
                if not secure.recv(1):
                    raise ConnectionError
        assert theirs.error_after(before, HANG_SECONDS)
    with connected(port) as connection:  # the others are carried as before
        connection.sendall(b"still there")
        assert exactly(connection, 11) == b"still there"


def test_users_need_no_certificate_and_reach_a_socket(tmp_path):
    with tunnel() as users, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "endpoint.sock"))
        listening.listen()
        port = users.listen_to_users("127.0.0.1", 0, str(tmp_path / "endpoint.sock"))
        for most in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context = ssl.create_default_context(cafile=str(CERTIFICATES / "authority.pem"))
            context.maximum_version = most
            with context.wrap_socket(connected(port), server_hostname="127.0.0.1") as secure:
                secure.sendall(b"asked")
                with listening.accept()[0] as behind:
                    assert exactly(behind, 5) == b"asked"
                    behind.sendall(b"answered")
                assert everything(secure) == b"answered"
        before = users.n_errors
        with connected(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in everything(connection)
        assert "does not send TLS" in users.error_after(before, HANG_SECONDS)
    with tunnel(handshake_seconds=0.2) as users, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "other.sock"))
        listening.listen()
        port = users.listen_to_users("127.0.0.1", 0, str(tmp_path / "other.sock"))
        while not users.n_errors:  # a busy machine may need longer than that for TLS
            with contextlib.suppress(OSError):
                with context.wrap_socket(connected(port), server_hostname="127.0.0.1") as silent:
                    assert everything(silent) == b""
        assert "nothing came of the connection in 0.2 s" in users.error_after(0)


def test_who_says_nothing_holds_nobody_up_and_is_cut_off(pair):
    _, _, port, between = pair
    with connected(between), connected(port) as connection:
        connection.sendall(b"1")
        assert connection.recv(1) == b"1"
    with echo() as at, tunnel(handshake_seconds=0.2) as impatient:
        with connected(impatient.listen("127.0.0.1", 0, at)) as silent:
            assert everything(silent) == b""
        assert "nothing came of the connection in 0.2 s" in impatient.error_after(0, HANG_SECONDS)


def test_who_fills_a_tunnel_with_silence_keeps_nobody_from_going_out():
    with contextlib.ExitStack() as stack:
        port, ours, theirs = stack.enter_context(echo()), stack.enter_context(tunnel()), stack.enter_context(tunnel())
        full = ours.listen("127.0.0.1", 0, port)
        out = ours.port_to("127.0.0.1", theirs.listen("127.0.0.1", 0, port))
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(connected(full))
        with connected(full) as one_more:
            assert everything(one_more) == b""
        assert f"more than {MAX_CONNECTIONS} connections" in ours.error_after(0, HANG_SECONDS)
        with connected(out) as connection:
            connection.sendall(b"1")
            assert connection.recv(1) == b"1"


def test_who_takes_a_connection_and_ends_it_without_a_word_is_known_for_it():
    """Whatever it may have had against the certificate."""
    with tunnel() as ours, socket.create_server(("127.0.0.1", 0)) as server:
        context = tls_of().context(listens=True)

        def serve() -> None:
            with context.wrap_socket(server.accept()[0], server_side=True) as secure:
                secure.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        thread = threading.Thread(target=serve)
        thread.start()
        with connected(ours.port_to("127.0.0.1", server.getsockname()[1])) as connection:
            assert everything(connection) == b""
        thread.join()
        assert ENDED in ours.error_after(0, HANG_SECONDS)


def test_a_tunnel_that_is_killed_breaks_its_connections_and_is_there_again_at_its_ports(pair):
    ours, _, port, _ = pair
    with connected(port) as connection:
        connection.sendall(b"1")
        assert connection.recv(1) == b"1"
        first = ours.pid
        os.kill(first, signal.SIGKILL)
        assert everything(connection) == b""
    with connected(port) as connection:
        connection.sendall(b"2")
        assert connection.recv(1) == b"2"
    assert ours.pid != first


def test_a_tunnel_ends_with_its_owner():
    program = ("import sys; from pathlib import Path; from pyorch.cluster.tls import Tls\n"
               "from pyorch.cluster.tunnel import Tunnel\n"
               "tunnel = Tunnel(Tls(*map(Path, sys.argv[1:]))); print(tunnel.pid, flush=True); sys.stdin.read()")
    files = [CERTIFICATES / name for name in ("server.pem", "server.key", "authority.pem")]
    process = subprocess.Popen([sys.executable, "-c", program, *files], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    os.kill(pid, 0)
    process.kill()
    process.communicate()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
        except OSError:
            return True

    wait_until(is_gone)


def test_certificates_that_cannot_be_used_are_refused_in_a_sentence(tmp_path):
    tls_of().check("127.0.0.1")
    tls_of().check("localhost")
    with_password = CERTIFICATES / "password.key"  # the server's
    text = tmp_path / "text"
    text.write_text("no certificate")
    server, key, authority = (CERTIFICATES / name for name in ("server.pem", "server.key", "authority.pem"))
    for tls, address, sentence in (
        (tls_of("absent"), "127.0.0.1", "the certificate .*absent.pem cannot be read: No such file"),
        (Tls(server, tmp_path, authority), "127.0.0.1", "the key .* cannot be read: Is a directory"),
        (Tls(server, key, text), "127.0.0.1", "the authority .*text is no certificate"),
        (Tls(text, key, authority), "127.0.0.1", "are not both of the format PEM"),
        (Tls(server, text, authority), "127.0.0.1", "are not both of the format PEM"),
        (tls_of("server", "elsewhere"), "127.0.0.1", "elsewhere.key is not that of the certificate .*server.pem"),
        (Tls(server, with_password, authority), "127.0.0.1", "has a password"),
        (tls_of(), "10.0.0.1", "server.pem cannot be used for 10.0.0.1: IP address mismatch"),
        (tls_of("past"), "127.0.0.1", "past.pem cannot be used for 127.0.0.1: certificate has expired"),
        (tls_of("other/server"), "127.0.0.1", "cannot be used for 127.0.0.1"),
    ):
        with pytest.raises(PyorchError, match=sentence) as error:
            tls.check(address)
        assert "\n" not in str(error.value)


# Servers with engines


NAMES = ("a", "b", "c")


@pytest.fixture
def servers(small_moe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Model, Peers, int]]]:
    """Three with TLS, which have not met: model, peers, port."""
    monkeypatch.setattr("pyorch.cluster.peers.Tunnel", lambda tls: Tunnel(tls, HANG_SECONDS))
    with contextlib.ExitStack() as stack:
        found = []
        for name in NAMES:
            model = stack.enter_context(small_model(small_moe, "60%", prefetch="none"))
            peers = Peers(model.engine, name, "token", fingerprint(model.map), tls_of())
            stack.callback(peers.close)
            found.append((model, peers, peers.listen()))
        yield found


def placement_of(model: Model) -> Placement:
    """Every expert is at b and c, none at a."""
    layers = [(layer.il, layer.n_expert) for layer in model.map.layers]
    device = np.zeros((len(NAMES), len(layers), layers[0][1]), np.int16)
    device[0] = -1
    return Placement(NAMES, *zip(*layers), device)


def decoded(model: Model, prompt: list[int]) -> list[np.ndarray]:
    with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        return [context.decode(prompt), *(context.decode([token]) for token in prompt[:3])]


def assert_right(model: Model, resident: Model, prompt: list[int]) -> None:
    for rows, right in zip(decoded(model, prompt), decoded(resident, prompt), strict=True):
        assert_same_bits(rows, right)


def meet_soon(peers: Peers, name: str, port: int) -> None:
    """One that is lost when it is silent for a second, which it may be for no reason of its own while it joins."""
    def is_met() -> bool:
        with contextlib.suppress(PyorchError):
            peers.meet(name, "127.0.0.1", port, timeout=1)
        return peers.met().get(name, False)

    wait_until(is_met)


def test_servers_compute_for_each_other_through_tls(servers, resident, prompt_tokens):
    (model, peers, _), (second, _, at_second), (third, _, at_third) = servers
    peers.meet("b", "127.0.0.1", at_second, timeout=60)
    peers.meet("c", "127.0.0.1", at_third, timeout=60)
    peers.follow(placement_of(model))
    assert_right(model, resident, prompt_tokens)
    stats = model.engine.remote_stats()
    assert stats.fallback == 0 and model.engine.stats().loads == 0
    assert second.engine.served().slots + third.engine.served().slots == stats.slots > 0


def test_a_server_with_certificates_of_another_authority_is_not_met(servers, small_moe):
    (_, _, port), *_ = servers
    with small_model(small_moe, "60%") as model:
        stranger = Peers(model.engine, "c", "token", fingerprint(model.map),
                            tls_of("other/server", authority="other/authority"))
        try:
            with pytest.raises(PyorchError, match=f"server 127.0.0.1:{port} cannot be joined by TLS: .*certificate"):
                stranger.meet("a", "127.0.0.1", port, timeout=60)
            with pytest.raises(PyorchError, match="Connection refused"):
                stranger.meet("a", "127.0.0.1", 1, timeout=60)
        finally:
            stranger.close()
        with pytest.raises(PyorchError, match="closed the connection|was lost"):  # nor is one that speaks no TLS
            model.engine.connect("127.0.0.1", port, "token", fingerprint(model.map), 60)


def test_a_tunnel_that_dies_or_hangs_costs_no_request(servers, resident, prompt_tokens):
    (model, peers, _), (_, b, at_b), (_, _, at_c) = servers
    meet_soon(peers, "b", at_b)
    peers.follow(placement_of(model))
    os.kill(b.tunnel.pid, signal.SIGSTOP)
    wait_until(lambda: not peers.met()["b"])
    assert_right(model, resident, prompt_tokens)
    assert model.engine.stats().loads > 0, "experts came from the disk"

    peers.meet("c", "127.0.0.1", at_c, timeout=60)  # a replica of all of them
    sent = model.engine.remote_stats().slots
    assert_right(model, resident, prompt_tokens)
    assert model.engine.remote_stats().slots > sent

    os.kill(peers.tunnel.pid, signal.SIGKILL)  # our own: nobody can be asked
    assert_right(model, resident, prompt_tokens)
    os.kill(b.tunnel.pid, signal.SIGCONT)
    wait_until(lambda: all(peers.met().values()))  # by themselves
    assert_right(model, resident, prompt_tokens)

