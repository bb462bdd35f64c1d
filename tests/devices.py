"""A device for tests: another process, whose memory no kernel of this one reaches, and whose kernels are the same."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from processes import HANG_SECONDS
from servers import wait_until

from pyorch import ports

_TRIES = 5  # a port that is free may be taken by another process before it is used


class DeviceProcess:
    """Serves ggml's RPC at `name`, until stop(). stderr goes to a file, so that it never blocks."""

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
