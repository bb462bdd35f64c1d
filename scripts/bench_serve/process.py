"""`pyorch serve` as a process that ends with the measuring process, even if that is killed.

The last argument is a descriptor without a writer; the others are arguments of pyorch.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyorch import ports
from pyorch.bench.surroundings import MemoryGroup
from pyorch.errors import PyorchError
from pyorch.processes import end_with, started

_START_SECONDS = 600.0  # a large model may be read whole
_END_SECONDS = 60.0


def main() -> None:
    end_with(int(sys.argv.pop()))
    runpy.run_module("pyorch", run_name="__main__", alter_sys=True)


class Server:
    """A running server. port: of 127.0.0.1."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.port = port
        self._process = process
        self._log = log

    def wait_until_ready(self) -> float:
        """Waits, and returns the seconds. PyorchError: it does not start, with its own message."""
        begin = time.monotonic()
        while time.monotonic() - begin < _START_SECONDS:
            if self._process.poll() is not None:
                raise PyorchError(self.last_words() or f"the server ended with status {self._process.returncode}")
            if "pyorch: serving" in self._log.read_text(errors="replace"):
                return time.monotonic() - begin
            time.sleep(0.02)
        raise PyorchError(f"the server was not ready after {_START_SECONDS:.0f} s")

    def tokenize(self, text: bytes) -> list[int]:
        """Tokenizes a text without special tokens by the model's tokenizer."""
        body = json.dumps({"content": text.decode(errors="replace"), "add_special": False, "parse_special": False})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_END_SECONDS)
        try:
            connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())["tokens"]
        finally:
            connection.close()

    def last_words(self) -> str:
        """Returns its last message, without the prefix."""
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return said[-1].removeprefix("pyorch: ").removeprefix("error: ") if said else ""

    def stop(self) -> dict[str, Any]:
        """Stops it, and returns its statistics; {} if it manages no experts or was killed."""
        self._process.send_signal(signal.SIGTERM)
        try:
            stdout, _ = self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            stdout, _ = self._process.communicate()
        lines = [line for line in stdout.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {}


@contextlib.contextmanager
def serving(
    arguments: Sequence[str], environment: dict[str, str], group: MemoryGroup | None, directory: Path
) -> Iterator[Server]:
    """Runs `pyorch serve` with these arguments, in a memory group, in the `with` block. directory: for its log.

    REQUIRES: SIGTERM raises an exception in this process, or there is no SIGTERM.
    """
    port, log = ports.free(), directory / "server.log"
    with log.open("wb") as stderr:
        process, connection = started(
            [sys.executable, __file__, "serve", "--json", "--port", str(port), *arguments],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
            preexec_fn=group.join if group is not None else None)
    with connection:
        try:
            yield Server(process, port, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


if __name__ == "__main__":
    main()
