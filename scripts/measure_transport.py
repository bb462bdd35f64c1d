"""Measures ways to send the rows of a layer to another process and to get its results back.

    .venv/bin/python scripts/measure_transport.py [--sizes 8,16,32,64] [--rounds 7] [--calls 200] [--json]

A token of one layer is a message of 8 to 64 KiB, and as much back. The ways: a call of a Ray actor; a compiled graph of
Ray with such an actor; a plain TCP connection whose address came through Ray; such a connection through a tunnel with
TLS at both ends; and, plain and encrypted, sockets of ZeroMQ (CURVE) and calls of gRPC (TLS). Rounds of the ways
alternate; a figure is the median of the rounds' medians. Everything runs on one machine, so the figures compare the
cost of each way itself, not the network. Needs Ray, pip install 'pyorch[cluster]', pyzmq and grpcio, and for
certificates the command openssl.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pyorch.cluster.tls import Tls
from pyorch.cluster.tunnel import Tunnel
from pyorch.sizes import KiB, MiB

N_LAYERS = 48  # of the model whose time of a token is shown
WARM_UP = 20  # calls that do not count: they make buffers and open connections


class Peer:
    """The other process: an actor that echoes, by each of the ways."""

    def __init__(self) -> None:
        self._servers: list[object] = []

    def echo(self, rows: np.ndarray) -> np.ndarray:
        """Returns the same rows. Shape [n_bytes], uint8."""
        return rows

    def listen(self) -> tuple[str, int]:
        """Opens a port on the loopback interface, for one connection. Returns host and port."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._answer, args=(listener,), daemon=True).start()
        return listener.getsockname()

    def listen_securely(self, tls: Tls) -> int:
        """Opens a port behind a tunnel, and returns it."""
        self._tunnel = Tunnel(tls)
        return self._tunnel.listen("127.0.0.1", 0, self.listen()[1])

    def listen_zmq(self, keys: tuple[bytes, bytes] | None) -> int:
        """Opens a ZeroMQ socket for one peer and returns its port; encrypted if public and secret keys are given."""
        import zmq

        paired = zmq.Context.instance().socket(zmq.PAIR)
        if keys:
            paired.curve_publickey, paired.curve_secretkey = keys
            paired.curve_server = True

        def answer() -> None:
            while True:
                paired.send(paired.recv(copy=False), copy=False)

        port = paired.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=answer, daemon=True).start()
        return port

    def listen_grpc(self, tls: Tls | None) -> int:
        """Starts a gRPC server with one thread, with TLS on both sides if certificates are given; returns its port."""
        import grpc

        handler = grpc.unary_unary_rpc_method_handler(lambda rows, _context: rows)
        server = grpc.server(ThreadPoolExecutor(1), handlers=[
            grpc.method_handlers_generic_handler("rows", {"echo": handler})])
        if tls is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            key, own, authority = (Path(path).read_bytes() for path in (tls.key, tls.certificate, tls.authority))
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(
                [(key, own)], root_certificates=authority, require_client_auth=True))
        server.start()
        self._servers.append(server)  # it ends with its last reference
        return port

    @staticmethod
    def _answer(listener: socket.socket) -> None:
        with listener:
            connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            header = bytearray(4)
            while receive(connection, memoryview(header)):
                message = bytearray(header) + bytearray(int.from_bytes(header, "little"))
                receive(connection, memoryview(message)[4:])
                connection.sendall(message)


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills the buffer. False: the connection ended before its first byte."""
    n = 0
    while n < len(into):
        got = connection.recv_into(into[n:])
        if got == 0:
            if n == 0:
                return False
            raise ConnectionError("the connection ended within a message")
        n += got
    return True


class Plain:
    """A TCP connection: four bytes of length, then the rows."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = socket.create_connection(address)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def echo(self, rows: np.ndarray) -> np.ndarray:
        """Sends rows and returns the echo. Shape [n_bytes], uint8."""
        self._connection.sendmsg((len(rows).to_bytes(4, "little"), rows))
        header, answer = bytearray(4), np.empty_like(rows)
        receive(self._connection, memoryview(header))
        receive(self._connection, memoryview(answer))
        return answer

    def close(self) -> None:
        """Ends the connection, and with it the peer's thread."""
        self._connection.close()


def zmq_way(port: int, server: bytes | None) -> Callable[[np.ndarray], np.ndarray]:
    """Makes a way over ZeroMQ. server: the public key of an encrypting server."""
    import zmq

    paired = zmq.Context.instance().socket(zmq.PAIR)
    if server:
        paired.curve_publickey, paired.curve_secretkey = zmq.curve_keypair()
        paired.curve_serverkey = server
    paired.connect(f"tcp://127.0.0.1:{port}")

    def echo(rows: np.ndarray) -> np.ndarray:
        paired.send(rows, copy=False)
        return np.frombuffer(paired.recv(copy=False), np.uint8)

    return echo


