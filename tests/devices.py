"""A device for tests: another process, whose memory no kernel of this one reaches, and whose kernels are the same."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from processes import HANG_SECONDS
from servers import wait_until

from pyorch import _libs, ports


def _has_cuda() -> bool:
    library = _libs.lib_dir() / f"libggml-cuda{_libs.SUFFIX}"
    try:
        return library.exists() and ctypes.CDLL(str(library)).ggml_backend_cuda_get_device_count() > 0
    except OSError:  # CUDA's own libraries are not there
        return False


# Devices that there are: ggml's RPC always; others where `make test-vulkan` has them built, or a GPU is at hand.
KINDS = ["rpc", *(["vulkan"] if (_libs.lib_dir() / f"libggml-vulkan{_libs.SUFFIX}").exists() else []),
         *(["cuda"] if _has_cuda() else [])]

_TRIES = 5  # a port that is free may be taken by another process before it is used


class BackendDevice:
    """One that a backend of ggml has in this process."""

    kernels_of_processor = False

    def __init__(self, name: str) -> None:
        self.name = name

    def stop(self) -> None:
        """Nothing: it is in this process."""


class DeviceProcess:
    """Serves ggml's RPC at `name`, until stop(). stderr goes to a file, so that it never blocks."""

    kernels_of_processor = True  # so that it does not matter to the bits who computes what

    def __init__(self, log: Path, memory: int | None = None) -> None:
        """memory: bytes that the device can allocate; Linux only."""
        for _ in range(_TRIES):
            self.port = ports.free()
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("device_process.py")), str(self.port),
                     *([str(memory)] if memory else [])],
                    stdout=output, stderr=output,
                )
            wait_until(lambda: self._answers() or self.process.poll() is not None)
            if self.process.poll() is None:
                self.name = f"rpc:127.0.0.1:{self.port}"
                return
        raise AssertionError(log.read_text())

    def _answers(self) -> bool:
        with socket.socket() as client:
            client.settimeout(HANG_SECONDS)
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(HANG_SECONDS)

    close = stop


class CountingWire:
    """Stands between a device's clients and its process at `name`, and counts what they ask it for; or is cut."""

    ALLOCATE = 0  # RPC_CMD_ALLOC_BUFFER
    GET = 8  # RPC_CMD_GET_TENSOR
    SET = 6  # RPC_CMD_SET_TENSOR
    COPY = 9  # RPC_CMD_COPY_TENSOR
    COMPUTE = 10  # RPC_CMD_GRAPH_COMPUTE
    RECOMPUTE = 16  # RPC_CMD_GRAPH_RECOMPUTE: the latest graph of whoever asked, without saying which

    def __init__(self, device: DeviceProcess) -> None:
        self._to = ("127.0.0.1", device.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.name = f"rpc:127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._cut_at: int | None = None
        self.reset()
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        self.commands: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()  # that went either way with them
        self.small_sets = 0  # of less than a matrix of an expert

    def cut_at(self, command: int) -> None:
        """When it comes the next time, the device is lost to all of its clients."""
        self._cut_at = command

    @property
    def is_cut(self) -> bool:
        return self._listener.fileno() < 0

    def stop(self) -> None:
        self._listener.close()

    close = stop

    def _cut(self) -> None:
        for wire in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)  # which also wakes who waits for it
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            self._open += client, server
            for wire in (client, server):
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for work in (self._ask, self._answer):
                threading.Thread(target=self._until_closed, args=(work, client, server), daemon=True).start()

    def _until_closed(self, work: Callable[[socket.socket, socket.socket], None], *wires: socket.socket) -> None:
        with contextlib.suppress(OSError):
            work(*wires)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        """Each command is its number, the length of what follows as 8 bytes, and that."""
        with client.makefile("rb") as stream:
            while len(head := stream.read(9)) == 9:
                command, n = struct.unpack("<BQ", head)
                if command == self._cut_at:
                    return self._cut()
                body = stream.read(n)
                self.commands[command] += 1
                self.small_sets += command == self.SET and n < 4096
                # A question ends in how much is wanted; an answer has no number.
                self.bytes[command] += struct.unpack("<Q", body[-8:])[0] if command == self.GET else n
                server.sendall(head + body)
        server.shutdown(socket.SHUT_WR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        while data := server.recv(1 << 16):
            client.sendall(data)
        client.close()
