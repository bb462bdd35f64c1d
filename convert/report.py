"""The child's end of the pipe to the process that started it. Standard library only: see converter_process."""

from __future__ import annotations

import json
import os


class Report:
    """Sends messages, one JSON object a line. Where nobody listens any more, the work is pointless and ends."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def send(self, **message: object) -> None:
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            os._exit(1)