def grpc_way(port: int, tls: Tls | None) -> Callable[[np.ndarray], np.ndarray]:
    import grpc

    if tls is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    else:
        authority, key, own = (Path(path).read_bytes() for path in (tls.authority, tls.key, tls.certificate))
        channel = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(authority, key, own))
    call = channel.unary_unary("/rows/echo")
    return lambda rows: np.frombuffer(call(rows.tobytes()), np.uint8)


def median_seconds(echo: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, n_calls: int) -> float:
    """Returns the time of a round trip. RuntimeError: the echo differs."""
    if not np.array_equal(echo(rows), rows):
        raise RuntimeError("the echo differs from the sent rows")
    times = []
    for _ in range(n_calls):
        begin = time.perf_counter()
        echo(rows)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def certificates(directory: str) -> Tls:
    """Makes new certificates for this machine."""
    script = Path(__file__).with_name("make_certificates.py")
    subprocess.run([sys.executable, script, "server=127.0.0.1", "-o", directory], check=True, stdout=subprocess.DEVNULL)
    return Tls(*(Path(directory) / name for name in ("server.pem", "server.key", "authority.pem")))


def measure(ray, tls: Tls, sizes: list[int], n_rounds: int, n_calls: int) -> dict[str, list[float]]:
    """Returns medians in seconds, one for each size, by way."""
    peer = ray.remote(Peer).options(num_cpus=0).remote()
    plain = Plain(tuple(ray.get(peer.listen.remote())))
    tunnel = Tunnel(tls)
    secure = Plain(("127.0.0.1", tunnel.port_to("127.0.0.1", ray.get(peer.listen_securely.remote(tls)))))
    # A graph needs an actor of its own.
    second = ray.remote(Peer).options(num_cpus=0).remote()
    import zmq
    from ray.dag import InputNode

    keys = zmq.curve_keypair()
    with InputNode() as message:
        graph = second.echo.bind(message).experimental_compile(_buffer_size_bytes=2 * max(sizes))
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "actor call": lambda rows: ray.get(peer.echo.remote(rows)),
        "compiled graph": lambda rows: ray.get(graph.execute(rows)),
        "TCP": plain.echo,
        "TLS": secure.echo,
        "ZeroMQ": zmq_way(ray.get(peer.listen_zmq.remote(None)), None),
        "ZeroMQ, CURVE": zmq_way(ray.get(peer.listen_zmq.remote(keys)), keys[0]),
        "gRPC": grpc_way(ray.get(peer.listen_grpc.remote(None)), None),
        "gRPC, TLS": grpc_way(ray.get(peer.listen_grpc.remote(tls)), tls),
    }
    rounds = {name: [[] for _ in sizes] for name in ways}
    for k, size in enumerate(sizes):
        rows = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        for echo in ways.values():
            median_seconds(echo, rows, WARM_UP)
        for _ in range(n_rounds):
            for name, echo in ways.items():
                rounds[name][k].append(median_seconds(echo, rows, n_calls))
    graph.teardown()
    plain.close()
    secure.close()
    tunnel.close()
    return {name: [statistics.median(of_size) for of_size in medians] for name, medians in rounds.items()}


def show(sizes: list[int], medians: dict[str, list[float]]) -> None:
    """Prints a table in Markdown."""
    shown = ("TCP", "TLS")
    print(f"| there and back | {' | '.join(medians)} | {' | '.join(f'{N_LAYERS} layers by {way}' for way in shown)} |")
    print("| --- |" + " --- |" * (len(medians) + len(shown)))
    for k, size in enumerate(sizes):
        cells = [f"{of_way[k] * 1e6:.0f} us" for of_way in medians.values()]
        cells += [f"{medians[way][k] * N_LAYERS * 1e3:.1f} ms" for way in shown]
        print(f"| {size // KiB} KiB | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8,16,32,64", help="of messages, in KiB, with commas between them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200, help="in a round, of each way")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes = [int(size) * KiB for size in args.sizes.split(",")]
    os.environ.update({
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on the loopback interface
    })
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * MiB, log_to_driver=False,
                 logging_level="ERROR", _temp_dir=directory)
        try:
            medians = measure(ray, certificates(f"{directory}/certificates"), sizes, args.rounds, args.calls)
        finally:
            ray.shutdown()
    if args.json:
        print(json.dumps({"bytes": sizes, "seconds": medians}))
    else:
        show(sizes, medians)
    return 0


if __name__ == "__main__":
    sys.exit(main())
