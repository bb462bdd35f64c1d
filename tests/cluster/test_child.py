"""What a process that serves for a cluster answers its actor."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

from processes import HANG_SECONDS

_SERVING = """
import socket, sys
from pyorch.cluster.channel import Channel
from pyorch.cluster.child import Serving

Serving(Channel(socket.socket(fileno=int(sys.argv[1]))), {"placement": None, "model": "absent.gguf"}).answer()
"""


_SLOW = """
import socket, sys, threading
from pyorch.cluster.channel import Channel
from pyorch.cluster.child import Serving

class Slow(Serving):
    done = threading.Event()

    def connect(self):
        return self.done.wait()

    def missing(self):
        self.done.set()

Slow(Channel(socket.socket(fileno=int(sys.argv[1]))), {}).answer()
"""


def test_what_takes_long_holds_up_no_other_answer() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", _SLOW, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    ours.settimeout(HANG_SECONDS)
    with ours, ours.makefile("r") as answers:
        for number, what in enumerate(("connect", "missing")):
            ours.sendall(json.dumps({"ask": what, "with": {}, "number": number}).encode() + b"\n")
        said = [json.loads(answers.readline()) for _ in range(2)]
        assert {answer["number"]: answer["answer"] for answer in said} == {0: True, 1: None}
    assert process.wait() == -signal.SIGTERM


def test_what_cannot_be_answered_is_said_and_the_process_still_ends_with_its_actor() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", _SERVING, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                                   stderr=subprocess.DEVNULL)
    with ours, ours.makefile("r") as answers:
        for number, (what, arguments, sentence) in enumerate((
            ("dance", {}, "AssertionError: "), ("pin", {"hard": True}, "TypeError: "), ("pin", {}, "has no plan"),
            ("disk_bytes_per_second", {}, "absent.gguf: no such file"),
        )):
            ours.sendall(json.dumps({"ask": what, "with": arguments, "number": number}).encode() + b"\n")
            answer = json.loads(answers.readline())
            assert answer["number"] == number and sentence in answer["refused"]
    assert process.wait() == -signal.SIGTERM
