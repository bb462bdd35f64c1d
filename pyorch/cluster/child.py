"""The process that serves a model for a server of a cluster: `pyorch serve` with a thread that obeys the actor.

Its argument is the descriptor of a connection, on which the actor first sends the job. When the connection ends, the
actor is dead, and this process ends too.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pyorch import ports
from pyorch.cluster.members import Counters, Job, Work
from pyorch.cluster.peers import Peers
from pyorch.cluster.placement.placement import Move, Placement, refuse_lacking
from pyorch.cluster.tls import check_keys
from pyorch.cluster.tunnel import Tunnel
from pyorch.errors import BudgetError, PyorchError
from pyorch.llama import cores
from pyorch.runtime.disk import MEASURE_SECONDS, measure_bandwidth
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.address import Address
from pyorch.serve.llama_server import Flags
from pyorch.serve.server import serve
from pyorch.sidecars import packs
from pyorch.sidecars.container import fingerprint
from pyorch.sizes import format_bytes

_METRICS = {  # llama-server's metrics, and the names in Counters
    "requests_processing": "requests_running", "requests_deferred": "requests_waiting",
    "prompt_tokens_total": "prompt_tokens", "prompt_seconds_total": "prompt_seconds",
    "tokens_predicted_total": "generated_tokens", "tokens_predicted_seconds_total": "generated_seconds",
}
_END_SECONDS = 10.0  # for the end of a server without an actor
_GRACE_SECONDS = 4.0  # for running requests at the end; the actor waits longer before it kills this process
_CONNECT_PAUSES = 0.25, 8.0  # seconds between attempts to reach another server
_ARRIVE_SECONDS = 60.0  # for moving experts
_LOOK_SECONDS = 0.005  # between two checks for them
_PORT_SECONDS = 30.0  # until the port of a killed process is free


class Serving:
    """The requests of an actor to its serving process, as methods.

    An answer is "answer" or "refused", the number of the request, and the result or a message.
    """

    SLOW = ("connect", "disk_bytes_per_second", "hold")  # run in their own threads

    def __init__(self, connection: Connection, job: Job | None) -> None:
        self._connection = connection
        self._job = job
        self._life = secrets.token_hex(8)
        self._peers: Peers | None = None
        self._engine: Engine | None = None
        self._address: Address | None = None
        self._key = ""  # the endpoint's API key
        self._pinned: set[tuple[int, int]] = set()  # il and expert
        self._unmet: dict[str, str] = {}  # servers that do not compute for this one yet, with the reason
        self._ending = threading.Event()
        self._n_using = 0  # threads that use the engine, which is closed when the server ends
        self._used = threading.Condition()

    @contextlib.contextmanager
    def attached(self, engine: Engine | None, address: Address) -> Iterator[None]:
        """Holds the engine while the server answers requests. engine: None for a model without experts."""
        self._engine, self._address = engine, address
        self.say("ready", address.url if not self._job.https else
                 Address(self._job.address, self._job.port, address.prefix, "https").url)
        try:
            yield
        finally:
            self._ending.set()
            with self._used:
                self._used.wait_for(lambda: self._n_using == 0)
                self._engine = None

    def set_key(self, key: str) -> None:
        """Sets the endpoint's API key, for requests of metrics."""
        self._key = key

    def obey(self) -> None:
        """Answers the actor until the connection ends. Then ends this process, in order if that takes not too long."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                question = self._connection.recv()
                with self._used:
                    self._n_using += 1
                if question[1] in self.SLOW:
                    threading.Thread(target=self._answer, args=question, daemon=True).start()
                else:
                    self._answer(*question)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_SECONDS)
        os._exit(1)

    def _answer(self, number: int, what: str, arguments: dict[str, Any]) -> None:
        try:
            answer = "answer", number, getattr(self, what)(**arguments)
        except PyorchError as error:
            answer = "refused", number, str(error)
        except Exception as error:  # otherwise this thread would end, and the process would outlive its actor
            traceback.print_exc()
            answer = "refused", number, f"{type(error).__name__}: {error}"
        finally:
            with self._used:
                self._n_using -= 1
                self._used.notify_all()
        self.say(*answer)

    def say(self, *message: object) -> None:
        with contextlib.suppress(OSError), self._used:
            self._connection.send(message)

    def counters(self) -> tuple[Counters, list[str]]:
        """Returns the counters, and a sentence for each server that does not compute for this one yet."""
        import psutil

        found: dict[str, Any] = {"pinned": len(self._pinned), **self._metrics()}
        if self._engine is not None:
            stats = self._engine.stats()
            found |= {name: getattr(stats, name) for name in (
                "budget_bytes", "used_bytes", "hits", "misses", "bytes_read", "failures")}
            found["stalled_ns"] = stats.stall_ns
        if self._engine is not None and self._peers is not None:
            remote, served = self._engine.remote_stats(), self._engine.served()
            found |= {
                "sent": remote.slots, "fallback": remote.fallback, "waited_ns": remote.wait_ns, "read": remote.read,
                "served": served.slots, "served_messages": served.requests, "served_ns": served.compute_ns,
                "met": sum(self._peers.met().values()),
                "activations": sum(int(row.sum()) for row in self._activations()),
            }
        return Counters(os.getpid(), psutil.Process().memory_info().rss, **found), list(self._unmet.values())

    def work(self) -> Work:
        peers = self._following().peers()
        stats, remote, served = self._engine.stats(), self._engine.remote_stats(), self._engine.served()
        rows = self._activations()
        activations = np.zeros((len(rows), max(map(len, rows))))
        for layer, row in enumerate(rows):
            activations[layer, : len(row)] = row
        sent = remote.slots - remote.fallback
        return Work(
            self._life, activations, sent, sum(peer.requests for peer in peers), sum(peer.bytes_sent for peer in peers),
            int(activations.sum()) - sent + served.slots, stats.hits + stats.misses, served.slots, served.compute_ns,
            remote.read,
        )

    def pin(self) -> tuple[int, str]:
        """Pins the plan's experts, equally many of each layer, as far as the budget allows.

        Returns:
            The number of pinned experts, and why some are missing. The reason is "" if none is missing, or if only the
            room is missing that a layer needs at once.
        """
        placement = self._following().placement
        own = [np.flatnonzero(row).tolist() for row in placement.held[placement.servers.index(self._job.name)]]
        by_rank = [(layer, experts[rank]) for rank in range(max(map(len, own))) for layer, experts in enumerate(own)
                   if rank < len(experts)]
        reason = self._keep(by_rank)
        return len(self._pinned), reason

    def lacking(self, experts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the experts for which this server accepts bytes, as layer (an index) and number.

        It accepts none for a resident expert, and none with a pack, which has other bytes.
        """
        layers = self._following().placement.layers
        return [] if self._engine.has_pack else [
            (layer, expert) for layer, expert in experts
            if not self._engine.residency(layers[layer]).resident[expert]]

    def offer(self, layer: int, expert: int, matrices: bytes) -> None:
        """Accepts the bytes of an expert (layer index and number), so that it need not be read."""
        self._engine.offer(self._following().placement.layers[layer], expert, matrices)

    def hold(self, take: list[tuple[int, int]], drop: list[tuple[int, int]]) -> str:
        """Pins and unpins experts, given as layer (an index) and number. Returns when the pinned ones are resident.

        Returns:
            Why some cannot stay, or "".
        """
        layers = self._following().placement.layers
        for layer, expert in drop:
            if (layers[layer], expert) in self._pinned:
                self._engine.unpin(layers[layer], [expert])
                self._pinned.remove((layers[layer], expert))
        reason, deadline = self._keep(take), time.monotonic() + _ARRIVE_SECONDS
        while any((layers[layer], expert) in self._pinned and not self._engine.residency(layers[layer]).resident[expert]
                  for layer, expert in take):
            if time.monotonic() > deadline:
                raise PyorchError("experts of the new plan do not arrive in its memory")
            if self._ending.wait(_LOOK_SECONDS):  # the end of the server waits for this method
                raise PyorchError("it ends")
        return reason

    def listen(self) -> None:
        """Starts to compute for other servers. Servers that are met compute for this one, as the plan says."""
        job = self._job
        if self._engine is None:
            raise PyorchError("a model without experts has none to place")
        with packs.open_model(job.model, share=True) as model_map:  # the file may have changed since `up`
            refuse_lacking(packs.share_of(model_map), job.placement, job.name)
        peers = Peers(self._engine, job.name, job.token, job.fingerprint, job.tls, job.rows)
        self._engine.allow_reads(job.reads)
        peers.follow(job.placement)
        peers.listen(job.address, job.peer_port, job.settings.get("n_threads") or cores.physical_cores())
        self._peers = peers

    def follow(self, placement: Placement) -> None:
        """Follows another plan from now on."""
        self._following().follow(placement)

    def move(self, moves: list[Move]) -> None:
        """Changes the plan by these moves from now on."""
        self._following().move(moves)

    def connect(self, name: str) -> None:
        """Connects to another server, which listens. Repeats until that server computes for this one."""
        if name in self._unmet:
            return
        self._unmet[name], pause = "", _CONNECT_PAUSES[0]
        try:
            while not self._ending.is_set():
                try:
                    return self._following().meet(name, *self._job.peers[name])
                except PyorchError as error:
                    self._unmet[name] = f"server {name} does not compute for this one yet: {error}"
                self._ending.wait(pause)
                pause = min(2 * pause, _CONNECT_PAUSES[1])
        finally:
            del self._unmet[name]

    def disk_bytes_per_second(self) -> float:
        """Measures the disk: reads experts past the page cache, with as many requests at once as it needs."""
        with packs.open_model(self._job.model, share=True) as model_map:
            return measure_bandwidth(model_map, 2 * MEASURE_SECONDS).bytes_per_second

    def _following(self) -> Peers:
        if self._engine is None or self._peers is None:
            raise PyorchError("the server ends, or has no plan")
        return self._peers

    def _activations(self) -> list[np.ndarray]:
        """Returns the activations of each layer of the plan, in its order."""
        return [self._engine.activations(il) for il in self._peers.placement.layers]

    def _keep(self, experts: Iterable[Sequence[int]]) -> str:
        """Pins experts (layer index and number) until memory is full. Returns why some are missing, or ""."""
        layers = self._peers.placement.layers
        for layer, expert in experts:
            try:
                self._engine.pin(layers[layer], [expert])
                self._pinned.add((layers[layer], expert))
            except BudgetError:
                return self._excess()
            except PyorchError as error:
                return str(error)
        return ""

    def _excess(self) -> str:
        """Returns by how much the plan exceeds the memory, or ""."""
        placement, budget = self._peers.placement, self._engine.stats().budget_bytes
        n_held = placement.held[placement.servers.index(self._job.name)].sum(axis=1)
        with ModelMap(self._job.model) as model_map:
            wanted = sum(int(n) * model_map.layer(il).expert_bytes for il, n in zip(placement.layers, n_held))
        return "" if wanted <= budget else (
            f"its experts of the plan take {format_bytes(wanted, round_up=True)}, and its memory is "
            f"{format_bytes(budget)}: experts that do not stay are read when they are used")

    def _metrics(self) -> dict[str, Any]:
        """Returns llama-server's metrics by the names in Counters; empty if it does not answer soon."""
        text = (self._address.get("/metrics", self._key) if self._address is not None else None) or ""
        found = dict(re.findall(r"^llamacpp:(\w+) ([0-9.e+-]+)$", text, re.MULTILINE))
        return {
            ours: float(found[theirs]) if ours.endswith("seconds") else int(float(found[theirs]))
            for theirs, ours in _METRICS.items() if theirs in found
        }


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the foreground command
    connection = Connection(int(sys.argv[1]))
    try:
        job, restarted = connection.recv()
    except (EOFError, OSError):
        return 1
    serving = Serving(connection, job)
    threading.Thread(target=serving.obey, daemon=True).start()
    try:
        with ModelMap(job.model) as model_map:
            found, expected = fingerprint(model_map), job.fingerprint
        if found != expected:
            raise PyorchError(f"{job.model} is another model than the cluster serves: its fingerprint is {found[:12]}, "
                              f"that of the others {expected[:12]}")
        if restarted:
            for port in (job.port, job.peer_port):
                _wait_for_port(job.address, port)
        flags = ["--metrics", *job.flags]
        if job.keys is not None:  # the file may have changed since it was checked
            check_keys(job.keys)
            flags += ["--api-key-file", job.keys]
        serving.set_key(_first_key(flags))
        with contextlib.ExitStack() as before:
            where = ["--host", before.enter_context(_secured(job)) if job.https else job.address, "--port",
                     str(job.port)]
            return serve(job.model, job.budget, [*where, *flags], grace=_GRACE_SECONDS, beside=serving.attached,
                         placed=job.placement is not None, **job.settings)
    except PyorchError as error:
        serving.say("failed", str(error))
        return 2


def _first_key(flags: Sequence[str]) -> str:
    try:
        return next(iter(Flags(flags).api_keys), "")
    except OSError as error:
        raise PyorchError(f"the API keys cannot be read: {error}") from None


@contextlib.contextmanager
def _secured(job: Job) -> Iterator[str]:
    """Serves HTTPS to users at a server's address. Yields the socket for llama-server, which only this user can reach.

    TLS for users has its own process, so that users cannot block the connections between servers.
    """
    # In the current directory, from which `down` removes the remains of a killed server, if Ray is the cluster's own.
    # A socket's path must be short.
    here = os.curdir if os.access(os.curdir, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=here) as directory, contextlib.closing(Tunnel(job.tls)) as tunnel:
        inner = os.path.relpath(os.path.join(directory, "endpoint.sock")) if here else f"{directory}/endpoint.sock"
        tunnel.listen_to_users(job.address, job.port, inner)
        yield inner


def _wait_for_port(host: str, port: int) -> None:
    """Waits for a port of a dying process: with gigabytes of memory that takes a while. serve() reports a failure."""
    deadline = time.monotonic() + _PORT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), ports.held(host, port):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
