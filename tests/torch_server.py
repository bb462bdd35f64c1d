"""Runs programs that need torch, each in a fork of this process, which has imported torch. A program of its own.

torch and transformers take seconds to import, and must not share a process with llama.cpp:

    python torch_server.py SOCKET

A client sends one line of JSON, {"program": path, "arguments": [text]}, and gets one back, {"failure": text, "output":
text}: what went wrong, empty if nothing did, and what the program printed. The server ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import select
import socket
import sys
import traceback

import torch
import transformers


def answer(connection: socket.socket) -> None:
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        request = json.loads(stream.readline())
        sys.argv = [request["program"], *request["arguments"]]
        output, failure = io.StringIO(), ""
        with contextlib.redirect_stdout(output):
            try:
                runpy.run_path(request["program"], run_name="__main__")
            except BaseException:
                failure = traceback.format_exc()
        stream.write(json.dumps({"failure": failure, "output": output.getvalue()}) + "\n")


def main() -> None:
    transformers.AutoModelForCausalLM, transformers.AutoTokenizer  # imported when they are named
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
                    answer(connection)
                    os._exit(0)
                connection.close()
                forks.add(pid)
            forks = {pid for pid in forks if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in forks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
