"""Runs programs that need torch, each in a fork of this process, which has imported torch. A program of its own.

torch and transformers take seconds to import, and must not share a process with llama.cpp:

    python torch_server.py SOCKET

Clients are torch_client.py's. The server ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import runpy
import select
import socket
import sys
import threading
import traceback
from pathlib import Path

import torch
import transformers

_OUT_OF_THE_WAY = 500  # a program may want its descriptors at any small number


def run(connection: socket.socket) -> int:
    """Becomes the process that was asked for, as far as a program can tell. Returns its exit status."""
    head, received, _, _ = socket.recv_fds(connection, 8, 253)
    if not head:
        return 0  # somebody wanted to know whether the server is there
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(head, "little")))
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for number, descriptor in zip(request["descriptors"], moved):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    resource.setrlimit(resource.RLIMIT_FSIZE, tuple(request["file_size"]))
    sys.argv = [request["program"], *request["arguments"]]
    sys.path.insert(0, str(Path(request["program"]).parent))
    try:
        runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def end_with(connection: socket.socket) -> None:
    """Who ends a program kills the client: the fork that runs it ends, too."""
    connection.recv(1)
    os._exit(1)


def serve(connection: socket.socket) -> None:
    """The work of a fork."""
    connection = socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD, _OUT_OF_THE_WAY))
    status = 1
    try:
        status = run(connection)
    finally:
        with contextlib.suppress(OSError):  # whoever asked has gone: nothing of this process is to be taken down
            connection.send(bytes([status]))
        os._exit(status)


def main() -> None:
    _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer  # imported when they are named
    gc.freeze()  # else the first collection of each fork copies all that was imported
    torch.set_num_threads(1)  # the matrices of the tests are too small to share
    forks: set[int] = set()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [], 1.0)[0]):
            if ready:
                connection, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    serve(connection)
                connection.close()
                forks.add(pid)
            forks = {pid for pid in forks if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in forks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
