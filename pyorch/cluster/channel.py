"""Lines of JSON between the Ray actor of a server and the process that serves."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any


class Channel:
    """One end of a pair of sockets, whose end of file says that the process at the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """OSError where nobody is at the other end."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._connection.sendall(line)

    def receive(self) -> dict[str, Any] | None:
        """The next message, None after the last one."""
        try:
            line = self._file.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """The other end reads what was sent, and then the end."""
        self._file.close()
        self._connection.close()
