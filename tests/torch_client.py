"""Asks torch_server.py to run a program. Standard library only, so that it also starts fast as a program itself:

    python torch_client.py SOCKET PYTHON PROGRAM ARGUMENT...

does what `PYTHON PROGRAM ARGUMENT...` does, with the same descriptors, environment and limits, in a fork of the server.
Where it takes the place of PYTHON altogether, modules (-m) and programs (-c) are left to that.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys


def run(connection: socket.socket, program: str, arguments: list[str], descriptors: dict[int, int]) -> int:
    """The program's exit status. descriptors: those that it shall have, by number."""
    request = json.dumps({
        "program": program, "arguments": arguments, "descriptors": list(descriptors), "environment": dict(os.environ),
        "directory": os.getcwd(), "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
    }).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "little")], list(descriptors.values()))
    connection.sendall(request)
    answer = connection.recv(1)
    return answer[0] if answer else 255  # it died


def main() -> int:
    path, python, program, *arguments = sys.argv[1:]
    if program.startswith("-"):
        os.execv(python, [python, program, *arguments])
    inherited = {}
    for number in map(int, os.listdir("/dev/fd")):
        try:
            os.fstat(number)
        except OSError:  # that of the listing itself
            continue
        inherited[number] = number
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return run(connection, program, arguments, inherited)


if __name__ == "__main__":
    sys.exit(main())
