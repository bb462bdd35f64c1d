"""What the processes of one test session share: files that one of them makes, and a process that has torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch_client
from filelock import FileLock
from processes import HANG_SECONDS

from pyorch.llama import warm

KEPT_IN = warm.kept_in  # which conftest.py replaces

_SOCKET = "torch.socket"
_VARIABLE = "PYORCH_TESTS_SHARED"  # names the directory to processes that the first one starts


def begin() -> None:
    """Makes the directory of the session. It may grow to gigabytes: nothing is kept for later."""
    directory = tempfile.gettempdir()
    # The path of a socket may have about a hundred letters.
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="pyorch-tests-", dir=directory if len(directory) < 60 else "/tmp")


def end() -> None:
    shutil.rmtree(directory(), ignore_errors=True)


def directory() -> Path:
    return Path(os.environ[_VARIABLE])


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A directory that the first process to ask for it makes, and all others read."""
    made = directory() / name
    with FileLock(f"{made}.lock"):
        if not made.exists():
            part = directory() / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(made)
    return made


def with_torch(program: Path, *arguments: object) -> str:
    """Runs a program that needs torch in a fork of a process that has imported torch. Returns what it printed."""
    with _connection() as connection, open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as output:
        descriptors = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
        status = torch_client.run(connection, str(program), [str(argument) for argument in arguments], descriptors)
        output.seek(0)
        text = output.read()
    assert status == 0, f"{program}: status {status}\n{text}"
    return text


@contextlib.contextmanager
def torch_at_hand() -> Iterator[None]:
    """Programs that this process starts with its interpreter are forks of that process, too. They are as ever, but for
    the seconds that each would take to import torch."""
    _connection().close()
    program = directory() / f"python-{os.getpid()}"
    client = Path(torch_client.__file__)
    command = [sys.executable, "-S", "-E", str(client), str(directory() / _SOCKET), sys.executable]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        yield


def _connection() -> socket.socket:
    """To the server. It ends with the process that started it; then the next one starts another."""
    path = directory() / _SOCKET
    with FileLock(f"{path}.lock"):
        connection = _connected(path)
        if connection is None:
            path.unlink(missing_ok=True)
            server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("torch_server.py")), str(path)],
                                      stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            atexit.register(_stop, server)
            while (connection := _connected(path)) is None:
                assert server.poll() is None, "the process with torch did not start"
                time.sleep(0.05)
    connection.settimeout(HANG_SECONDS)
    return connection


def _connected(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def _stop(server: subprocess.Popen) -> None:
    server.stdin.close()
    server.wait()
