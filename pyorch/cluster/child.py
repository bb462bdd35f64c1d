"""The process that serves a model for a server of a cluster: `pyorch serve`, and a thread that obeys the actor.

Its argument is the descriptor of its end of a channel, on which the actor first says what to serve. When the channel
ends, the actor is gone, and this process with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pyorch.cluster.channel import Channel
from pyorch.cluster.members import Counters
from pyorch.errors import PyorchError
from pyorch.llama import memory
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.remote import HERE
from pyorch.serve.server import Address, serve
from pyorch.sidecars.container import fingerprint

_METRICS = {  # of llama-server, and what they are called here
    "requests_processing": "requests_running", "requests_deferred": "requests_waiting",
    "prompt_tokens_total": "prompt_tokens", "prompt_seconds_total": "prompt_seconds",
    "tokens_predicted_total": "generated_tokens", "tokens_predicted_seconds_total": "generated_seconds",
}
_END_SECONDS = 10.0  # for the end of a server whose actor is gone
_PORT_SECONDS = 30.0  # in which the port of a process that was killed becomes free


class Serving:
    """What the actor can ask of a process that serves: its methods named in ASKED."""

    ASKED = ("counters", "pin", "listen", "connect")

    def __init__(self, channel: Channel, job: Mapping[str, Any]) -> None:
        self._channel = channel
        self._job = job
        self._peers: dict[str, int] = {}  # those that compute for this server, and their numbers
        self._listening = False
        self._engine: Engine | None = None
        self._address: Address | None = None
        self._pinned = 0
        self._using = threading.Lock()  # the engine, which the end of the server takes away

    @contextlib.contextmanager
    def attached(self, engine: Engine | None, address: Address) -> Iterator[None]:
        """While the server answers requests. engine: None of a model without experts."""
        with self._using:
            self._engine, self._address = engine, address
        with contextlib.suppress(OSError):
            self._channel.send({"ready": address.url})
        try:
            yield
        finally:
            with self._using:
                self._engine = None

    def answer(self) -> None:
        """Until the channel ends, with the actor. Then this process does, in order if that is soon done."""
        while (message := self._channel.receive()) is not None:
            try:
                assert message["ask"] in self.ASKED
                with self._using:
                    answer = {"answer": getattr(self, message["ask"])(**message["with"])}
            except PyorchError as error:
                answer = {"refused": str(error)}
            with contextlib.suppress(OSError):
                self._channel.send(answer | {"number": message["number"]})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_SECONDS)
        os._exit(1)

    def counters(self) -> dict[str, Any]:
        """Counters, as a dictionary."""
        import psutil

        counters = Counters(os.getpid(), psutil.Process().memory_info().rss, pinned=self._pinned, **self._metrics())
        if self._engine is not None:
            stats = self._engine.stats()
            counters = dataclasses.replace(counters, **{
                name: getattr(stats, name)
                for name in ("budget_bytes", "used_bytes", "hits", "misses", "bytes_read", "failures")
            })
        if self._engine is not None and self._listening:
            remote, served = self._engine.remote_stats(), self._engine.served()
            counters = dataclasses.replace(counters, sent=remote.slots, fallback=remote.fallback,
                                           waited_ns=remote.wait_ns, served=served.slots)
        return dataclasses.asdict(counters)

    def pin(self) -> dict[str, Any]:
        """Keeps the experts of the plan in memory, of each layer alike many, as many as the budget lets.

        Returns how many are kept, and why not all: a sentence, or "".
        """
        placed = self._job["placed"].get(self._job["name"], {})
        reason = ""
        depth = max(map(len, placed.values()), default=0) if self._engine is not None else 0
        for rank in range(depth):
            for il, experts in placed.items():
                if rank < len(experts) and not reason:
                    try:
                        self._engine.pin(int(il), [experts[rank]])
                        self._pinned += 1
                    except PyorchError as error:
                        reason = str(error)
        return {"pinned": self._pinned, "reason": reason}

    def listen(self) -> None:
        """Computes for other servers from now on."""
        job = self._job
        if self._engine is None:
            raise PyorchError("a model without experts has none to place")
        n_threads = job["settings"].get("n_threads") or memory.physical_cores()
        self._engine.listen(job["token"], job["fingerprint"], job["address"], job["peer_port"], n_threads)
        self._listening = True

    def connect(self, name: str) -> None:
        """Lets another server compute the experts that the plan gives it, and not this one."""
        if self._engine is None:
            raise PyorchError("the server ends")
        if name not in self._peers:  # else it was lost, and is joined again without this
            job = self._job
            address, port = job["peers"][name]
            self._peers[name] = self._engine.connect(address, port, job["token"], job["fingerprint"])
            self._place()

    def _place(self) -> None:
        """Each expert that is not this server's has its place at one that has it, alike many at each of several."""
        placed = self._job["placed"]
        for il, n_expert in self._engine.n_expert.items():
            own = set(placed.get(self._job["name"], {}).get(str(il), ()))
            others = {number: set(placed.get(name, {}).get(str(il), ())) for name, number in self._peers.items()}
            peers = np.full(n_expert, HERE, np.int32)
            for expert in range(n_expert):
                holders = [number for number, experts in others.items() if expert in experts]
                if holders and expert not in own:
                    peers[expert] = holders[expert % len(holders)]
            self._engine.set_placement(il, peers)

    def _metrics(self) -> dict[str, Any]:
        """Of llama-server, by the names of Counters; nothing where it does not answer soon."""
        text = (self._address.get("/metrics") if self._address is not None else None) or ""
        found = dict(re.findall(r"^llamacpp:(\w+) ([0-9.e+-]+)$", text, re.MULTILINE))
        return {
            ours: float(found[theirs]) if ours.endswith("seconds") else int(float(found[theirs]))
            for theirs, ours in _METRICS.items() if theirs in found
        }


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command in the foreground
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    job = channel.receive()
    if job is None:
        return 1
    serving = Serving(channel, job)
    threading.Thread(target=serving.answer, daemon=True).start()
    try:
        with ModelMap(job["model"]) as model_map:
            found = fingerprint(model_map)
        if found != job["fingerprint"]:
            raise PyorchError(f'{job["model"]} is another model than the cluster serves: its fingerprint is '
                              f'{found[:12]}, that of the others {job["fingerprint"][:12]}')
        if job["restarted"]:
            for port in (job["port"], job["peer_port"]):
                _wait_for_port(job["address"], port)
        return serve(job["model"], job["budget"], job["flags"], beside=serving.attached, **job["settings"])
    except PyorchError as error:
        with contextlib.suppress(OSError):
            channel.send({"failed": str(error)})
        return 2


def _wait_for_port(host: str, port: int) -> None:
    """The process that had it before is dying, which takes a while with gigabytes. serve() says it if it does not."""
    deadline = time.monotonic() + _PORT_SECONDS
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    while time.monotonic() < deadline:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(where)
                return
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
